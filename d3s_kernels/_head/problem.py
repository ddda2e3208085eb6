"""The arguments of the LM head's ops, for a whole vocabulary or for a rank's shard of it; and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import is_known
from .._dispatch import ops
from .picked import Picked
from .products import Head
from .shard import WHOLE, Shard

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class HeadProblem(NamedTuple):
    """The arguments that forward and backward have in common."""

    shard: Shard
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    temperature_tensor: Tensor | None = None
    logit_softcap: float | None = None
    mask: Tensor | None = None
    logits_dtype: torch.dtype = torch.float32
    workspace_bytes: int | None = None
    sampling_ids: Tensor | None = None
    sampling_offsets: Tensor | None = None
    include_label: bool = False
    max_dense_rows: int | None = None

    @classmethod
    def of(cls, first_token: int = 0, group_name: str | None = None, **given: Any) -> HeadProblem:
        """From the arguments of an op, by the names of its schema."""
        return cls(WHOLE if group_name is None else Shard.of_group(first_token, group_name), **given)

    @property
    def rows(self) -> int:
        return self.labels.numel()

    def temperatures(self, picked: Picked | None) -> Tensor | None:
        """The tensor of temperatures, for all rows or those that are picked; a 0-d one stands for all."""
        tensor = self.temperature_tensor
        if tensor is None or tensor.dim() == 0:
            return tensor
        each = tensor.reshape(self.rows)
        return each if picked is None else picked.gather(each, past=1)  # a temperature is above 0

    @property
    def head(self) -> Head:
        return Head(self.weight, self.bias, self.logit_softcap, self.logits_dtype)

    def check(self) -> None:
        """Raises a ValueError that names the first wrong argument."""
        self._check_products()
        self._check_rows()
        _check_labels(self.labels, self._tokens())
        self._check_numbers()
        self._check_spans()

    def _tokens(self) -> int | None:
        """The size of the vocabulary; None for a shard, since its rank does not know the size."""
        return self.weight.shape[0] if self.shard.ranks is None else None

    def _check_products(self) -> None:
        hidden, weight, bias = self.hidden, self.weight, self.bias
        if hidden.dim() < 1:
            raise ValueError("hidden: got a 0-d tensor; takes [..., H]")
        if hidden.dtype not in FLOATS:
            raise ValueError(f"hidden: got dtype {hidden.dtype}; takes float32, bfloat16 or float16")
        if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
            raise ValueError(
                f"weight: got shape {list(weight.shape)}; takes [V, H] with the H of hidden, {hidden.shape[-1]}"
            )
        if weight.dtype != hidden.dtype:
            raise ValueError(f"weight: got dtype {weight.dtype}; takes the dtype of hidden, {hidden.dtype}")
        if self._tokens() == 0:
            raise ValueError("weight: got no tokens; takes [V, H] with V of at least 1")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise not_fitting(weight, bias)
        if bias is not None and bias.dtype != weight.dtype:
            raise ValueError(f"bias: got dtype {bias.dtype}; takes the dtype of weight, {weight.dtype}")

    def _check_rows(self) -> None:
        """Checks the arguments with one value for each row, and the devices of all."""
        labels, mask, shape, device = self.labels, self.mask, self.hidden.shape[:-1], self.hidden.device
        if labels.shape != shape:
            raise ValueError(f"labels: got shape {list(labels.shape)}; takes one for each row, {list(shape)}")
        if labels.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"labels: got dtype {labels.dtype}; takes int64 or int32")
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask: got dtype {mask.dtype}; takes bool")
        if mask is not None and mask.shape != shape:
            raise ValueError(f"mask: got shape {list(mask.shape)}; takes {list(shape)}")
        for name, tensor in (("weight", self.weight), ("labels", labels), ("bias", self.bias), ("mask", mask)):
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{name}: is not on hidden's device, {device}")
        each = self.temperature_tensor
        if each is not None and each.dim() > 0 and each.shape != shape:
            raise ValueError(f"temperature: got shape {list(each.shape)}; takes a 0-d tensor or one for each row")

    def _check_spans(self) -> None:
        """As the op on logits would: with one row of uninitialised logits, which stands for all."""
        given = self.labels, 1.0, None, self.mask
        spans = self.sampling_ids, self.sampling_offsets, self.include_label, self.max_dense_rows
        if all(part is None for part in (self.sampling_ids, self.sampling_offsets, self.max_dense_rows)):
            return
        both = self.sampling_ids is not None and self.sampling_offsets is not None
        if both and self.shard.ranks is None and not is_known(self.labels):
            return  # all but values is checked again by kept_logits; ranks must know before they wait for each other
        logits = self.hidden.new_empty(self._tokens() or 1).expand(*self.labels.shape, -1)
        if self.shard.ranks is None:
            ops.check("logprob_entropy", logits, *given, *spans)
        else:
            state = self.hidden.new_empty((self.rows, 4), dtype=torch.float32)
            ops.check("softmax_state_", state, logits, given[0], self.shard.first_token, *given[1:], *spans)

    def _check_numbers(self) -> None:
        dtype, cap, room = self.logits_dtype, self.logit_softcap, self.workspace_bytes
        if dtype not in (torch.float32, self.hidden.dtype):
            raise ValueError(
                f"logits_dtype: got {dtype}; takes torch.float32 or the dtype of the products, {self.hidden.dtype}"
            )
        if cap is not None and not 0 < cap < torch.inf:
            raise ValueError(f"logit_softcap: got {cap}; takes a finite number above 0")
        if room is not None and room <= 0:
            raise ValueError(f"workspace_bytes: got {room}; takes at least 1")


def why_not_whole(name: str, parameter: Tensor) -> str:
    """For the message about a parameter of a wrong shape: who has left only a part of it here, and the way out."""
    if hasattr(parameter, "ds_id"):
        whole = list(getattr(parameter, "ds_shape", ()))
        return (
            f". DeepSpeed's ZeRO-3 has partitioned this one of shape {whole}: enter "
            f"deepspeed.zero.GatheredParameters([{name}]) around forward and backward"
        )
    if hasattr(parameter, "_fsdp_flattened") or parameter.dim() == 1:
        return (
            ". FSDP leaves a flattened part, maybe an empty one, outside of the forward of the module that it wraps: "
            "call within that forward, or within FullyShardedDataParallel.summon_full_params"
        )
    return ""


def require_memory(weight: Tensor, bias: Tensor | None) -> None:
    """Refuses what was gathered for a module's forward and freed after it. Torch's products find that too, and kernels
    do not: they would end the process.
    """
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.numel() and not parameter.untyped_storage().nbytes():
            raise ValueError(
                f"{name}: got one whose memory has been freed, as FSDP does after the forward of a module; takes one "
                "that is there: call within that forward, or gather the parameter again"
            )


def not_fitting(weight: Tensor, bias: Tensor) -> ValueError:
    reason = "" if bias.numel() else why_not_whole("bias", bias)
    return ValueError(f"bias: got shape {list(bias.shape)}; takes [V], {list(weight.shape[:1])}{reason}")


def _check_labels(labels: Tensor, tokens: int | None) -> None:
    """Checks the values of labels, if the host may read them."""
    if not labels.numel() or not is_known(labels):
        return
    low, high = (int(bound) for bound in labels.aminmax())
    bad = high if tokens is not None and high >= tokens else low if low < -100 else None
    if bad is None and low < 0:
        between = labels[(labels < 0) & (labels != -100)]
        bad = int(between[0]) if len(between) else None
    if bad is not None:
        end = "V" if tokens is None else tokens
        raise ValueError(f"labels: got {bad}; takes -100 (no target) or a token in [0, {end})")


def require_bounds(**bounds: int | None) -> None:
    for name, bound in bounds.items():
        if bound is not None and bound < 0:
            raise ValueError(f"{name}: got {bound}; takes at least 0")
