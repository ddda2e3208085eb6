"""The ops that compute the weights of tokens in a loss: importance ratios, entropy groups and clip ranges."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from d3s_kernels.check import tolerances

from .draw import Draw
from .meaning import public, public_arguments, step
from .row import Arguments, differentiable, op
from .tokens import segmented


def _groups(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Draws the group of each token: int8, from -2 to 15. A value below 0 means that the token has no group."""
    ids = torch.randint(-2, draw.integer(1, 16), shape, generator=draw.generator(), dtype=torch.int8)
    return draw.laid_out(ids)


def _gradient(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    return tolerances.gradient_of_ratios(exact, public_arguments("importance_ratio", arguments))


def _gradient_from_ratios(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    log_ratios, zeros = arguments["ratio"].log(), torch.zeros_like(arguments["ratio"])
    return _gradient(exact, {**arguments, "logprob": log_ratios, "old_logprob": zeros})


@op(
    public("importance_ratio"),
    results=tolerances.FUNCTIONS["importance_ratio"].results,
    gradients={"logprob": _gradient},
)
def importance_ratio(draw: Draw) -> Arguments:
    """Draws log-probabilities before and after an update of the policy. Most of them change only by little."""
    shape, offsets = draw.segments()
    generator, level = draw.generator(), draw.choice(("token", "sequence", "entropy_group"))
    old = -20 * torch.rand(shape, generator=generator)
    moves = torch.tensor([0.0, 1e-3, 0.1, 1.0])[torch.randint(4, shape, generator=generator)]
    low, high = draw.choice(((-20.0, 20.0), (-math.inf, 10.0), (-0.5, 0.25), (-math.inf, math.inf)))
    given = {
        "logprob": draw.laid_out(old + moves * torch.randn(shape, generator=generator)),
        "old_logprob": draw.laid_out(old),
        "mask": draw.mask(shape),
        "groups": _groups(draw, shape) if level == "entropy_group" else None,
        "offsets": offsets,
        "level": level,
        "denominator": draw.choice(("self", "old")),
        "low": low,
        "high": high,
    }
    return differentiable(draw, given, "logprob")


@op(step("importance_ratio_backward"), results={"grad_logprob": _gradient_from_ratios})
def importance_ratio_backward(draw: Draw) -> Arguments:
    given = importance_ratio(draw)
    far = draw.choice((0.0, 100.0))  # with 100 some ratios are infinite
    return given | {
        "grad_ratio": draw.values(tuple(given["logprob"].shape), dtypes=(torch.float32,), special=()),
        "ratio": (given["logprob"].detach() - given["old_logprob"] + far).exp(),
    }


@op(public("entropy_groups"), "groups")
def entropy_groups(draw: Draw) -> Arguments:
    given = segmented(draw, "entropy", dtypes=(torch.float32,))
    quantiles = draw.choice(([0.8], [0.2, 0.5], [0.3, 0.5, 0.7, 0.8, 0.9], []))
    return given | {"quantiles": quantiles, "pooled": draw.flag()}


@op(public("adaptive_clip"), results=tolerances.FUNCTIONS["adaptive_clip"].results)
def adaptive_clip(draw: Draw) -> Arguments:
    shape, offsets = draw.segments()
    return {
        "entropy": draw.laid_out(5 * torch.rand(shape, generator=draw.generator())),
        "groups": _groups(draw, shape),
        "mask": draw.mask(shape),
        "offsets": offsets,
        "vocab_size": draw.choice((1000, 2, 151_936)),
        "alpha": draw.choice((0.02, 0.5)),
    }
