"""What those ops mean that are not public functions.

A step of other ops means what plain PyTorch computes, here in float64: the kernels of ``d3s_kernels/_torch`` are other
code than those of the compiled libraries and of Triton. Where plain PyTorch itself serves, a step is compared with its
own code. What holds it there are the ops that are made of the steps, which are compared with ``reference.py``:

    states, finish, backward      test_softmax_state.py, test_logprob_entropy.py, test_head.py
    what is kept                  test_sampling_masks.py, test_sampling_masks_head.py
    steps of a top-K search       test_topk_steps.py, test_tokens_across_ranks.py
    importance_ratio_backward     the gradient of importance_ratio
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from d3s_kernels import SamplingMask, _torch, reference
from d3s_kernels._dispatch.libraries import schema_of
from d3s_kernels._exact import from_logits, written_arguments


class _Float64(TorchFunctionMode):
    """Computes in float64 what is written for float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        known = {name: _wide(part) for name, part in (kwargs or {}).items()}
        return function(*(_wide(part) for part in args), **known)


def _wide(part: Any) -> Any:
    return torch.float64 if part is torch.float32 else part


def step(op: str, wide: bool = False) -> Callable[..., Any]:
    """What plain PyTorch computes, if ``wide`` in float64. A tensor that the op writes is a result."""
    kernel, written, arguments = _torch.KERNELS[op], written_arguments(op), schema_of(op).arguments

    def call(**given: Any) -> Any:
        known = {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}
        known |= {name: known[name].clone() for name in written if known[name] is not None}
        with torch.no_grad():
            results = _in_float64(kernel, known) if wide else kernel(**known)
        results = (results,) if isinstance(results, Tensor) else results or ()
        return *(known[name] for name in written), *results

    return call


def _in_float64(kernel: Callable[..., Any], known: dict[str, Any]) -> Any:
    for name, part in known.items():
        if isinstance(part, torch.dtype):  # to which intermediate results would be rounded
            known[name] = torch.float64
        elif isinstance(part, Tensor) and part.is_floating_point():
            known[name] = part.double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            return kernel(**known)
    finally:
        torch.set_default_dtype(default)


# ---- by the reference ------------------------------------------------------------------------------------------------


def public(name: str) -> Callable[..., Any]:
    """The reference's function of that name, called with an op's arguments."""
    return lambda **given: getattr(reference, name)(**public_arguments(name, given))


def public_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """An op's arguments as those of the public function: a number and its tensor are one, ``pooled`` is a scope."""
    takes = inspect.signature(getattr(reference, name)).parameters
    tensors = {name: value for name, value in given.items() if name.endswith("_tensor") and value is not None}
    merged = dict(given) | {name.removesuffix("_tensor"): value for name, value in tensors.items()}
    if "scope" in takes and "pooled" in given:
        merged["scope"] = "batch" if given["pooled"] else "group" if name == "select_rollouts" else "sequence"
    if "low" in given:
        merged["log_bounds"] = (given["low"], given["high"])
    if given.get("sampling_ids") is not None:
        merged["sampling_mask"] = SamplingMask(given["sampling_ids"], given["sampling_offsets"])
        merged["label_outside"] = "include" if given.get("include_label") else "nan"
    return {argument: value for argument, value in merged.items() if argument in takes or argument == "found"}


def logprob_entropy(**given: Any) -> tuple[Any, ...]:
    """The public results, and the maximum and log S, which the backward needs. With ``kept_of``, all are those of
    step().
    """
    logprob, entropy, top, log_sum = _known(*step("logprob_entropy", wide=True)(**given))
    if given.get("kept_of") is None:
        if given.get("labels") is None:
            given["labels"] = torch.full(given["logits"].shape[:-1], -100)
        logprob, entropy = public("logprob_entropy")(**given)
    return logprob, entropy, top, log_sum


def softmax_state_finish(**given: Any) -> tuple[Tensor, ...]:
    return _known(*step("softmax_state_finish", wide=True)(**given))


def _known(logprob: Tensor, entropy: Tensor, top: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    """Makes the maximum NaN for a row with NaN or infinity, where it may be anything."""
    return logprob, entropy, top.masked_fill(log_sum.isnan(), torch.nan), log_sum


def linear_logprob_entropy(**given: Any) -> tuple[Any, ...]:
    """The public results. The others have no meaning but that the gradient, which is compared, comes from them."""
    return *public("linear_logprob_entropy")(**given), None, None


def linear_logprob_entropy_backward(wanted: Sequence[bool], **given: Any) -> tuple[Tensor | None, ...]:
    """The gradients of the public function. None for one that is not wanted."""
    leaves = {name: given[name] for name in ("hidden", "weight", "bias")}
    leaves = {name: None if leaf is None else leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        results = public("linear_logprob_entropy")(**given | leaves)
    asked = [leaf for leaf, want in zip(leaves.values(), wanted, strict=True) if want]
    incoming = [given["grad_logprob"], given["grad_entropy"]]
    some = [(result, grad.double()) for result, grad in zip(results, incoming, strict=True) if grad is not None]
    found = iter(torch.autograd.grad([result for result, _ in some], asked, [grad for _, grad in some]))
    return tuple(next(found) if want else None for want in wanted)


def topk_mask(pooled: bool = False, **given: Any) -> Tensor:
    if not pooled:
        return public("topk_mask")(**given)
    # All segments as one; the number k is for each of them.
    scores, mask, offsets = given["scores"], given.get("mask"), given.get("offsets")
    options = public_arguments("topk_mask", given) | {"scores": scores.flatten(), "offsets": None}
    options["mask"] = None if mask is None else mask.flatten()
    if options.get("k") is not None:
        options["k"] = int(options["k"]) * len(reference._segments(scores, offsets))
    return reference.topk_mask(**options).view(scores.shape)


def max_variance_select(pooled: bool = False, **given: Any) -> Tensor:
    if not pooled:
        return public("max_variance_select")(**given)
    return public("select_rollouts")(advantages=given.pop("values"), pooled=True, **given)


def select_tokens(**given: Any) -> tuple[Tensor, ...]:
    found = public("select_tokens")(**given)
    return found.mask, found.count, found.threshold


def select_tokens_from_logits(**given: Any) -> tuple[Any, ...]:
    return from_logits(**public_arguments("select_tokens_from_logits", given))


def wide_product_(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return hidden.double() @ weight.double().T
