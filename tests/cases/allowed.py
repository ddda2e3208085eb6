"""How far the results of ops may be off that ``d3s_kernels/_exact.py`` has no rule for, or only a wider one.

A rule takes the exact result and the call's arguments, and gives a tensor that broadcasts to the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from d3s_kernels import _exact, reference
from d3s_kernels._exact import Allowed, Arguments

from .meaning import public_arguments

_HEAD_TENSORS = ("hidden", "weight", "bias")


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


def head(arguments: Arguments) -> dict[str, Tensor]:
    """The allowed error of each result, and of the gradients its norm. A logit is off by some rounding steps of the
    terms of its sum, and all other errors follow from that to first order.

    The gradient of a logit is off by 1e-6 g p / temperature in addition, and in half precision it is rounded to the
    dtype of the weight, as the result is; below the smallest normal number, 6e-5 in float16, the steps of that dtype
    do not get smaller. Errors of different logits are independent, so that their squares add up.
    """
    arguments = _public("linear_logprob_entropy", arguments)
    labels, bias, outside = arguments["labels"], arguments.get("bias"), arguments.get("label_outside", "nan")
    hidden, weight = (arguments[name].detach().double() for name in ("hidden", "weight"))
    bias = torch.zeros(()) if bias is None else bias.detach().double()
    logits = reference._head_logits(hidden, weight, bias, arguments.get("logit_softcap")).requires_grad_()
    temperature = torch.as_tensor(arguments.get("temperature", 1.0)).double()

    shift = 2**-21 * (hidden.abs() @ weight.abs().T + bias.abs().nan_to_num(posinf=0))
    if (dtype := arguments.get("logits_dtype") or torch.float32) != torch.float32:
        terms = (hidden @ weight.T).abs() + logits.detach().abs()
        shift += 4 * torch.finfo(dtype).eps * terms.nan_to_num(posinf=0)  # 4 covers more than first order
    shift /= temperature.unsqueeze(-1)

    counted, sampling_mask = logits.detach(), arguments.get("sampling_mask")
    if sampling_mask is not None:
        kept, _ = reference._kept(counted, labels, sampling_mask, outside)
        single = kept & (kept.sum(-1, keepdim=True) == 1)  # its logit is not read
        counted = counted.masked_fill(~kept, -torch.inf).masked_fill(single, 0)
    options = {"mask": arguments.get("mask"), "sampling_mask": sampling_mask, "label_outside": outside}
    with torch.enable_grad():
        results = reference.logprob_entropy(logits, labels, temperature=temperature, **options)
    p = torch.softmax(counted / temperature.unsqueeze(-1), -1)
    slope = p * results[1].detach().unsqueeze(-1) - torch.special.entr(p)  # p (log p + H), minus the entropy's gradient
    at_label = shift.gather(-1, labels.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)
    found = {
        "logprob": _exact.logprob(results[0].detach(), arguments) + at_label + (p * shift).norm(dim=-1),
        "entropy": 1e-5 + (slope * shift).norm(dim=-1),
    }
    incoming = [arguments["grad_logprob"], arguments["grad_entropy"]]
    given = [(result, grad.double()) for result, grad in zip(results, incoming, strict=True) if grad is not None]
    if not given:
        return found
    (gradient,) = torch.autograd.grad([result for result, _ in given], logits, [grad for _, grad in given])
    half = arguments["hidden"].dtype
    step = 0 if half == torch.float32 else torch.finfo(half).eps
    least = 0 if half == torch.float32 else torch.finfo(half).smallest_normal * step  # a step where that is larger
    size = p * (sum(grad.abs() for _, grad in given) / temperature).unsqueeze(-1)
    square = (size * (1e-6 + shift) + step * gradient.abs() + least).square().reshape(-1, logits.shape[-1])
    sums = square @ weight.square(), square.T @ hidden.square().reshape(-1, hidden.shape[-1]), square.sum(0)
    norms = [(part.sum() + part.numel() * least**2).sqrt() for part in sums]
    return found | dict(zip(_HEAD_TENSORS, norms, strict=True))


def of_head(name: str) -> Allowed:
    """The rule for the head's result or gradient of that name."""

    def allowed(exact: Tensor, arguments: Arguments) -> Tensor:
        found = head(arguments)[name]
        if name not in _HEAD_TENSORS:
            return found
        return torch.maximum(_exact.rounding(arguments["hidden"].dtype) * exact.double().nan_to_num().norm(), found)

    return allowed


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
