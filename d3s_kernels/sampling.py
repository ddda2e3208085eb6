"""Sampling masks: for each row, the tokens that the sampler could have drawn, after top-k, top-p or min-p."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ._arguments import is_known, require_number, require_tensors, require_whole
from ._dispatch import ops

_MOST = 2**31 - 1  # the highest id


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class SamplingMask:
    """For each row, a span of the tokens of the vocabulary that were kept when its token was sampled.

    The spans lie one after the other: row ``i`` has ``token_ids[offsets[i]:offsets[i + 1]]``, in any order, each id
    once. Ids after ``offsets[-1]`` belong to no row, so that a choice of rows does not wait for the device. **An empty
    span means the whole vocabulary.** A row that does not count, such as padding, is left out by ``mask=``.

    The values are looked at where the host can read them (on a CPU, and under ``D3S_KERNELS_CHECK=1``).

    Attributes:
        token_ids: int32 ``[n]``, ids of the whole vocabulary.
        offsets: int32 or int64 ``[rows + 1]``, from 0, not decreasing, the last at most ``n``.

    Raises:
        ValueError, TypeError: a wrong shape or dtype, offsets that decrease or point past the ids.

    Example:
        >>> from d3s_kernels import SamplingMask
        >>> mask = SamplingMask.from_lists([[7, 2], [5], []])
        >>> mask
        SamplingMask(rows=3, token_ids=3, device='cpu')
        >>> mask.index_select([1, 0]).to_lists()
        [[5], [7, 2]]
    """

    token_ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        ids, offsets = self.token_ids, self.offsets
        require_tensors(token_ids=ids, offsets=offsets)
        if ids.dim() != 1 or ids.dtype != torch.int32:
            raise ValueError(f"token_ids: got shape {list(ids.shape)} of {ids.dtype}; takes int32 [n]")
        if offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"offsets: got shape {list(offsets.shape)} of {offsets.dtype}; takes int32 or int64 [rows + 1]"
            )
        if _known(offsets):
            _require_offsets(offsets, len(ids))
        if _known(ids) and len(ids) and int(ids.min()) < 0:
            raise ValueError(f"token_ids: got {int(ids.min())}; takes ids of tokens, at least 0")

    @classmethod
    def from_lists(cls, spans: Sequence[Sequence[int]], *, device: torch.device | str | None = None) -> SamplingMask:
        """From a list of ids for each row, as vLLM (``sampling_mask``) and SGLang (``output_token_sampling_mask``)
        return them for each generated token. A prompt's token has an empty list, or is left out by ``mask=``.

        Example:
            >>> from d3s_kernels import SamplingMask
            >>> SamplingMask.from_lists([[7, 2], [5]]).offsets
            tensor([0, 2, 3])
        """
        try:
            # An array takes whole numbers alone.
            lengths, ids = array("i", map(len, spans)), array("i", chain.from_iterable(spans))
            if ids and min(ids) < 0:
                raise OverflowError
        except (TypeError, OverflowError) as error:
            raise _bad_list(spans) from error
        offsets = _offsets_of(_numbers("spans", lengths.tobytes()))
        return cls(_numbers("spans", ids.tobytes()).to(device), offsets.to(device))

    @classmethod
    def from_padded(cls, token_ids: Tensor) -> SamplingMask:
        """From ids of an integer dtype ``[..., K]``, filled up with -1 (SkyRL, and prime-rl within its trainer). The
        rows are those of the leading dimensions, flattened.

        Example:
            >>> import torch
            >>> from d3s_kernels import SamplingMask
            >>> SamplingMask.from_padded(torch.tensor([[7, 2], [5, -1]])).to_lists()
            [[7, 2], [5]]
        """
        require_tensors(token_ids=token_ids)
        if token_ids.dim() == 0 or token_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"token_ids: got shape {list(token_ids.shape)} of {token_ids.dtype}; takes int32 or int64 [..., K]"
            )
        rows = token_ids.flatten(0, -2) if token_ids.dim() > 1 else token_ids.unsqueeze(0)
        bad = (rows < -1) | (rows > _MOST)
        if _known(bad) and bool(bad.any()):
            row, place = bad.nonzero()[0].tolist()
            raise ValueError(f"token_ids: got {int(rows[row, place])} at row {row}; takes ids of tokens, and -1")
        kept = rows >= 0
        capacity = int(kept.sum()) if rows.is_cpu else rows.numel()
        places, _ = ops.compact(kept, capacity)
        ids = rows.reshape(-1).index_select(0, places.clamp(min=0)).to(torch.int32)
        return cls(ids, _offsets_of(kept.sum(1)))

    @classmethod
    def from_counts(cls, token_ids: Tensor | bytes, counts: Tensor | bytes) -> SamplingMask:
        """From the ids of all rows, one after the other, and how many each row has; as bytes of int32 they are what
        prime-rl sends.

        Example:
            >>> import torch
            >>> from d3s_kernels import SamplingMask
            >>> SamplingMask.from_counts(torch.tensor([7, 2, 5]), torch.tensor([2, 1])).to_lists()
            [[7, 2], [5]]
        """
        ids, lengths = _numbers("token_ids", token_ids), _numbers("counts", counts)
        require_tensors(token_ids=ids, counts=lengths)
        if _known(lengths) and len(lengths) and int(lengths.min()) < 0:
            row = int((lengths < 0).nonzero()[0])
            raise ValueError(f"counts: got {int(lengths[row])} at row {row}; takes at least 0")
        bad = (ids < 0) | (ids > _MOST)
        if _known(bad) and bool(bad.any()):
            raise ValueError(f"token_ids: got {int(ids[bad][0])}; takes ids of tokens, in [0, 2^31)")
        return cls(ids.to(torch.int32), _offsets_of(lengths))

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def index_select(self, rows: Tensor | Sequence[int], *, capacity: int | None = None) -> SamplingMask:
        """The spans of these rows, in their order. Nothing waits for the device.

        Args:
            rows: int64 or int32 ``[n]`` on the mask's device (a list is sent there, which waits).
            capacity: on a GPU, how many ids there is room for; None is as many as there are, which is enough where no
                row comes twice. With more ids than that, offsets decrease, for which the ops give NaN in all rows.
        """
        if not isinstance(rows, Tensor):
            rows = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        require_tensors(token_ids=self.token_ids, rows=rows)
        require_whole(capacity=capacity)
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity: got {capacity}; takes at least 0")
        if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"rows: got shape {list(rows.shape)} of {rows.dtype}; takes int64 or int32 [n]")
        if _known(rows) and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            bad = int(rows[(rows < 0) | (rows >= self.rows)][0])
            raise ValueError(f"rows: got {bad}; takes rows in [0, {self.rows})")
        starts, lengths = self.offsets[:-1].index_select(0, rows), self.offsets.diff().index_select(0, rows)
        return _gathered(self.token_ids, starts, lengths, self._valid(), capacity)

    @classmethod
    def cat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """The rows of several masks, one mask after the other."""
        if not masks:
            raise ValueError("masks: got none; takes at least one")
        before = accumulate((len(mask.token_ids) for mask in masks), initial=0)
        starts = torch.cat([mask.offsets[:-1].long() + first for mask, first in zip(masks, before, strict=False)])
        lengths = torch.cat([mask.offsets.diff().long() for mask in masks])
        valid = torch.stack([mask._valid() for mask in masks]).all()
        return _gathered(torch.cat([mask.token_ids for mask in masks]), starts, lengths, valid, None)

    def _valid(self) -> Tensor:
        """Whether the offsets are those of spans, 0-d. On a GPU they may not be; then no span is taken from them."""
        offsets = self.offsets
        return (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= len(self.token_ids))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SamplingMask:
        """A copy on another device. ``non_blocking`` counts only towards a GPU: here, the values are looked at."""
        non_blocking &= torch.device(device).type != "cpu"
        ids, offsets = (part.to(device, non_blocking=non_blocking) for part in (self.token_ids, self.offsets))
        return SamplingMask(ids, offsets)

    def pin_memory(self) -> SamplingMask:
        """A copy in pinned memory, from which ``to(device, non_blocking=True)`` does not wait."""
        return SamplingMask(self.token_ids.pin_memory(), self.offsets.pin_memory())

    def to_lists(self) -> list[list[int]]:
        """The ids of each row. Waits for the device."""
        if not self._valid():
            raise ValueError("offsets: got some that decrease: a choice of rows had more ids than its capacity")
        ids, offsets = self.token_ids.tolist(), self.offsets.tolist()
        return [ids[first:last] for first, last in pairwise(offsets)]

    def __repr__(self) -> str:
        return f"SamplingMask(rows={self.rows}, token_ids={len(self.token_ids)}, device='{self.device}')"


def _known(tensor: Tensor) -> bool:
    return not torch.compiler.is_compiling() and is_known(tensor)


def _require_offsets(offsets: Tensor, ids: int) -> None:
    lengths = offsets.diff()
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets: got {int(offsets[0])} first; takes 0")
    if len(lengths) and int(lengths.min()) < 0:
        row = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"offsets: got {int(offsets[row])} and then {int(offsets[row + 1])} at row {row}; takes some that do not "
            "decrease"
        )
    if int(offsets[-1]) > ids:
        raise ValueError(f"offsets: got {int(offsets[-1])} last; takes at most the number of token_ids, {ids}")


def _bad_list(spans: Sequence[Sequence[int]]) -> Exception:
    """The error that names the first row of the lists which is wrong."""
    for row, span in enumerate(spans):
        if not hasattr(span, "__len__") or isinstance(span, (str, bytes)):
            return TypeError(f"spans: got {type(span).__name__} at row {row}; takes a list of ids")
        for token in span:
            if not isinstance(token, Integral):
                return TypeError(f"spans: got {token!r} at row {row}; takes ids of tokens")
            if not 0 <= token <= _MOST:
                return ValueError(f"spans: got {token} at row {row}; takes ids of tokens, in [0, 2^31)")
    return TypeError(f"spans: got {type(spans).__name__}; takes a list of lists of ids")


def _numbers(name: str, values: Tensor | bytes) -> Tensor:
    if isinstance(values, (bytes, bytearray, memoryview)):
        if len(values) % 4:
            raise ValueError(f"{name}: got {len(values)} bytes; takes those of int32, 4 each")
        return torch.frombuffer(bytearray(values), dtype=torch.int32) if len(values) else torch.empty(0).int()
    if not isinstance(values, Tensor):
        raise TypeError(f"{name}: got {type(values).__name__}; takes a tensor, or bytes of int32")
    if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: got shape {list(values.shape)} of {values.dtype}; takes int32 or int64 [n]")
    return values


def _offsets_of(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _gathered(ids: Tensor, starts: Tensor, lengths: Tensor, valid: Tensor, capacity: int | None) -> SamplingMask:
    """The spans that start there and have these lengths, one after the other; offsets that decrease if the given ones
    are not ``valid`` or do not fit.
    """
    offsets = _offsets_of(lengths)
    if _known(offsets):
        room = int(offsets[-1])
    else:
        room = len(ids) if capacity is None else capacity
        fits = valid & (offsets[-1] <= room)
        offsets = torch.where(fits, offsets, -torch.arange(len(offsets), device=offsets.device))
    if room == 0 or len(starts) == 0:
        return SamplingMask(ids.new_empty(0), offsets)
    places = torch.arange(room, device=ids.device)
    row = torch.searchsorted(offsets[1:], places, right=True).clamp(max=len(starts) - 1)
    taken = (starts.index_select(0, row) + places - offsets.index_select(0, row)).clamp(0, max(0, len(ids) - 1))
    return SamplingMask(ids.index_select(0, taken), offsets)


# ---- without an engine -----------------------------------------------------------------------------------------------

_ORDERS = {"transformers": ("top_k", "top_p", "min_p"), "vllm": ("min_p", "top_k", "top_p")}
_LOGITS_AT_ONCE = 1 << 25  # a row's rules take some 40 bytes for each logit
_UNIT = 2.0**40  # probabilities are summed as whole multiples of 1 / _UNIT: such sums do not depend on their order


def sampling_mask_from_logits(
    logits: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    temperature: float = 1.0,
    order: str = "transformers",
    max_kept: int = 4096,
) -> SamplingMask:
    """The tokens that top-k, top-p and min-p keep: for loops that sample from logits themselves, without an engine.

    Only for the logits that are sampled from. Sets that a trainer computes again from its own logits differ from the
    sampler's, because the logits do.

    Top-k keeps also what ties with the k-th logit. Top-p keeps the most likely tokens until at most ``1 - top_p`` of
    the probability is left, of ties the lower ids, and at least one token. Min-p keeps tokens whose probability is at
    least ``min_p`` times the largest one. Each works on what those before it have kept. The result is the same from
    run to run. Logits in half precision have many ties, of which transformers' own warpers keep others: sample from the
    tokens of this mask.

    Args:
        logits: ``[..., V]``, a float dtype; the rows are those of the leading dimensions, flattened.
        top_k: at least 1; None keeps all.
        top_p: in (0, 1]; None keeps all.
        min_p: in [0, 1]; None keeps all.
        temperature: a number above 0, in [1e-15, 1e15]; it divides the logits first.
        order: "transformers": top-k, top-p, min-p. "vllm": min-p, top-k, top-p.
        max_kept: the most tokens of a row. More are an error on a CPU; on a GPU, which is not waited for, results of
            such a row are NaN, and there is room for so many ids of each row.

    Raises:
        ValueError, TypeError: an argument out of its range, a row that keeps more than ``max_kept``, a row without a
            finite logit, or with NaN or infinity (on a GPU its results are NaN).

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]])
        >>> d3s.sampling_mask_from_logits(logits, top_k=3, top_p=0.9).to_lists()
        [[1, 2]]
    """
    require_tensors(logits=logits)
    if logits.dim() == 0 or not logits.is_floating_point() or logits.shape[-1] == 0:
        raise ValueError(f"logits: got shape {list(logits.shape)} of {logits.dtype}; takes floats [..., V]")
    _require_options(top_k, top_p, min_p, temperature, order, max_kept)
    rows = logits.detach().reshape(-1, logits.shape[-1])
    given = {"top_k": top_k, "top_p": None if top_p == 1 else top_p, "min_p": min_p}
    rules = [(_RULES[name], value) for name in _ORDERS[order] if (value := given[name]) is not None]
    kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    bad = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    step = max(1, _LOGITS_AT_ONCE // rows.shape[1])
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        scores = rows[part].float() / temperature
        bad[part] = ~scores.amax(1).isfinite()  # NaN, +inf, or -inf alone
        for rule, value in rules:
            scores = scores.masked_fill(~rule(scores, value), -torch.inf)
        kept[part] = scores > -torch.inf
    return _of_kept(kept, bad, max_kept)


def _require_options(
    top_k: int | None, top_p: float | None, min_p: float | None, temperature: float, order: str, max_kept: int
) -> None:
    require_whole(top_k=top_k, max_kept=max_kept)
    require_number(top_p=top_p, min_p=min_p, temperature=temperature)
    for name, whole in (("top_k", top_k), ("max_kept", max_kept)):
        if whole is not None and whole < 1:
            raise ValueError(f"{name}: got {whole}; takes at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}; takes a number in (0, 1]")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p: got {min_p}; takes a number in [0, 1]")
    if not 1e-15 <= temperature <= 1e15:
        raise ValueError(f"temperature: got {temperature}; takes a number above 0, in [1e-15, 1e15]")
    if order not in _ORDERS:
        raise ValueError(f"order: got {order!r}; takes one of {', '.join(map(repr, _ORDERS))}")


def _top_k(scores: Tensor, top_k: int) -> Tensor:
    kth = scores.topk(min(top_k, scores.shape[1]), dim=1).values[:, -1:]
    return scores >= kth


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    down = scores.sort(dim=1, descending=True, stable=True)
    # The probability of a token and of all that come after it.
    shares = (down.values.double().softmax(1) * _UNIT).round().long()
    left = shares.flip(1).cumsum(1).flip(1)
    kept = left.float() > left[:, :1].float() * (1 - top_p)
    kept[:, 0] = True
    return torch.empty_like(kept).scatter_(1, down.indices, kept)


def _min_p(scores: Tensor, min_p: float) -> Tensor:
    probability = scores.double().softmax(1)
    return probability >= min_p * probability.amax(1, keepdim=True)


_RULES: dict[str, Callable[[Tensor, Any], Tensor]] = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p}


def _of_kept(kept: Tensor, bad: Tensor, max_kept: int) -> SamplingMask:
    lengths = kept.sum(1)
    many = lengths > max_kept
    if _known(bad) and bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"logits: got NaN, infinity or no finite number in row {row}; takes some that can be sampled from"
        )
    if _known(many) and bool(many.any()):
        row = int(many.nonzero()[0])
        raise ValueError(f"max_kept: got {max_kept}; takes at least what row {row} keeps, {int(lengths[row])}")
    bad = bad | many
    # A bad row has the id -1 alone, for which the ops give NaN.
    kept = torch.where(bad.unsqueeze(1), torch.arange(kept.shape[1], device=kept.device) == 0, kept)
    capacity = int(lengths.sum()) if kept.is_cpu else len(kept) * min(max_kept, kept.shape[1])
    places, _ = ops.compact(kept, capacity)
    places = places.clamp(min=0)
    ids = torch.where(bad.index_select(0, places // kept.shape[1]), -1, places % kept.shape[1]).int()
    return SamplingMask(ids, _offsets_of(kept.sum(1)))
