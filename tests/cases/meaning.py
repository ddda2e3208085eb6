"""Computes the exact results of the ops.

For public functions, ``reference.py`` defines them. Other ops are steps of these functions: what plain PyTorch computes
in float64, since ``d3s_kernels/_torch`` shares no code with the compiled libraries and with Triton. If plain PyTorch
itself is under test, a step is compared with its own code, which proves nothing. But these tests compare the ops that
consist of the steps with ``reference.py``:

    states, finish, backward      test_softmax_state.py, test_logprob_entropy.py, test_head.py
    ops over supports             test_sampling_masks.py, test_sampling_masks_head.py
    steps of a top-K search       test_topk_steps.py, test_across_ranks.py
    importance_ratio_backward     the gradient of importance_ratio
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from d3s_kernels import SamplingMask, _torch, reference
from d3s_kernels._dispatch.libraries import schema_of
from d3s_kernels.check.tolerances import written_arguments


class _Float64(TorchFunctionMode):
    """A mode in which code that is written for float32 computes in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        known = {name: _wide(part) for name, part in (kwargs or {}).items()}
        return function(*(_wide(part) for part in args), **known)


def _wide(part: Any) -> Any:
    return torch.float64 if part is torch.float32 else part


def step(op: str, wide: bool = False) -> Callable[..., Any]:
    """The op in plain PyTorch, in float64 if ``wide``: the arguments that the op writes, and then its results."""
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
        if isinstance(part, torch.dtype):  # the dtype to which intermediate results would be rounded
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
    """The function ``name`` of ``reference.py``, which takes the arguments of an op."""
    return lambda **given: getattr(reference, name)(**public_arguments(name, given))


def public_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """An op's arguments as those of the public function ``name``, where ``ratio`` and ``ratio_tensor`` are one, and the
    dtype of the LM head's products is "auto".
    """
    takes = inspect.signature(getattr(reference, name)).parameters
    tensors = {name: value for name, value in given.items() if name.endswith("_tensor") and value is not None}
    merged = dict(given) | {name.removesuffix("_tensor"): value for name, value in tensors.items()}
    if "scope" in takes and "pooled" in given:
        merged["scope"] = "batch" if given["pooled"] else "group" if name == "select_rollouts" else "sequence"
    if "logits_dtype" in given and given["logits_dtype"] == given["hidden"].dtype:
        merged["logits_dtype"] = "auto"
    if "low" in given:
        merged["log_bounds"] = (given["low"], given["high"])
    if given.get("support_ids") is not None:
        merged["sampling_mask"] = SamplingMask(given["support_ids"], given["support_offsets"])
        merged["label_outside"] = "include" if given.get("include_label") else "nan"
    return {argument: value for argument, value in merged.items() if argument in takes or argument == "found"}


def with_incoming(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the public function, and the incoming gradients, grad_logprob and grad_entropy."""
    return public_arguments(name, arguments) | {name: arguments.get(name) for name in ("grad_logprob", "grad_entropy")}
