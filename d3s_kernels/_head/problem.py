"""The arguments of the LM head's ops, checked: for a whole vocabulary, or for a rank's shard of it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .products import Head
from .shard import Shard


def _require(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


def checked_head(
    shard: Shard,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float,
    temperature_tensor: Tensor | None,
    logit_softcap: float | None,
    mask: Tensor | None,
    logits_dtype: torch.dtype,
    workspace_bytes: int | None,
) -> Head:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    shape = hidden.shape[:-1]
    _require(hidden.dim() >= 1, "hidden: got a 0-d tensor; takes [..., H]")
    _require(hidden.dtype in floats, f"hidden: got dtype {hidden.dtype}; takes float32, bfloat16 or float16")
    _require(
        weight.dim() == 2 and weight.shape[1] == hidden.shape[-1],
        f"weight: got shape {list(weight.shape)}; takes [V, H] with the H of hidden, {hidden.shape[-1]}",
    )
    _require(
        weight.dtype == hidden.dtype, f"weight: got dtype {weight.dtype}; takes the dtype of hidden, {hidden.dtype}"
    )
    # How large the vocabulary is a rank with a shard of it does not know.
    vocabulary = weight.shape[0] if shard.ranks is None else None
    _require(vocabulary != 0, "weight: got no tokens; takes [V, H] with V of at least 1")
    _require(labels.shape == shape, f"labels: got shape {list(labels.shape)}; takes one for each row, {list(shape)}")
    _require(labels.dtype in (torch.int64, torch.int32), f"labels: got dtype {labels.dtype}; takes int64 or int32")
    if labels.numel() and (labels.is_cpu or os.environ.get("D3S_KERNELS_CHECK") == "1"):
        low, high = (int(bound) for bound in labels.aminmax())
        bad = high if vocabulary is not None and high >= vocabulary else low if low < -100 else None
        if bad is None and low < 0:
            between = labels[(labels < 0) & (labels != -100)]
            bad = int(between[0]) if len(between) else None
        end = "V" if vocabulary is None else vocabulary
        _require(bad is None, f"labels: got {bad}; takes -100 (no target) or a token in [0, {end})")
    if bias is not None:
        _require(
            bias.shape == weight.shape[:1] and bias.dtype == weight.dtype,
            f"bias: got shape {list(bias.shape)} of {bias.dtype}; takes [{weight.shape[0]}] of {weight.dtype}",
        )
    if mask is not None:
        _require(mask.dtype == torch.bool, f"mask: got dtype {mask.dtype}; takes bool")
        _require(mask.shape == shape, f"mask: got shape {list(mask.shape)}; takes {list(shape)}")
    for name, tensor in (("weight", weight), ("labels", labels), ("bias", bias), ("mask", mask)):
        _require(
            tensor is None or tensor.device == hidden.device, f"{name}: is not on hidden's device, {hidden.device}"
        )
    if temperature_tensor is not None:
        _require(
            temperature_tensor.dim() == 0 or temperature_tensor.shape == shape,
            f"temperature: got shape {list(temperature_tensor.shape)}; takes a 0-d tensor or one for each row",
        )
    _require(
        logits_dtype in (torch.float32, hidden.dtype),
        f"logits_dtype: got {logits_dtype}; takes torch.float32 or the dtype of hidden, {hidden.dtype}",
    )
    _require(
        logit_softcap is None or 0 < logit_softcap < torch.inf,
        f"logit_softcap: got {logit_softcap}; takes a finite number above 0",
    )
    _require(
        workspace_bytes is None or workspace_bytes > 0, f"workspace_bytes: got {workspace_bytes}; takes at least 1"
    )
    return Head(weight, bias, logit_softcap, logits_dtype)


def require_bounds(**bounds: int | None) -> None:
    for name, bound in bounds.items():
        _require(bound is None or bound >= 0, f"{name}: got {bound}; takes at least 0")
