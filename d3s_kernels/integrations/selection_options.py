"""The options of a selection, which TRL, verl and ms-swift have under the same names, with the same defaults."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..rollouts import RolloutRule
from ..tokens import TokenRule


def option(default: Any, help: str) -> Any:
    """A field with its help. On the command line it takes the words of its type, where that is a Literal."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class SelectionOptions:
    """Which rollouts and tokens are kept. A trainer's options inherit these."""

    rollouts_start: float = option(
        0.25,
        "Rollouts of each group that are trained on at the start: at most 1 is a share of the group, rounded half up; "
        "above 1 it is their number. Clamped to [2, the group's]. TRL rounds all of them up to a multiple of processes "
        "x steps per generation, so that a small per_device_train_batch_size leaves little to drop.",
    )
    rollouts_end: float = option(
        1.0, "Rollouts of each group that are trained on at the end: a share or a number, likewise."
    )
    token_ratio_start: float = option(0.05, "Share of the kept rollouts' tokens that gets a gradient at the start.")
    token_ratio_end: float = option(0.20, "Share of the kept rollouts' tokens that gets a gradient at the end.")
    schedule_shape: Literal["linear", "cosine", "exponential"] = option(
        "linear", "The way from start to end; 'linear' is the paper's."
    )
    rollout_rule: RolloutRule = option(
        "max_variance",
        "Which rollouts are kept, by their advantages: those that vary most (D3S, PODS), the 'highest', those with the "
        "'largest_abs' (CPPO), some of each 'percentile', or 'random' ones; see d3s_kernels.select_rollouts.",
    )
    rollout_scope: Literal["batch", "group"] = option(
        "batch",
        "'batch' chooses from all groups together (D3S); 'group' keeps the same number of each group (D3S-I, and the "
        "subset that PODS picks).",
    )
    token_rule: TokenRule = option(
        "advantage_entropy",
        "By what tokens are ranked: |advantage| x entropy (D3S), 'entropy' (80/20), |'advantage'|, or at 'random' "
        "(S-GRPO). 'entropy_quantile' keeps all at or above a quantile, as TRL's top_entropy_quantile on a single "
        "process; see d3s_kernels.select_tokens.",
    )
    token_scope: Literal["batch", "sequence"] = option(
        "batch",
        "'batch' ranks the tokens of all sequences of all processes together; 'sequence' keeps the share of each "
        "sequence.",
    )
    loss_denominator: Literal["kept", "all"] = option(
        "kept",
        "What gradients are averaged over: 'kept' tokens, which makes them larger by about 1 / the share kept "
        "(gradient clipping sees that, AdamW does not: mind max_grad_norm), or 'all' valid ones.",
    )
    drop_zeros: bool = option(False, "Leave tokens of score 0 out as well, even if fewer than the share remain.")
    advantages_from: Literal["all", "kept"] = option(
        "all",
        "'all': advantages are those of the whole group (D3S). 'kept': normalised anew over the kept rollouts of each "
        "group (PODS, with rollout_scope='group' and token ratios of 1).",
    )
