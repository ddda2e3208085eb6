"""How far the results of ops may be off that ``d3s_kernels/_exact.py`` has no rule for, or only a wider one.

A rule takes the exact result and the call's arguments, and gives a tensor that broadcasts to the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d3s_kernels import _exact
from d3s_kernels._exact import Allowed, Arguments

from .meaning import public_arguments

_HEAD = _exact.FUNCTIONS["linear_logprob_entropy"]


def _public(name: str, arguments: Arguments) -> dict[str, Any]:
    """The arguments as those of the public function, with the incoming gradients."""
    return public_arguments(name, arguments) | {name: arguments.get(name) for name in ("grad_logprob", "grad_entropy")}


def gradient_of_logits(exact: Tensor, arguments: Arguments) -> Tensor:
    return _exact.gradient_of_logits(exact, _public("logprob_entropy", arguments))


def gradient_of_ratios(exact: Tensor, arguments: Arguments) -> Tensor:
    return _exact.gradient_of_ratios(exact, public_arguments("importance_ratio", arguments))


def gradient_of_ratios_from_ratios(exact: Tensor, arguments: Arguments) -> Tensor:
    log_ratios, zeros = arguments["ratio"].log(), torch.zeros_like(arguments["ratio"])
    return gradient_of_ratios(exact, {**arguments, "logprob": log_ratios, "old_logprob": zeros})


def equal_where_known(exact: Tensor, arguments: Arguments) -> Tensor:
    return torch.zeros(exact.shape).masked_fill(exact.isnan(), torch.inf)


def counts(exact: Tensor, arguments: Arguments) -> Tensor:
    """Equal, except that masked values, whose key is 0, may count as the lowest digit, which no search reaches."""
    limit = torch.zeros(exact.shape, dtype=torch.float64)
    limit[:, 0] = int((arguments["keys"] == 0).sum())
    return limit


def states(exact: Tensor, arguments: Arguments) -> Tensor:
    """For (m, S, T, the label's logit). The maximum and the label's logit are copies of logits, and so are exact."""
    total, dot = exact[..., 1].abs(), exact[..., 2].abs()
    most = total.nan_to_num() + dot.nan_to_num()
    unknown = torch.zeros_like(most).masked_fill(exact[..., 2].isnan(), torch.inf)  # rows with NaN or infinity
    return torch.stack([unknown, 3e-6 * (1 + most) + unknown, 3e-6 * (1 + most), torch.zeros_like(most)], -1)


# ---- the LM head -----------------------------------------------------------------------------------------------------


def of_head(name: str) -> Allowed:
    """The rule for the head's result or gradient of that name. (tests/test_head.py has a closer one.)"""
    rule = {**_HEAD.results, **_HEAD.gradients}[name]
    return lambda exact, arguments: rule(exact, _public("linear_logprob_entropy", arguments))


def kept_product(exact: Tensor, arguments: Arguments) -> Tensor:
    """Some rounding steps of the terms of each sum, and of the logits' dtype."""
    hidden, weight = (arguments[name].double().abs() for name in ("hidden", "weight"))
    terms = float((hidden @ weight.T).max()) if len(hidden) and len(weight) else 0.0
    if arguments.get("bias") is not None and len(weight):
        terms += float(arguments["bias"].double().abs().max())
    steps = 2**-21 + 8 * torch.finfo(arguments["logits_dtype"]).eps
    return torch.where(exact.isfinite(), steps * terms, 0.0)


def gradient_of_places(exact: Tensor, arguments: Arguments) -> Tensor:
    """As of the logits, and some rounding steps of a soft cap's slope."""
    temperature = torch.as_tensor(public_arguments("entropy", arguments).get("temperature", 1.0))
    coldest = float(temperature.min()) if temperature.numel() else 1.0
    given = [arguments.get(f"grad_{name}") for name in ("logprob", "entropy")]
    most = sum(float(part.abs().max()) for part in given if part is not None and part.numel())
    return torch.full(exact.shape, 2**-16 * most / coldest)


def kept_gradient(exact: Tensor, arguments: Arguments) -> Tensor:
    """Some rounding steps of all terms together, and of the result in the dtype of the gradient it is added to."""
    matrix = arguments["weight"] if "weight" in arguments else arguments["hidden"]
    most = max(1.0, float(matrix.double().abs().max()) if matrix.numel() else 0.0)  # 1: of the bias
    limit = 2**-21 * most * arguments["grad"].double().abs().sum() * torch.ones(exact.shape)
    return limit + 2 * torch.finfo(arguments["out"].dtype).eps * (exact.abs().nan_to_num() + limit)


def product(exact: Tensor, arguments: Arguments) -> Tensor:
    hidden, weight = (arguments[name].double().abs() for name in ("hidden", "weight"))
    return 2**-21 * (hidden @ weight.T)
