"""The LM head without its logits: ``linear_logprob_entropy`` on every device.

Forward: a tile of rows x tokens of the logits at a time, merged into each row's softmax state and forgotten.
Backward: the tile again, its gradient written over it, two products; only for rows whose gradient is not 0.
Where ranks share the vocabulary, each does this with its shard, and they add up what must be added (``_shard.py``).

The matrix products are torch's. A tile is as large as the workspace allows and its edges fall where the kernels cut a
row anyway: so a row's result has the same bits as from its whole logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ._shard import WHOLE, Shard

_op = torch.ops.d3s_kernels
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])


class _Sizes(NamedTuple):
    """How a kind of device likes its work cut."""

    workspace_bytes: int
    rows: int  # of a tile where whole rows of logits do not fit: enough to keep a matrix product at its peak
    row_multiple: int  # the height of the blocks that a matrix product works in


_SIZES = {
    "cpu": _Sizes(workspace_bytes=32 << 20, rows=1024, row_multiple=1),  # a share of the last-level cache
    "cuda": _Sizes(workspace_bytes=512 << 20, rows=512, row_multiple=128),
}
_SIZES["xpu"] = _SIZES["cuda"]
# Tokens. Where what serves a kind of device cuts a row: kSlice in csrc/cuda/, SLICE in _triton/; on a CPU kChunk in
# csrc/cpu/softmax_rows.h, unless others serve it. _plain/ cuts finer, at a part of either.
PORTABLE_SLICE, CPU_SLICE = 32768, 8192
SLICES = {"cpu": CPU_SLICE, "cuda": PORTABLE_SLICE, "xpu": PORTABLE_SLICE}
_UPCAST_BYTES = 16 << 20  # of the weight as float32 at a time, where the device has no product that widens its result
_PRODUCT = 8192  # tokens whose products are summed at a time: some BLAS libraries lose digits over more


class _Head(NamedTuple):
    """What turns hidden states into logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    logits_dtype: torch.dtype

    def logits(self, hidden: Tensor, tokens: slice, out: Tensor) -> Tensor:
        weight = self.weight[tokens]
        if out.dtype == hidden.dtype:
            torch.mm(hidden, weight.t(), out=out)
        elif _widens(hidden):
            torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        elif hidden.is_cpu and hidden.dtype == torch.bfloat16:
            _op.wide_product_.default(hidden, weight, out)
        else:
            wide = hidden.to(out.dtype)
            step = max(1, _UPCAST_BYTES // (4 * max(1, hidden.shape[1])))
            for begin in range(0, weight.shape[0], step):
                torch.mm(wide, weight[begin : begin + step].to(out.dtype).t(), out=out[:, begin : begin + step])
        if self.bias is not None:
            out.add_(self.bias[tokens])
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out


class _Tiles(NamedTuple):
    """A cut of rows x vocabulary into pieces whose logits fit the workspace."""

    rows: int
    vocabulary: int
    row_step: int
    token_step: int
    buffer: Tensor

    @classmethod
    def cut(cls, hidden: Tensor, head: _Head, workspace_bytes: int | None) -> _Tiles:
        sizes, piece = _SIZES[hidden.device.type], SLICES[hidden.device.type]
        rows, vocabulary = hidden.shape[0], head.weight.shape[0]
        elements = (workspace_bytes or sizes.workspace_bytes) // head.logits_dtype.itemsize
        fitting = max(sizes.rows, elements // max(1, vocabulary))  # rows of a tile, if its tokens may be few
        row_step = max(1, min(rows, fitting, elements // piece))
        if sizes.row_multiple < row_step < rows:
            row_step -= row_step % sizes.row_multiple
        token_step = max(1, vocabulary)  # a shard may have none
        if row_step * vocabulary > elements:  # as few tiles as fit, of about the same size
            tiles = -(-vocabulary // max(piece, elements // row_step // piece * piece))
            token_step = -(-vocabulary // (tiles * piece)) * piece
        buffer = torch.empty(row_step * token_step, dtype=head.logits_dtype, device=hidden.device)
        return cls(rows, vocabulary, row_step, token_step, buffer)

    def row_slices(self) -> Iterator[slice]:
        for begin in range(0, self.rows, self.row_step):
            yield slice(begin, min(self.rows, begin + self.row_step))

    def token_slices(self) -> Iterator[slice]:
        for begin in range(0, self.vocabulary, self.token_step):
            yield slice(begin, min(self.vocabulary, begin + self.token_step))

    def room(self, rows: slice, tokens: slice) -> Tensor:
        shape = rows.stop - rows.start, tokens.stop - tokens.start
        return self.buffer[: shape[0] * shape[1]].view(shape)


class _Picked(NamedTuple):
    """Some of the rows, in their order, packed: without a host synchronisation where the caller bounds their number."""

    indices: Tensor  # [capacity], -1 past the last row
    exceeded: Tensor | None  # bool [1]: whether there are more than the bound; None where there is no bound

    @classmethod
    def where(cls, mask: Tensor, bound: int | None) -> _Picked:
        capacity = int(mask.sum()) if bound is None else min(bound, mask.numel())
        indices, count = _op.compact.default(mask, capacity)
        return cls(indices, None if bound is None else count > bound)

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of these rows, 0 past the last one: what is there must not reach a product, and may be NaN."""
        packed = values.index_select(0, self.indices.clamp(min=0))
        past = (self.indices < 0).view(-1, *[1] * (values.dim() - 1))
        return packed if self.exceeded is None else packed.masked_fill_(past, 0)

    def scatter(self, values: Tensor, rows: int) -> Tensor:
        """``values`` at their rows, 0 elsewhere; NaN where the bound was exceeded."""
        out = values.new_zeros((rows + 1, *values.shape[1:]))  # the last row takes what has no row
        out.index_copy_(0, torch.where(self.indices < 0, rows, self.indices), values)
        return self.poison_(out[:rows])

    def poison_(self, values: Tensor) -> Tensor:
        return values if self.exceeded is None else values.masked_fill_(self.exceeded, torch.nan)


def _widens(values: Tensor) -> bool:
    """Whether torch has products of half precision with a float32 result there."""
    return values.is_cuda and torch.version.cuda is not None


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
) -> _Head:
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
    return _Head(weight, bias, logit_softcap, logits_dtype)


def _without_autocast(function: _Kernel) -> _Kernel:
    """Products have the precision that the arguments say, also where a backward runs within torch.autocast."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        device = next(argument.device.type for argument in arguments if isinstance(argument, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return cast(_Kernel, run)


def require_bounds(**bounds: int | None) -> None:
    for name, bound in bounds.items():
        _require(bound is None or bound >= 0, f"{name}: got {bound}; takes at least 0")


def no_logits(rows: int, like: Tensor) -> Tensor:
    """The states ``[rows, 4]`` to begin with. No label's logit yet: a label that is no token gives NaN."""
    state = like.new_empty((rows, 4), dtype=torch.float32)
    for column, value in enumerate((torch.finfo(torch.float32).min, 0.0, 0.0, torch.nan)):
        state[:, column] = value
    return state


@_without_autocast
def forward_of_shard(
    shard: Shard,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = checked_head(
        shard, hidden, weight, labels, bias, temperature, temperature_tensor, logit_softcap, mask, logits_dtype,
        workspace_bytes,
    )  # fmt: skip
    require_bounds(max_rows=max_rows, max_grad_rows=max_grad_rows)
    shape = hidden.shape[:-1]
    count = labels.numel()
    if mask is None and max_rows is not None and count > max_rows:
        nan = hidden.new_full(shape, torch.nan, dtype=torch.float32)
        return nan, nan.clone(), nan.clone(), nan.clone()
    rows, targets = hidden.reshape(count, hidden.shape[-1]), labels.reshape(count)
    temperatures = temperature_tensor
    if temperatures is not None and temperatures.dim() > 0:
        temperatures = temperatures.reshape(count)

    picked = None
    if mask is not None:
        picked = _Picked.where(mask.reshape(count), max_rows)
        rows, targets = picked.gather(rows), picked.gather(targets)
        if temperatures is not None and temperatures.dim() > 0:
            temperatures = _past_rows_are_one(picked, picked.gather(temperatures))

    tiles = _Tiles.cut(rows, head, workspace_bytes)
    state = no_logits(len(rows), rows)
    for r in tiles.row_slices():
        for t in tiles.token_slices():
            logits = head.logits(rows[r], t, tiles.room(r, t))
            first_token = shard.first_token + t.start
            _op.softmax_state_.default(
                state[r], logits, targets[r], first_token, temperature, _of_rows(temperatures, r)
            )
    outputs = _op.softmax_state_finish.default(shard.everyones(state), temperature, temperatures)
    outputs[0].masked_fill_(targets == -100, 0.0)
    if picked is not None:
        outputs = tuple(picked.scatter(output, count) for output in outputs)
    logprob, entropy, row_max, log_sum = (output.view(shape) for output in outputs)
    return logprob, entropy, row_max, log_sum


@_without_autocast
def backward_of_shard(
    shard: Shard,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    temperature: float,
    temperature_tensor: Tensor | None,
    logit_softcap: float | None,
    mask: Tensor | None,
    max_grad_rows: int | None,
    logits_dtype: torch.dtype,
    workspace_bytes: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    head = checked_head(
        shard, hidden, weight, labels, bias, temperature, temperature_tensor, logit_softcap, mask, logits_dtype,
        workspace_bytes,
    )  # fmt: skip
    want_hidden, want_weight, want_bias = wanted
    count = labels.numel()
    active = torch.zeros(count, dtype=torch.bool, device=hidden.device)
    if grad_logprob is not None:
        active |= (grad_logprob.reshape(count) != 0) & (labels.reshape(count) != -100)
    if grad_entropy is not None:
        active |= grad_entropy.reshape(count) != 0
    if mask is not None:
        active &= mask.reshape(count)
    if want_hidden:  # its rows are added up over the ranks: all pick the same, whatever a gradient's last bits are
        active = shard.anyones_(active)
    picked = _Picked.where(active, max_grad_rows)

    def gather(values: Tensor) -> Tensor:
        return picked.gather(values.reshape(count, *values.shape[hidden.dim() - 1 :]))

    rows, targets, h, m, s = (gather(values) for values in (hidden, labels, entropy, row_max, log_sum))
    g_logprob, g_entropy = (None if grad is None else gather(grad) for grad in (grad_logprob, grad_entropy))
    if g_logprob is not None and shard.ranks is None and not hidden.is_cpu:
        # Labels that nobody has checked: one that is no token gives NaN.
        g_logprob = torch.where(targets < weight.shape[0], g_logprob, torch.nan)
    temperatures = temperature_tensor
    if temperatures is not None and temperatures.dim() > 0:
        temperatures = _past_rows_are_one(picked, gather(temperatures))

    tiles = _Tiles.cut(rows, head, workspace_bytes)
    grad_rows = rows.new_zeros(rows.shape if want_hidden else 0, dtype=torch.float32)
    # Filled tile by tile, or with zeros where there is no row.
    fresh = weight.new_empty if rows.shape[0] else weight.new_zeros
    grad_weight = fresh(weight.shape if want_weight else (0,))
    grad_bias = fresh(weight.shape[:1] if want_bias else (0,))
    several = rows.shape[0] > tiles.row_step
    # Tokens outside, rows inside: the gradient of a stretch of the weight is complete when its tiles are done, and
    # needs a float32 sum of its own size only.
    for t in tiles.token_slices():
        weight_sum = weight.new_zeros((t.stop - t.start, weight.shape[1]), dtype=torch.float32) if several else None
        bias_sum = weight.new_zeros(t.stop - t.start, dtype=torch.float32)
        for r in tiles.row_slices():
            tile = head.logits(rows[r], t, tiles.room(r, t))
            slope = None if logit_softcap is None else 1 - (tile / logit_softcap).square()
            _op.logprob_entropy_backward_.default(
                _of_rows(g_logprob, r), _of_rows(g_entropy, r), tile, targets[r], h[r], m[r], s[r],
                shard.first_token + t.start, temperature, _of_rows(temperatures, r),
            )  # fmt: skip
            if slope is not None:
                tile.mul_(slope)
            if want_bias:
                bias_sum += tile.sum(0, dtype=torch.float32)
            tile = tile.to(weight.dtype)
            if want_hidden:
                _add_product(grad_rows[r], tile, weight[t])
            if want_weight:
                if weight_sum is not None:
                    _add_product(weight_sum, tile.t(), rows[r])
                else:
                    torch.mm(tile.t(), rows[r], out=grad_weight[t])
        if want_weight and weight_sum is not None:
            grad_weight[t] = weight_sum
        if want_bias:
            grad_bias[t] = bias_sum
    # The shards' parts cancel as the tokens' do: rounded before they are added, they would leave more error the more
    # ranks there are.
    grad_hidden = shard.total_(grad_rows).to(hidden.dtype)
    if want_hidden:
        grad_hidden = picked.scatter(grad_hidden, count).view(hidden.shape)
    return grad_hidden, picked.poison_(grad_weight), picked.poison_(grad_bias)


forward, backward = partial(forward_of_shard, WHOLE), partial(backward_of_shard, WHOLE)


def _of_rows(values: Tensor | None, rows: slice) -> Tensor | None:
    """``values`` of these rows; a 0-d tensor stands for all."""
    return values if values is None or values.dim() == 0 else values[rows]


def _past_rows_are_one(picked: _Picked, temperatures: Tensor) -> Tensor:
    return torch.where(picked.indices < 0, 1.0, temperatures)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``; half precision on a CPU rounds the product before it is added."""
    if a.dtype != torch.float32 and _widens(a):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    # Piece by piece, and not by addmm_: some BLAS libraries add term after term to what is there, and over a whole
    # vocabulary lose a digit or two.
    for begin in range(0, a.shape[1], _PRODUCT):
        total += a[:, begin : begin + _PRODUCT] @ b[begin : begin + _PRODUCT]
