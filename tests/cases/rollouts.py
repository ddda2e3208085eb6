"""The ops on groups of rewards or advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d3s_kernels import reference
from d3s_kernels.check import tolerances

from .draw import FLOATS, Draw
from .meaning import public, public_arguments
from .row import Arguments, op
from .tokens import number, segmented, with_rule


@op(public("group_advantages"), results=tolerances.FUNCTIONS["group_advantages"].results)
def group_advantages(draw: Draw) -> Arguments:
    """Sometimes all finite rewards are equal but for rounding: each is 1, or the next lower number of the dtype."""
    given = segmented(draw, "rewards", dtypes=(*FLOATS, torch.float64))
    rewards = given["rewards"]
    if draw.integer(0, 2) == 2:
        below = 1 - torch.finfo(rewards.dtype).eps / 2  # the largest value below 1
        given["rewards"] = torch.where(rewards > 0, 1.0, below).to(rewards.dtype).where(rewards.isfinite(), rewards)
    return given | {
        "scale": draw.choice(("group", "batch", "none")),
        "eps": draw.choice((1e-4, 1e-6, 0.0)),
        "ddof": draw.choice((1, 0)),
        "tolerance": draw.choice((None, 0.0, 0.3)),  # only groups_without_spread has this argument
        "share": draw.choice((0.2, 0.5, 1.0)),  # only variance_mass has this argument
    }


def whole_rewards(draw: Draw, given: Arguments) -> Arguments:
    """Sometimes converts the rewards to bool or to an integer dtype."""
    dtype = draw.choice((None, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64))
    if dtype is not None:
        given["rewards"] = given["rewards"].nan_to_num(posinf=3, neginf=-3).abs().to(dtype)
    return given


def _max_variance(pooled: bool = False, **given: Any) -> Tensor:
    if not pooled:
        return public("max_variance_select")(**given)
    return public("select_rollouts")(advantages=given.pop("values"), pooled=True, **given)


@op(_max_variance, "mask")
def max_variance_select(draw: Draw) -> Arguments:
    return segmented(draw, "values") | number(draw, "keep") | {"pooled": draw.flag()}


def rollout_rules(draw: Draw, rule: str | None = None) -> Arguments:
    """Draws the arguments of the public function select_rollouts, with the given rule, or with a random rule."""
    given = max_variance_select(draw)
    given = public_arguments("select_rollouts", given | {"advantages": given["values"]})
    return with_rule(draw, given, rule or draw.choice(reference.ROLLOUT_RULES))
