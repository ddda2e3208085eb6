"""Tiny models with LM heads of many kinds."""

from __future__ import annotations

import pytest
import trl.trainer.utils as trl_utils
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SHAPE = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
MODELS = {
    "Qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "Qwen2, untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "Gemma 2: caps its logits": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=5.0)
    ),
    "Cohere: scales its logits": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "Phi: has a bias": lambda: PhiForCausalLM(PhiConfig(**SHAPE)),
}


# Before 1.16, TRL has only Triton kernels, which need a GPU.
needs_trls = pytest.mark.skipif(not hasattr(trl_utils, "_use_triton"), reason="this TRL has no head for CPUs")
