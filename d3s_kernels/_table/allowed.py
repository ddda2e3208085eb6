"""How far each number of a result may be from the float64 result: only as far as float32 makes necessary.

A rule takes the exact result and the call's arguments, and gives a tensor that broadcasts to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..sampling import SamplingMask

Arguments = Mapping[str, Any]
Allowed = Callable[[Tensor, Arguments], Tensor]


def equal(exact: Tensor, arguments: Arguments) -> Tensor:
    return torch.zeros(())


def equal_where_known(exact: Tensor, arguments: Arguments) -> Tensor:
    """Equal, except that the maximum of a row with NaN or infinity may be anything."""
    return torch.zeros(exact.shape).masked_fill(exact.isnan(), torch.inf)


def counts(exact: Tensor, arguments: Arguments) -> Tensor:
    """Equal, except that masked values, whose key is 0, may count as the lowest digit, which no search reaches."""
    limit = torch.zeros(exact.shape, dtype=torch.float64)
    limit[:, 0] = int((arguments["keys"] == 0).sum())
    return limit


def near(absolute: float, relative: float = 0.0) -> Allowed:
    def allowed(exact: Tensor, arguments: Arguments) -> Tensor:
        return absolute + relative * exact.double().abs().nan_to_num(posinf=0)

    return allowed


entropy = near(1e-5)  # nats
# Far below the maximum the four roundings of (z - max) / temperature - log S need the relative term.
logprob = near(1e-5, 2**-22)
ratio = near(1e-37, 1e-5)


def states(exact: Tensor, arguments: Arguments) -> Tensor:
    """For (m, S, T, the label's logit). The maximum and the label's logit are copies of logits, and so are exact."""
    total, dot = exact[..., 1].abs(), exact[..., 2].abs()
    most = total.nan_to_num() + dot.nan_to_num()
    unknown = torch.zeros_like(most).masked_fill(exact[..., 2].isnan(), torch.inf)  # rows with NaN or infinity
    return torch.stack([unknown, 3e-6 * (1 + most) + unknown, 3e-6 * (1 + most), torch.zeros_like(most)], -1)


def _temperature(arguments: Arguments) -> Tensor:
    tensor = arguments.get("temperature_tensor")
    temperature = arguments.get("temperature", 1.0) if tensor is None else tensor
    return torch.as_tensor(temperature, dtype=torch.float64)


def gradient_of_logits(exact: Tensor, arguments: Arguments) -> Tensor:
    """1e-5 of the norm of each row (or the dtype's eps), plus the rounding error where terms of the gradient cancel."""
    logits = arguments["logits"]
    step = 1e-5 if logits.dtype == torch.float32 else torch.finfo(logits.dtype).eps
    given = [arguments[name] for name in ("grad_logprob", "grad_entropy") if arguments.get(name) is not None]
    size = torch.zeros(exact.shape[:-1], dtype=torch.float64)
    for grad in given:
        size = size + grad.double().abs() / _temperature(arguments)
    limit: Tensor = step * exact.double().nan_to_num().norm(dim=-1, keepdim=True)
    return limit + 4e-6 * size.unsqueeze(-1).nan_to_num()


def gradient_of_ratios(exact: Tensor, arguments: Arguments) -> Tensor:
    """Next to a bound the gradient may be anything, since it jumps to 0 there."""
    low, high = _log_bounds(arguments)
    own = arguments.get("ratio")
    if own is None:
        names = ("logprob", "old_logprob", "mask", "level", "groups", "denominator", "offsets")
        options = {name: arguments[name] for name in names if name in arguments}
        own = reference.importance_ratio(**options, log_bounds=(low, high))
    log_ratio = own.detach().double().log()
    at_a_bound = ((log_ratio - low).abs() < 1e-4) | ((log_ratio - high).abs() < 1e-4)
    limit = 1e-8 + 1e-5 * exact.double().abs().nan_to_num(posinf=0)
    return limit.masked_fill(at_a_bound, torch.inf)


def _log_bounds(arguments: Arguments) -> tuple[float, float]:
    if arguments.get("log_bounds") is not None:
        low, high = arguments["log_bounds"]
        return low, high
    of_tokens = arguments.get("level", "token") == "token"
    return arguments.get("low", -20.0 if of_tokens else -torch.inf), arguments.get("high", 20.0 if of_tokens else 10.0)


# ---- the LM head ----------------------------------------------------------------------------------------------------

_HEAD_TENSORS = ("hidden", "weight", "bias")


def head(arguments: Arguments) -> dict[str, Tensor]:
    """The allowed error of each result and gradient. A logit is off by some rounding steps of the terms of its sum, and
    all other errors follow from that to first order.

    The gradient of a logit is off by 1e-6 g p / temperature in addition, and in half precision it is rounded to the
    dtype of the weight, as the result is; below the smallest normal number, 6e-5 in float16, the steps of that dtype
    do not get smaller. Errors of different logits are independent, so that their squares add up.
    """
    bias, softcap, labels = (arguments.get(name) for name in ("bias", "logit_softcap", "labels"))
    hidden, weight = (arguments[name].detach().double() for name in ("hidden", "weight"))
    bias = None if bias is None else bias.detach().double()
    assert isinstance(labels, Tensor)
    temperature = _temperature(arguments)
    logits = reference._head_logits(hidden, weight, bias, softcap).requires_grad_()

    rounding = arguments.get("logits_dtype") or torch.float32
    shift = 2**-21 * (hidden.abs() @ weight.abs().T)
    if bias is not None:
        shift = shift + 2**-21 * bias.abs().nan_to_num(posinf=0)
    if rounding != torch.float32:
        terms = (hidden @ weight.T).abs() + logits.detach().abs()
        shift = shift + 4 * torch.finfo(rounding).eps * terms.nan_to_num(posinf=0)  # 4 covers more than first order
    shift = shift / temperature.unsqueeze(-1)

    spans = _spans(arguments)
    with torch.enable_grad():
        results = reference.logprob_entropy(
            logits, labels, temperature=temperature, mask=arguments.get("mask"), **spans
        )
    counted = logits.detach()
    if spans:
        kept, _ = reference._kept(counted, labels, spans["sampling_mask"], spans["label_outside"])
        single = kept & (kept.sum(-1, keepdim=True) == 1)  # its logit is not read
        counted = counted.masked_fill(~kept, -torch.inf).masked_fill(single, 0)
    p = torch.softmax(counted / temperature.unsqueeze(-1), -1)
    slope = p * results[1].detach().unsqueeze(-1) - torch.special.entr(p)  # p (log p + H), minus the entropy's gradient
    at_label = shift.gather(-1, labels.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)
    found = {
        "logprob": 1e-5 + 2**-22 * results[0].detach().abs() + at_label + (p * shift).norm(dim=-1),
        "entropy": 1e-5 + (slope * shift).norm(dim=-1),
        "row_max": (shift * temperature.unsqueeze(-1)).amax(-1),
        "log_sum": 1e-5 + 2 * shift.amax(-1),
    }
    cotangents = [arguments.get(f"grad_{name}") for name in ("logprob", "entropy")]
    if any(given is not None for given in cotangents):
        found |= _head_gradients(arguments, logits, results, cotangents, p, shift, temperature)
    return found


def _spans(arguments: Arguments) -> dict[str, Any]:
    """The sampling mask of an op's arguments, or of a public function's."""
    if arguments.get("sampling_ids") is not None:
        mask = SamplingMask(arguments["sampling_ids"], arguments["sampling_offsets"])
        return {"sampling_mask": mask, "label_outside": "include" if arguments.get("include_label") else "nan"}
    if arguments.get("sampling_mask") is not None:
        return {"sampling_mask": arguments["sampling_mask"], "label_outside": arguments.get("label_outside", "nan")}
    return {}


def _head_gradients(
    arguments: Arguments,
    logits: Tensor,
    results: tuple[Tensor, Tensor],
    cotangents: list[Tensor | None],
    p: Tensor,
    shift: Tensor,
    temperature: Tensor,
) -> dict[str, Tensor]:
    """The allowed error, in norm, of the gradients of the hidden states, the weight and the bias."""
    hidden, weight = (arguments[name].detach().double() for name in ("hidden", "weight"))
    given = [
        (result, cotangent.double())
        for result, cotangent in zip(results, cotangents, strict=True)
        if cotangent is not None
    ]
    (gradient,) = torch.autograd.grad([result for result, _ in given], logits, [cotangent for _, cotangent in given])
    dtype = arguments["hidden"].dtype
    step = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    least = 0 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal * step  # a step where that is larger
    total = torch.stack([cotangent.abs() for _, cotangent in given]).sum(0)
    size = p * total.unsqueeze(-1) / temperature.unsqueeze(-1)
    square = (size * (1e-6 + shift) + step * gradient.abs() + least).square().reshape(-1, logits.shape[-1])
    sums = square @ weight.square(), square.T @ hidden.square().reshape(-1, hidden.shape[-1]), square.sum(0)
    return {name: (part.sum() + part.numel() * least**2).sqrt() for name, part in zip(_HEAD_TENSORS, sums, strict=True)}


def of_head(name: str) -> Allowed:
    """The rule for the head's result or gradient of that name."""

    def allowed(exact: Tensor, arguments: Arguments) -> Tensor:
        found = head(arguments)[name]
        if name not in _HEAD_TENSORS:
            return found
        dtype = arguments["hidden"].dtype
        step = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        return torch.maximum(step * exact.double().nan_to_num().norm(), found)

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
    temperature = arguments.get("temperature", 1.0), arguments.get("temperature_tensor")
    coldest = (
        temperature[0] if temperature[1] is None else float(temperature[1].min()) if temperature[1].numel() else 1.0
    )
    given = [arguments.get(f"grad_{name}") for name in ("logprob", "entropy")]
    most = sum(float(part.abs().max()) for part in given if part is not None and part.numel())
    return torch.full(exact.shape, 2**-16 * most / coldest)


def kept_gradient(exact: Tensor, arguments: Arguments) -> Tensor:
    """Some rounding steps of all terms together; and of the result, where it is added to a gradient in its dtype."""
    matrix = arguments["weight"] if "weight" in arguments else arguments["hidden"]
    most = max(1.0, float(matrix.double().abs().max()) if matrix.numel() else 0.0)  # 1: of the bias
    limit: Tensor = 2**-21 * most * arguments["grad"].double().abs().sum() * torch.ones(exact.shape)
    out = arguments.get("out")
    if out is not None:
        limit += 2 * torch.finfo(out.dtype).eps * (exact.abs().nan_to_num() + limit)
    return limit


def product(exact: Tensor, arguments: Arguments) -> Tensor:
    hidden, weight = (arguments[name].double().abs() for name in ("hidden", "weight"))
    limit: Tensor = 2**-21 * (hidden @ weight.T)
    return limit
