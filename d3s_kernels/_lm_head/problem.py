"""The arguments of the LM head's ops as one object, and their checks. The vocabulary may be whole or a shard.

A public function calls :func:`checked_problem`, which returns a complete :class:`HeadProblem`. On the way to
``forward`` and ``backward``, no argument is added, and only ``max_grad_rows``, ``keep_logits_bytes`` and the backward's
``labels`` may be replaced. An op has to take tensors and numbers, so ``op.py`` converts the problem to the op's
arguments, and these arguments back to the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NO_GROUP, NO_SUPPORTS, ONE, NumberOrTensor, OptionalSupports, ShardArguments
from .._arguments.checks import (
    checked_mask,
    is_known,
    require_no_tangent,
    require_number,
    require_optional_tensors,
    require_readable,
    require_tensors,
    require_whole,
    temperature_argument,
)
from .._dispatch import ops

if TYPE_CHECKING:
    from .._collectives import Ranks

LogitsDtype = torch.dtype | Literal["auto"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Shard(NamedTuple):
    """A vocabulary shard: consecutive ids from ``first_token`` on. The logits have a column for each id, and the weight
    has a row for each id. If ``ranks`` is None, the shard is the whole vocabulary.

    All ranks have the same rows. If there are no rows, all ranks skip the collectives.
    """

    first_token: int = 0
    ranks: Ranks | None = None
    sum_hidden_grad: bool = True  # False: each rank keeps its own term of the gradient of the hidden states

    @classmethod
    def of(cls, first_token: int = 0, group_name: str | None = None, sum_hidden_grad: bool = True) -> Shard:
        """Makes a shard from an op's arguments. An op takes a group by name, as torch's functional collectives do."""
        if group_name is None:
            return WHOLE
        from .._collectives import ranks_named  # imported here, since some builds of torch have no process groups

        return cls(first_token, ranks_named(group_name), sum_hidden_grad)

    @property
    def arguments(self) -> ShardArguments:
        """The arguments of an op for this shard."""
        return NO_GROUP if self.ranks is None else ShardArguments(self.first_token, self.ranks.group.group_name)

    @property
    def head_arguments(self) -> tuple[int, str | None, bool]:
        """The arguments of an LM head with a gradient for this shard. :meth:`of` is the inverse."""
        return *self.arguments, self.sum_hidden_grad

    @property
    def tile_start(self) -> int | None:
        """The argument ``tile_start`` of an op: the first id of a shard, or None for the whole vocabulary."""
        return None if self.ranks is None else self.first_token

    def token(self, column: int) -> int:
        return self.first_token + column

    def everyones(self, states: Tensor) -> Tensor:
        """Gathers the ranks' softmax states ``[rows, 4]`` into ``[shards, rows, 4]``, in rank order. The states of a
        whole vocabulary are returned unchanged.
        """
        return states if self.ranks is None or not len(states) else self.ranks.gather(states)

    def anyones_(self, mask: Tensor) -> Tensor:
        """Replaces the mask of rows with a gradient, in place, with the union of all ranks' masks."""
        if self.ranks is not None and self.sum_hidden_grad and len(mask):
            self.ranks.maximum_(mask.view(torch.uint8))
        return mask

    def total_(self, values: Tensor) -> Tensor:
        """Sums gradients of hidden states over the shards, in place."""
        return self.ranks.add_(values) if self.ranks is not None and self.sum_hidden_grad and len(values) else values


WHOLE = Shard()


class HeadProblem(NamedTuple):
    """The arguments of the LM head's ops. In the schemas in ``op.py``, some fields are several arguments."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    temperature: NumberOrTensor = ONE
    logit_softcap: float | None = None
    mask: Tensor | None = None
    max_rows: int | None = None
    max_grad_rows: int | None = None
    logits_dtype: torch.dtype = torch.float32
    workspace_bytes: int | None = None
    keep_logits_bytes: int | None = None
    supports: OptionalSupports = NO_SUPPORTS
    shard: Shard = WHOLE

    @property
    def rows(self) -> int:
        return self.labels.numel()

    @property
    def most_rows(self) -> int:
        """The number of rows that the forward computes at most, as far as it is known without the mask's values."""
        return self.rows if self.mask is None or self.max_rows is None else min(self.rows, self.max_rows)

    def keeping_for_gradient(self) -> HeadProblem:
        """Returns the problem, which keeps no logits if autograd will ask for no gradient."""
        if not self.keep_logits_bytes or self.keep_logits_bytes < 0:  # the op refuses a negative number
            return self
        inputs = self.hidden, self.weight, self.bias
        needed = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)
        return self if needed else self._replace(keep_logits_bytes=None)

    @property
    def flat_temperature(self) -> NumberOrTensor:
        """The temperature; a tensor that is not 0-d is flattened to ``[rows]``."""
        return self.temperature.map_rows(lambda each: each.reshape(self.rows))

    # ---- checks of shapes and values: raise a ValueError that names the first wrong argument ------------------------

    def check(self) -> None:
        self._check_products()
        self._check_rows()
        self._check_labels()
        self._check_numbers()
        self._check_supports()

    def _tokens(self) -> int | None:
        """Returns the size of the vocabulary, or None for a shard, since one rank does not know the size."""
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
            raise _not_fitting(weight, bias)
        if bias is not None and bias.dtype != weight.dtype:
            raise ValueError(f"bias: got dtype {bias.dtype}; takes the dtype of weight, {weight.dtype}")

    def _check_rows(self) -> None:
        """Checks the arguments that have one value for each row, and the devices of all arguments."""
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
        each = self.temperature.tensor
        if each is not None and each.dim() > 0 and each.shape != shape:
            raise ValueError(f"temperature: got shape {list(each.shape)}; takes a 0-d tensor or one for each row")

    def _check_labels(self) -> None:
        """Checks the values of the labels, if the host may read them."""
        labels, tokens = self.labels, self._tokens()
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

    def _check_numbers(self) -> None:
        dtype, cap, room = self.logits_dtype, self.logit_softcap, self.workspace_bytes
        for name, bound in (("max_rows", self.max_rows), ("max_grad_rows", self.max_grad_rows)):
            if bound is not None and bound < 0:
                raise ValueError(f"{name}: got {bound}; takes at least 0")
        if dtype not in (torch.float32, self.hidden.dtype):
            raise ValueError(
                f"logits_dtype: got {dtype}; takes torch.float32 or the dtype of the products, {self.hidden.dtype}"
            )
        if cap is not None and not 0 < cap < torch.inf:
            raise ValueError(f"logit_softcap: got {cap}; takes a finite number above 0")
        if room is not None and room <= 0:
            raise ValueError(f"workspace_bytes: got {room}; takes at least 1")
        if self.keep_logits_bytes is not None and self.keep_logits_bytes < 0:
            raise ValueError(f"keep_logits_bytes: got {self.keep_logits_bytes}; takes at least 0")

    def _check_supports(self) -> None:
        """Checks the sampling mask with the checks of an op that takes logits. The op gets one uninitialised row of
        logits, expanded to all rows.
        """
        ids, offsets, _, most_dense = self.supports
        if (ids is None) != (offsets is None):
            raise ValueError("sampling_mask: got one of ids and offsets; takes both or none")
        if ids is None:
            if most_dense is not None:
                raise ValueError(f"max_dense_rows: got {most_dense} without a sampling_mask; takes it with one")
            return
        if self.shard.ranks is None and not is_known(self.labels):
            # The op support_logits makes these checks later, except for the checks of values, which the host cannot
            # read anyway. With ranks, the checks must be made here, before a rank waits for others.
            return
        logits = self.hidden.new_empty(self._tokens() or 1).expand(*self.labels.shape, -1)
        state = self.hidden.new_empty((self.rows, 4), dtype=torch.float32)
        ops.check("support_rows", logits, ids, offsets, most_dense, self.mask)
        tile_start, supports = self.shard.tile_start, self.supports.required
        ops.check("support_softmax_state_", state, logits, self.labels, *supports, tile_start, *ONE, self.mask)

    def require_ready(self) -> None:
        """Makes the checks after which a rank may wait for others. While a graph is traced, values are unknown, and
        torch checks shapes.
        """
        if torch.compiler.is_compiling():
            return
        self.check()
        self.require_memory()
        # A rank without ids runs no kernel that checks the temperature.
        state = self.hidden.new_empty((self.rows, 4), dtype=torch.float32)
        ops.check("softmax_state_finish", state, *self.flat_temperature)

    def alike(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks of a shard, by the names of public functions."""
        number, tensor = self.temperature
        return {
            "hidden": (list(self.hidden.shape), str(self.hidden.dtype)),
            "a gradient of hidden": torch.is_grad_enabled() and self.hidden.requires_grad,
            "labels": self.labels, "temperature": number if tensor is None else tensor,
            "logit_softcap": self.logit_softcap, "mask": self.mask, "max_rows": self.max_rows,
            "max_grad_rows": self.max_grad_rows, "logits_dtype": str(self.logits_dtype),
            "sum_hidden_grad": self.shard.sum_hidden_grad,
        }  # fmt: skip

    def require_memory(self) -> None:
        """Refuses a parameter whose memory has been freed; FSDP, for example, frees it after a module's forward.
        Torch's matrix products would refuse such a parameter too, but other kernels would crash the process.
        """
        _require_memory(self.weight, self.bias)


# ---- the arguments of a public function -----------------------------------------------------------------------------


def checked_problem(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_softcap: float | None,
    mask: Tensor | None,
    max_rows: int | None,
    max_grad_rows: int | None = None,
    logits_dtype: LogitsDtype,
    workspace_bytes: int | None,
    keep_logits_bytes: int | None = None,
    weight_grad_into: Tensor | None = None,
    supports: Callable[[Tensor], OptionalSupports] = lambda _: NO_SUPPORTS,
    shard: Shard = WHOLE,
) -> HeadProblem:
    """Checks the arguments of a public function, and returns the problem. ``supports`` is called with the hidden
    states. It checks the sampling mask, which must be on the same device, and returns the mask's supports.

    This function checks types, devices, and conditions that no single kernel can check. Shapes and values are checked
    by :meth:`HeadProblem.check`, which the op calls when it runs: a graph that torch.compile has made runs only the op.
    """
    name = "weight" if shard.ranks is None else "weight_shard"
    require_tensors(**{"hidden": hidden, name: weight, "labels": labels})
    require_optional_tensors(hidden, bias=bias, weight_grad_into=weight_grad_into)
    mask = checked_mask(mask, hidden)
    require_no_tangent(**{"hidden": hidden, name: weight, "bias": bias})
    require_whole(max_rows=max_rows, max_grad_rows=max_grad_rows)
    require_whole(workspace_bytes=workspace_bytes, keep_logits_bytes=keep_logits_bytes)
    if logit_softcap is not None:
        require_number(logit_softcap=logit_softcap)
    if not isinstance(logits_dtype, torch.dtype) and logits_dtype != "auto":
        raise TypeError(f"logits_dtype: got {logits_dtype!r}; takes a torch.dtype or 'auto'")
    hidden, weight, bias = operands(hidden, weight, bias, weight_grad_into, name)
    logits_dtype = hidden.dtype if logits_dtype == "auto" else logits_dtype
    return HeadProblem(
        hidden, weight, labels, bias, NumberOrTensor(*temperature_argument(temperature, hidden)), logit_softcap, mask,
        max_rows, max_grad_rows, logits_dtype, workspace_bytes, keep_logits_bytes, supports(hidden), shard,
    )  # fmt: skip


# ---- hidden states, weight and bias in the form that the ops take --------------------------------------------------


def operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, weight_grad_into: Tensor | None, name: str = "weight"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns hidden states, weight and bias in one dtype. Error messages call the weight ``name``.

    If dtypes differ and one dtype is float32, all three tensors become float32. Autograd casts each gradient back to
    the dtype of its argument, so the ops need not cast gradients.
    """
    if weight.dim() != 2:
        require_readable(**{name: weight})
        raise ValueError(f"{name}: got shape {list(weight.shape)}; takes [V, H]{why_not_whole(name, weight)}")
    if weight_grad_into is not None:
        _require_room_for_gradient(weight_grad_into, weight, name)
    dtypes = {"hidden": hidden.dtype, name: weight.dtype} | ({} if bias is None else {"bias": bias.dtype})
    if len(set(dtypes.values())) == 1:
        return hidden, weight, bias
    for argument, dtype in dtypes.items():
        if dtype not in FLOATS:
            # Quantised weights are stored as bytes, for example bitsandbytes' Int8Params and Params4bit.
            hint = "; a quantised one has to be dequantised first" if dtype.itemsize == 1 else ""
            raise ValueError(f"{argument}: got dtype {dtype}; takes float32, bfloat16 or float16{hint}")
    if torch.float32 not in dtypes.values():
        argument = next(argument for argument, dtype in dtypes.items() if dtype != hidden.dtype)
        raise ValueError(
            f"{argument}: got dtype {dtypes[argument]}; takes float32 or the dtype of hidden, {hidden.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _not_fitting(weight, bias)
    if not torch.compiler.is_compiling():
        _require_memory(weight, bias)  # before their memory is read
    if weight_grad_into is not None and weight_grad_into.dtype != torch.float32:
        raise ValueError(
            f"weight_grad_into: got dtype {weight_grad_into.dtype}; takes float32, since dtypes differ and the "
            f"products are made in float32: hidden is {hidden.dtype}, {name} is {weight.dtype}"
        )
    return hidden.float(), weight.float(), None if bias is None else bias.float()


def _require_room_for_gradient(into: Tensor, weight: Tensor, name: str) -> None:
    """Refuses a tensor to which the weight's gradient cannot be added."""
    require_readable(weight_grad_into=into)
    if torch.compiler.is_compiling():
        raise ValueError("weight_grad_into: got a tensor in torch.compile; takes one in eager mode alone")
    if into.shape != weight.shape or not into.is_contiguous():
        raise ValueError(
            f"weight_grad_into: got shape {list(into.shape)} and strides {list(into.stride())}; takes a contiguous "
            f"tensor of the shape of {name}, {list(weight.shape)}"
        )
    if into.dtype not in (torch.float32, weight.dtype):
        raise ValueError(
            f"weight_grad_into: got dtype {into.dtype}; takes float32 or the dtype of {name}, {weight.dtype}"
        )
    if into.requires_grad:
        raise ValueError("weight_grad_into: got a tensor that requires a gradient; takes one that does not")


def _require_memory(weight: Tensor, bias: Tensor | None) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.numel() and not parameter.untyped_storage().nbytes():
            raise ValueError(
                f"{name}: got one whose memory has been freed, as FSDP does after the forward of a module; takes one "
                "that is there: call within that forward, or gather the parameter again"
            )


def _not_fitting(weight: Tensor, bias: Tensor) -> ValueError:
    reason = "" if bias.numel() else why_not_whole("bias", bias)
    return ValueError(f"bias: got shape {list(bias.shape)}; takes [V], {list(weight.shape[:1])}{reason}")


def why_not_whole(name: str, parameter: Tensor) -> str:
    """Returns a hint for the error about a parameter's shape: which library keeps only a part of the parameter on this
    rank, and what to do. The hint is empty if no library is recognised.
    """
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
