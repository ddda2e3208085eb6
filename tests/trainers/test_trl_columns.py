"""Which padding may be cut off: the models for which prompts are cut have the same scores with and without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import slow

pytest.importorskip("trl")
from test_savings import OF_QWEN, SIZES
from transformers import AutoConfig, AutoModel, LlamaConfig

from d3s_kernels.integrations.trl.columns import RELATIVE, MayCut, what_may_be_cut
from d3s_kernels.savings.model import OWN_HEAD_DIM

QUICK = {"qwen2", "gemma3_text", "gpt_oss"}
KINDS = [kind if kind in QUICK else slow(kind, shows="that padding changes no score") for kind in sorted(RELATIVE)]
TOKENS, PADDING = 12, 37


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_changes_no_score(kind: str) -> None:
    own: dict[str, Any] = {"head_dim": 16} if kind in OWN_HEAD_DIM else {}
    own |= OF_QWEN if kind.endswith("_moe") else {}
    config = AutoConfig.for_model(kind, **SIZES, **own, sliding_window=4, use_sliding_window=True, max_window_layers=0)
    torch.manual_seed(0)
    body = AutoModel.from_config(config, attn_implementation="eager").eval()
    tokens = torch.randint(1, SIZES["vocab_size"], (2, TOKENS))
    padded = torch.nn.functional.pad(tokens, (PADDING, 5))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (PADDING, 5))
    with torch.no_grad():
        alone = body(tokens).last_hidden_state
        within = body(padded, attention_mask=mask).last_hidden_state[:, PADDING : PADDING + TOKENS]
    torch.testing.assert_close(within, alone, rtol=1e-4, atol=1e-5)
    assert what_may_be_cut(config, 100) == MayCut(prompts=True, completions=True)


@pytest.mark.parametrize(
    ("rope", "columns", "expected"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 63, MayCut(True, True)),
        ({"rope_type": "dynamic", "factor": 2.0}, 64, MayCut(False, False)),
        ({"rope_type": "longrope", "original_max_position_embeddings": 16}, 15, MayCut(True, True)),
        ({"rope_type": "longrope", "original_max_position_embeddings": 16}, 16, MayCut(False, False)),
        ({"rope_type": "yarn", "factor": 2.0}, 1_000, MayCut(True, True)),
    ],
)
def test_nothing_is_cut_from_a_limit_of_columns_on(rope: dict[str, Any], columns: int, expected: MayCut) -> None:
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = rope | {"rope_theta": 1e4}
    assert what_may_be_cut(config, columns) == expected


@pytest.mark.parametrize("kind", ["gpt2", "llama4_text", "bloom", "mpt"])
def test_prompts_of_other_models_stay(kind: str) -> None:
    assert what_may_be_cut(AutoConfig.for_model(kind), 1_000) == MayCut(prompts=False, completions=True)
