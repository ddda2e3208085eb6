"""The fixed cost of a call, measured on tiny inputs that need no gradient."""

import pytest
import torch

import d3s_kernels as d3s

from . import inputs
from .harness import Contest

FEW = torch.tensor([0.5, -1.0, 2.0, 0.0], device=inputs.device)
GROUPS = FEW.view(2, 2)
LOGITS = FEW.view(1, 4)
LABELS = torch.tensor([2], device=inputs.device)
KEPT = FEW > 0
IDS = KEPT.to(torch.int8)

CALLS = {
    "topk_mask": lambda: d3s.topk_mask(FEW, 0.5),
    "select_tokens": lambda: d3s.select_tokens(FEW, FEW, 0.5),
    "compact": lambda: d3s.compact(KEPT, 4),
    "group_advantages": lambda: d3s.group_advantages(GROUPS),
    "max_variance_select": lambda: d3s.max_variance_select(FEW, 2),
    "select_rollouts": lambda: d3s.select_rollouts(GROUPS, 1),
    "importance_ratio": lambda: d3s.importance_ratio(FEW, FEW, KEPT),
    "entropy_groups": lambda: d3s.entropy_groups(FEW, KEPT),
    "adaptive_clip": lambda: d3s.adaptive_clip(FEW, IDS, vocab_size=9),
    "entropy": lambda: d3s.entropy(LOGITS),
    "logprob_entropy": lambda: d3s.logprob_entropy(LOGITS, LABELS),
}


@pytest.mark.parametrize("op", CALLS)
def test_overhead(contest: Contest, op: str) -> None:
    contest(f"overhead of {op}", "4 values", CALLS[op], yardsticks={"x.sum()": lambda: FEW.sum()}, of_caller=True)
