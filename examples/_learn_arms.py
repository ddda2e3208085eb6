"""The arms of the comparison: each is a trainer with its own options, added to those that all arms share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# All arms divide by the same denominator: all tokens of the rollouts trained on. Dividing by the kept tokens would make
# gradients 5 to 20 times larger, and gradient clipping would cut those of some arms only. (AdamW itself would not see a
# constant factor.)
SAME = {"loss_denominator": "all"}

# GSPO's ratio is the geometric mean over a sequence; clip range and denominator are those of its paper.
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4}


@dataclass(frozen=True)
class Arm:
    name: str
    d3s: bool  # D3STrainer if true, else TRL's own trainer
    learning_rate: float  # found by `make learn` for this example's task; used by --short
    options: Mapping[str, object] = field(default_factory=dict)


def arms(group: int) -> list[Arm]:
    """All arms, scaled to this group size. The paper's schedule, for 32 rollouts, keeps a quarter and later all."""
    few, half, many = max(2, group // 4), max(2, group // 2), group
    tokens = {"token_ratio_start": 0.05, "token_ratio_end": 0.20}
    grows = {**SAME, **tokens, "rollouts_start": few, "rollouts_end": many}
    midpoint = {**SAME, **constant((few + many) // 2, 0.125)}
    pods = {**SAME, **constant(half, 1.0), "rollout_scope": "group", "advantages_from": "kept"}  # its paper: 1/4 to 1/2
    return [
        Arm("GRPO", False, 4e-4),
        Arm("PODS", True, 4e-4, pods),
        Arm("D3S-I", True, 4e-4, {**grows, "rollout_scope": "group"}),
        Arm("D3S", True, 2e-4, grows),
        Arm("D3S, no schedule", True, 4e-4, midpoint),
        Arm("GSPO", False, 4e-4, GSPO),
        Arm("GSPO + D3S", True, 4e-4, {**GSPO, **grows}),
    ]


def constant(rollouts: int, tokens: float) -> dict[str, float]:
    return {
        "rollouts_start": rollouts,
        "rollouts_end": rollouts,
        "token_ratio_start": tokens,
        "token_ratio_end": tokens,
    }
