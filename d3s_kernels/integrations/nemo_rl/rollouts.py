"""The rollouts of a batch that NeMo-RL trains on."""

from __future__ import annotations

from typing import Any, Literal

from ...rollouts import RolloutRule
from .._assumptions import require
from .._options import check_options, rollouts_of
from .._rollouts import choose_rollouts, ranked_by
from .table import NEMO_RL


def keep_rollouts(
    data: Any,
    group_size: int,
    multiple: int,
    *,
    rollouts: float = 0.5,
    rollout_rule: RolloutRule = "max_variance",
    rollout_scope: Literal["batch", "group"] = "batch",
) -> Any:
    """The chosen rows of a batch, for a ``Policy.train`` of your own; they keep their advantages.

    Args:
        data: a ``BatchedDataDict`` with ``advantages`` and ``token_mask`` ``[B, S]`` and ``sample_mask`` ``[B]``; the
            rollouts of a prompt one after the other.
        group_size: ``grpo.num_generations_per_prompt``.
        multiple: ``policy.train_global_batch_size``: the number of kept rows is rounded up to a multiple of it.
        rollouts: what is kept of a group: a share up to 1, or a number from 2 on.
        rollout_rule, rollout_scope: ``rule`` and ``scope`` of :func:`d3s_kernels.select_rollouts`.

    Raises:
        ValueError: a bad option, rows that are no whole groups or steps, advantages that differ within a rollout.
        RuntimeError: the installed NeMo-RL differs from what is assumed.
    """
    require(NEMO_RL, "keep_rollouts")
    check_options({"rollouts": rollouts, "rollout_rule": rollout_rule, "rollout_scope": rollout_scope})
    advantages, mask = data["advantages"], (data["token_mask"] * data["sample_mask"].unsqueeze(-1)).bool()
    rows = len(advantages)
    for name, size in (("group_size", group_size), ("multiple", multiple)):
        if size < 1 or rows % size:
            raise ValueError(f"{name}: got {size} with {rows} rows; takes a divisor of {rows}")
    of_rollouts = advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))  # at the first token
    if ((advantages != of_rollouts) & mask).any():
        raise ValueError("advantages: got different ones for the tokens of a rollout; takes one for each rollout")
    ranked = ranked_by(of_rollouts.flatten(), mask.any(dim=1), rollout_rule).view(-1, group_size)
    keep = rollouts_of(rollouts, group_size)
    kept = choose_rollouts(ranked, keep, rollout_scope, multiple, rule=rollout_rule)
    return data.select_indices(kept.nonzero().flatten())
