"""Tiny models with LM heads of many kinds, and the scores of their heads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
import trl.trainer.utils as trl_utils
from torch import Tensor

from d3s_kernels.integrations.trl.head import d3s_head

SHAPE = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2, untied": ("Qwen2", {"tie_word_embeddings": False}),
    "Gemma 2: caps its logits": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 5.0}),
    "Cohere: scales its logits": ("Cohere", {"logit_scale": 0.25}),
    "MiniCPM3: divides its hidden states": (
        "MiniCPM3",
        {"dim_model_base": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
        | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    ),
    "Phi: has a bias": ("Phi", {}),
}
TEMPERATURE = 0.7
Scores = tuple[Tensor, Tensor, Tensor]

# Before 1.16, TRL has only Triton kernels, which need a GPU.
needs_trls = pytest.mark.skipif(not hasattr(trl_utils, "_use_triton"), reason="this TRL has no head for CPUs")


def with_fused_head(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    kind, config = MODELS[name]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SHAPE, **config))
    with torch.no_grad():  # spreads the logits so that entropies differ
        model.get_output_embeddings().weight.mul_(10)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    outputs = ("log_probs", "entropy")
    trl_utils.add_fused_lm_head(model.to(dtype), temperature=TEMPERATURE, outputs=outputs, **options)
    return model


def draw_labels() -> Tensor:
    labels = torch.randint(2, SHAPE["vocab_size"], (3, 9))
    labels[:, :4] = labels[0, 6:] = -100
    return labels


def fused(model: Any, labels: Tensor, ours: bool) -> tuple[Tensor, Tensor]:
    with d3s_head() if ours else nullcontext():
        output = model(labels.clamp(min=0), labels=labels, fused_lm_head=True)
    return output.log_probs, output.entropy


def with_gradient(model: Any, scores: tuple[Tensor, Tensor]) -> Scores:
    """Log-probabilities, entropies and the gradient of a loss of both."""
    logprob, entropy = scores
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((logprob * 2 - entropy).sum(), parameters, allow_unused=True, materialize_grads=True)
    return logprob.detach(), entropy.detach(), torch.cat([grad.flatten().float() for grad in found])
