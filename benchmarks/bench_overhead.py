"""The fixed cost of a call on tiny inputs, without and with a gradient, beside `x.sum()` of such an input."""

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


LEAF = FEW.clone().requires_grad_()
LOGITS_WITH_GRADIENT = LOGITS.clone().requires_grad_()

# Each call records a graph, and so does `x.sum()`; no backward runs.
CALLS_WITH_GRADIENT = {
    "importance_ratio": lambda: d3s.importance_ratio(LEAF, FEW, KEPT),
    "entropy": lambda: d3s.entropy(LOGITS_WITH_GRADIENT),
    "logprob_entropy": lambda: d3s.logprob_entropy(LOGITS_WITH_GRADIENT, LABELS),
}


@pytest.mark.parametrize("op", CALLS)
def test_overhead(contest: Contest, op: str) -> None:
    contest(f"overhead of {op}", "4 values", CALLS[op], yardsticks={"x.sum()": lambda: FEW.sum()}, of_caller=True)


@pytest.mark.parametrize("op", CALLS_WITH_GRADIENT)
def test_overhead_with_a_gradient(contest: Contest, op: str) -> None:
    call, yardsticks = CALLS_WITH_GRADIENT[op], {"x.sum()": lambda: LEAF.sum()}
    contest(f"overhead of {op} with a gradient", "4 values", call, yardsticks=yardsticks, of_caller=True)
