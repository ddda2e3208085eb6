"""Counts the operations of a model's matrix products, from its ``config.json``. A multiply-add counts as two
operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# The supported types of models. tests/test_savings.py compares their operations with torch's counter. A layer has
# attention, over all positions or over a window. A layer also has either an MLP of three matrices, or experts of three
# matrices each.
DENSE = {"gemma", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}
NORM_AT_END = {"gemma2", "gemma3_text", "glm4", "olmo2", "olmo3"}  # the MLP's last product goes through a norm
EXPERTS = {"gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
# If the config of such a model has no head_dim, the model's head_dim is not hidden size / heads.
OWN_HEAD_DIM = {"gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "qwen3"}
NUMBERS = {  # values of a config of Llama's or Mixtral's type, each with its option on the command line
    "num_hidden_layers": "--layers", "hidden_size": "--hidden", "intermediate_size": "--intermediate",
    "num_attention_heads": "--heads", "num_key_value_heads": "--kv-heads", "head_dim": "--head-dim",
    "vocab_size": "--vocab", "num_local_experts": "--experts", "num_experts_per_tok": "--experts-per-token",
}  # fmt: skip
INSTEAD = (
    "; if the model has attention and an MLP or experts, and nothing else, give its numbers (--layers, --hidden, ...)"
)


class Model(NamedTuple):
    """A model's multiply-adds for one token, in all layers together, and the sizes of its LM head."""

    linear: int  # the weights that multiply a token: projections, MLP or the token's experts, router
    not_again: int  # the part of ``linear`` that activation checkpointing does not compute again
    attention: int  # layers x heads x head_dim, for each of attention's two products and each position
    hidden: int
    vocabulary: int

    def body(self, rows: int, columns: int, frozen: bool = False) -> tuple[int, int, int]:
        """Returns the operations of the body's forward, of its recomputation, and of its backward.

        A forward of L columns has ``2 rows L (linear + 2 attention L)`` operations, since attention counts as full
        squares. A backward has twice as many operations, but leaves out the gradients of the weights if the weights are
        ``frozen``. The recomputation of a layer stops at the last tensor that the layer's backward reads (torch's
        ``early_stop``). If a layer ends with a product, that tensor is the input of the product.
        """
        tokens, attention = 2 * rows * columns, 4 * rows * columns**2 * self.attention
        recompute = tokens * (self.linear - self.not_again) + attention
        return tokens * self.linear + attention, recompute, tokens * self.linear * (2 - frozen) + 2 * attention


def from_config(config: Mapping[str, Any], numbers: Mapping[str, Any] | None = None) -> Model:
    """Returns the model that a ``config.json``, or its ``text_config``, describes. ``numbers`` override values of the
    config. Raises a ValueError if the ``model_type`` or a type of layer is unknown, or if a size is missing or is not a
    whole number of at least 1.
    """
    config = {**(config.get("text_config") or config), **(numbers or {})}
    name, dense = config.get("model_type"), config.get("mlp_only_layers") or ()
    if name not in (known := DENSE | NORM_AT_END | EXPERTS):
        raise ValueError(f"model_type: got {name!r}; takes {', '.join(sorted(known))}{INSTEAD}")
    if others := sorted({*(config.get("layer_types") or ())} - {"full_attention", "sliding_attention"}):
        raise ValueError(f"layer_types: got {others[0]!r}; takes full_attention and sliding_attention{INSTEAD}")

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if type(value) is not int or value < 1:
            raise ValueError(f"{NUMBERS.get(key, key)}: got {value!r} for {key}; takes a whole number of at least 1")
        return value

    hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    head_dim = size("head_dim", None if name in OWN_HEAD_DIM else hidden // heads)
    every = size("decoder_sparse_step", 1)
    sparse = sum(name in EXPERTS and at % every == 0 and at - 1 not in dense for at in range(1, layers + 1))
    linear = layers * 2 * hidden * head_dim * (heads + size("num_key_value_heads"))
    mlps = (layers - sparse) * 3 * hidden * size("intermediate_size") if sparse < layers else 0
    if sparse:
        width = size("moe_intermediate_size" if name.endswith("_moe") else "intermediate_size")
        experts = size("num_local_experts", config.get("num_experts"))
        shared = 3 * size("shared_expert_intermediate_size") + 1 if name == "qwen2_moe" else 0  # + 1 for its gate
        linear += sparse * hidden * (experts + 3 * size("num_experts_per_tok") * width + shared)
    not_again = 0 if name in NORM_AT_END else mlps // 3
    return Model(linear + mlps, not_again, layers * heads * head_dim, hidden, size("vocab_size"))
