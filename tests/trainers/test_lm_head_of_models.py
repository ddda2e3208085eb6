"""``lm_head``: what it gives for a model is the model's own logits, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
TEMPERATURE = 0.7


def made(kind: str, **options: Any) -> Any:
    """A tiny causal language model of random weights."""
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**{**SHAPE, **options})
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    return with_large_logits(next(filter(None, (getattr(transformers, kind + end, None) for end in endings)))(config))


def with_large_logits(model: Any) -> Any:
    """Without dropout, and with logits that differ by some units."""
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(10)
        if head.bias is not None:
            head.bias.normal_()
    return model.eval()


def with_images(kind: str, text: str, **options: Any) -> Any:
    """A language model within one that also reads images."""
    of_text = getattr(transformers, f"{text}Config")(**SHAPE, **options)
    vision = getattr(transformers, "SiglipVisionConfig" if kind == "Gemma3" else "CLIPVisionConfig")(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = getattr(transformers, f"{kind}Config")(text_config=of_text, vision_config=vision, image_token_id=7)
    return with_large_logits(getattr(transformers, f"{kind}ForConditionalGeneration")(config))


MODELS: dict[str, Callable[[], Any]] = {
    "Qwen2, tied": lambda: made("Qwen2", tie_word_embeddings=True),
    "Qwen2, untied": lambda: made("Qwen2", tie_word_embeddings=False),
    "Gemma 2: a soft cap": lambda: made("Gemma2", head_dim=16, final_logit_softcapping=5.0),
    "Gemma 3": lambda: made("Gemma3", head_dim=16),
    "Gemma 3 with images": lambda: with_images("Gemma3", "Gemma3Text", head_dim=16),
    "Granite: divides": lambda: made("Granite", logits_scaling=8.0),
    "Granite MoE: divides": lambda: made("GraniteMoe", logits_scaling=6.0, num_local_experts=2, num_experts_per_tok=1),
    "Cohere: multiplies": lambda: made("Cohere", logit_scale=0.25),
    "HyperCLOVA X: multiplies by logits_scaling": lambda: made("HyperCLOVAX", logits_scaling=0.5),
    "Falcon-H1: multiplies": lambda: made(
        "FalconH1", lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "OLMo 2": lambda: made("Olmo2"),
    "GPT-2": lambda: made("GPT2", n_embd=32, n_layer=1, n_head=2),
    "Phi: a bias": lambda: made("Phi"),
    "OPT: its decoder is called": lambda: made("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "MPT: a name without effect": lambda: made("Mpt", d_model=32, n_layers=1, n_heads=2, logit_scale=0.5),
    "Llava": lambda: with_images("Llava", "Llama"),
}


def with_peft(model: Any, **config: Any) -> Any:
    """The model with an adapter, as if that had been trained."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def with_cap(**adapter: Any) -> Any:
    return with_peft(MODELS["Gemma 2: a soft cap"](), **adapter)


def with_virtual_tokens() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(MODELS["Qwen2, untied"](), config)


ADAPTED: dict[str, Callable[[], Any]] = {
    "an adapter elsewhere": lambda: with_cap(target_modules=["q_proj"]),
    "modules_to_save": lambda: with_cap(target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def scores(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As a loop of one's own computes them."""
    language_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = language_model.base_model(tokens).last_hidden_state
    return d3s.linear_logprob_entropy(hidden, labels=tokens, **d3s.lm_head(model, TEMPERATURE))


def of_logits(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    logprob = (logits / TEMPERATURE).log_softmax(-1)
    return logprob.gather(-1, tokens[..., None])[..., 0], -(logprob.exp() * logprob).sum(-1)


@pytest.mark.parametrize("name", [*MODELS, *ADAPTED])
def test_scores_and_gradients_are_those_of_the_models_own_logits(name: str) -> None:
    model, tokens = (MODELS | ADAPTED)[name](), torch.randint(8, 131, (2, 7))
    found, expected = scores(model, tokens), of_logits(model(tokens).logits, tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours, theirs = (
        torch.autograd.grad((2 * logprob - entropy).sum(), trained, allow_unused=True, materialize_grads=True)
        for logprob, entropy in (found, expected)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


LINEAR, CHANGED = "takes a linear layer, since log-prob", "changes the last hidden states of its body before it gives"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "T5, tied": (
        lambda: made("T5", d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, tie_word_embeddings=True), CHANGED
    ),
    "MiniCPM3": (
        lambda: made(
            "MiniCPM3", dim_model_base=8, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8, head_dim=8,
        ), CHANGED,
    ),
    "BERT": (lambda: made("Bert", is_decoder=True), r"logits also depend on cls\.predictions\.transform.* would be"),
    "an adapter of the head (trl#4612)": (lambda: with_cap(target_modules=["lm_head"]), f"an adapter, .*{LINEAR}"),
    "prompt learning": (with_virtual_tokens, "with a PEFT adapter that adds tokens to its prompts"),
    "trainable tokens": (
        lambda: with_cap(target_modules=["q_proj"], trainable_token_indices=[3, 5], ensure_weight_tying=True),
        f"whose token_adapter.* would be ignored .*{LINEAR}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(d3s.UnsupportedHead, match=message):
        d3s.lm_head(make())


def test_without_its_adapters_a_model_has_its_first_head() -> None:
    model, tokens = ADAPTED["modules_to_save"](), torch.randint(8, 131, (1, 5))
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(scores(model, tokens), of_logits(model(tokens).logits, tokens), rtol=0, atol=1e-5)


def test_kernels_of_attention_that_a_cpu_lacks_are_put_back() -> None:
    """A model may be looked at before it is moved to its GPU."""
    config = (model := MODELS["Gemma 3 with images"]()).config
    config.text_config._attn_implementation = "flash_attention_2"
    before = [part._attn_implementation for part in (config, config.text_config, config.vision_config)]
    d3s.lm_head(model)
    assert [part._attn_implementation for part in (config, config.text_config, config.vision_config)] == before
    assert before[1] == "flash_attention_2"
