"""Sampling masks. For each row, a sampling mask holds the ids that the sampler could have drawn after top-k, top-p or
min-p.

``from_logits.py`` makes sampling masks from logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._arguments.bundles import NO_SUPPORTS, OptionalSupports
from .._arguments.checks import (
    is_known,
    no_tensor,
    require_optional_tensors,
    require_readable,
    require_tensors,
    require_whole,
)
from .._dispatch import ops

_MOST = 2**31 - 1  # the highest possible id


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class SamplingMask:
    """The support of each row: a list of the ids of the vocabulary from which the row's token was sampled.

    The ids of all rows are concatenated: the support of row ``i`` is ``token_ids[offsets[i]:offsets[i + 1]]``, in any
    order, with each id once. Ids after ``offsets[-1]`` are padding and belong to no row. Such padding makes it possible
    to select rows without a host sync. **A row without ids is computed over the whole vocabulary.** To leave out a row
    (such as the row of a padding token), use the ops' ``mask=``.

    The values are checked if the host can read them: on a CPU, or with ``D3S_KERNELS_CHECK=1``.

    Attributes:
        token_ids: int32 ``[n]``, ids of the whole vocabulary.
        offsets: int32 or int64 ``[rows + 1]``; the first offset is 0, no offset is smaller than the previous offset,
            and the last is at most ``n``.

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
        require_readable(token_ids=ids, offsets=offsets)
        if ids.dim() != 1 or ids.dtype != torch.int32:
            raise ValueError(f"token_ids: got shape {list(ids.shape)} of {ids.dtype}; takes int32 [n]")
        if offsets.dim() != 1 or len(offsets) == 0 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"offsets: got shape {list(offsets.shape)} of {offsets.dtype}; takes int32 or int64 [rows + 1]"
            )
        if known(offsets):
            down = offsets[1:] < offsets[:-1]
            if int(offsets[0]) != 0:
                raise ValueError(f"offsets: got {int(offsets[0])} first; takes 0")
            if down.any():
                row = int(down.nonzero()[0])
                raise ValueError(
                    f"offsets: got {int(offsets[row])} and then {int(offsets[row + 1])} at row {row}; takes some that "
                    "do not decrease"
                )
            if int(offsets[-1]) > len(ids):
                raise ValueError(
                    f"offsets: got {int(offsets[-1])} last; takes at most the number of token_ids, {len(ids)}"
                )
        if known(ids) and len(ids) and int(ids.min()) < 0:
            raise ValueError(f"token_ids: got {int(ids.min())}; takes ids of tokens, at least 0")

    @classmethod
    def from_lists(cls, supports: Sequence[Sequence[int]], *, device: torch.device | str | None = None) -> SamplingMask:
        """Makes a mask from a list of ids for each row. vLLM (``sampling_mask``) and SGLang
        (``output_token_sampling_mask``) return such a list for each generated token. For a token of the prompt, pass an
        empty list, or mask the token with the ops' ``mask=``.

        Example:
            >>> from d3s_kernels import SamplingMask
            >>> SamplingMask.from_lists([[7, 2], [5]]).offsets
            tensor([0, 2, 3])
        """
        try:
            # An array raises an error for anything but whole numbers.
            lengths, ids = array("i", map(len, supports)), array("i", chain.from_iterable(supports))
            if ids and min(ids) < 0:
                raise OverflowError
        except (TypeError, OverflowError) as error:
            raise _bad_list(supports) from error
        offsets = offsets_of(_numbers("supports", lengths.tobytes()))
        return cls(_numbers("supports", ids.tobytes()).to(device), offsets.to(device))

    @classmethod
    def from_padded(cls, token_ids: Tensor) -> SamplingMask:
        """Makes a mask from int32 or int64 ids ``[..., K]``, padded with -1 (as in SkyRL, and within the trainer of
        prime-rl). The leading dimensions, flattened, are the rows.

        Example:
            >>> import torch
            >>> from d3s_kernels import SamplingMask
            >>> SamplingMask.from_padded(torch.tensor([[7, 2], [5, -1]])).to_lists()
            [[7, 2], [5]]
        """
        require_tensors(token_ids=token_ids)
        require_readable(token_ids=token_ids)
        if token_ids.dim() == 0 or token_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"token_ids: got shape {list(token_ids.shape)} of {token_ids.dtype}; takes int32 or int64 [..., K]"
            )
        rows = token_ids.flatten(0, -2) if token_ids.dim() > 1 else token_ids.unsqueeze(0)
        bad = (rows < -1) | (rows > _MOST)
        if known(bad) and bool(bad.any()):
            row, place = bad.nonzero()[0].tolist()
            raise ValueError(f"token_ids: got {int(rows[row, place])} at row {row}; takes ids of tokens, and -1")
        kept = rows >= 0
        capacity = int(kept.sum()) if rows.is_cpu else rows.numel()
        places, _ = ops.compact(kept, capacity)
        ids = rows.reshape(-1).index_select(0, places.clamp(min=0)).to(torch.int32)
        return cls(ids, offsets_of(kept.sum(1)))

    @classmethod
    def from_counts(cls, token_ids: Tensor | bytes, counts: Tensor | bytes) -> SamplingMask:
        """Makes a mask from the ids of all rows, one row after the other, and the number of ids in each row. Each of
        the two arguments may also be bytes of int32 values, as prime-rl sends them.

        Example:
            >>> import torch
            >>> from d3s_kernels import SamplingMask
            >>> SamplingMask.from_counts(torch.tensor([7, 2, 5]), torch.tensor([2, 1])).to_lists()
            [[7, 2], [5]]
        """
        ids, lengths = _numbers("token_ids", token_ids), _numbers("counts", counts)
        require_tensors(token_ids=ids, counts=lengths)
        if known(lengths) and len(lengths) and int(lengths.min()) < 0:
            row = int((lengths < 0).nonzero()[0])
            raise ValueError(f"counts: got {int(lengths[row])} at row {row}; takes at least 0")
        bad = (ids < 0) | (ids > _MOST)
        if known(bad) and bool(bad.any()):
            raise ValueError(f"token_ids: got {int(ids[bad][0])}; takes ids of tokens, in [0, 2^31)")
        return cls(ids.to(torch.int32), offsets_of(lengths))

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def index_select(self, rows: Tensor | Sequence[int], *, capacity: int | None = None) -> SamplingMask:
        """Returns the mask of these rows, in the order of ``rows``. No host sync.

        Args:
            rows: int64 or int32 ``[n]`` on the mask's device; or a list, whose copy to a GPU causes a host sync.
            capacity: on a GPU, the number of ids to allocate. None means as many ids as this mask has, which is enough
                if no row is selected twice. If the selected rows have more ids than ``capacity``, the new mask is
                invalid: its offsets decrease, and the ops return NaN for all rows.
        """
        if not isinstance(rows, Tensor):
            rows = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        require_tensors(token_ids=self.token_ids, rows=rows)
        require_readable(rows=rows)
        require_whole(capacity=capacity)
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity: got {capacity}; takes at least 0")
        if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"rows: got shape {list(rows.shape)} of {rows.dtype}; takes int64 or int32 [n]")
        if known(rows) and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            bad = int(rows[(rows < 0) | (rows >= self.rows)][0])
            raise ValueError(f"rows: got {bad}; takes rows in [0, {self.rows})")
        starts, lengths = self.offsets[:-1].index_select(0, rows), self.offsets.diff().index_select(0, rows)
        return _gathered(self.token_ids, starts, lengths, self._valid(), capacity)

    @classmethod
    def cat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenates the rows of several masks."""
        if not masks:
            raise ValueError("masks: got none; takes at least one")
        before = accumulate((len(mask.token_ids) for mask in masks), initial=0)
        starts = torch.cat([mask.offsets[:-1].long() + first for mask, first in zip(masks, before, strict=False)])
        lengths = torch.cat([mask.offsets.diff().long() for mask in masks])
        valid = torch.stack([mask._valid() for mask in masks]).all()
        return _gathered(torch.cat([mask.token_ids for mask in masks]), starts, lengths, valid, None)

    def _valid(self) -> Tensor:
        """Returns a 0-d bool tensor: whether the offsets are valid. On a GPU they may be invalid, since nothing has
        checked them. A mask that is made from an invalid mask gets offsets that decrease, so it is invalid too.
        """
        offsets = self.offsets
        return (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] <= len(self.token_ids))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> SamplingMask:
        """Returns a copy on another device. ``non_blocking`` has no effect for a copy to the CPU, since the host checks
        the copied values.
        """
        non_blocking &= torch.device(device).type != "cpu"
        ids, offsets = (part.to(device, non_blocking=non_blocking) for part in (self.token_ids, self.offsets))
        return SamplingMask(ids, offsets)

    def pin_memory(self) -> SamplingMask:
        """Returns a copy in pinned memory, from which ``to(device, non_blocking=True)`` needs no host sync."""
        return SamplingMask(self.token_ids.pin_memory(), self.offsets.pin_memory())

    def to_lists(self) -> list[list[int]]:
        """Returns the ids of each row. On a GPU, this causes a host sync."""
        if not self._valid():
            raise ValueError("offsets: got some that decrease: a choice of rows had more ids than its capacity")
        ids, offsets = self.token_ids.tolist(), self.offsets.tolist()
        return [ids[first:last] for first, last in pairwise(offsets)]

    def to_padded(self) -> Tensor:
        """Returns the ids of each row as int32 ``[rows, K]``, padded with -1: the form of given ids that
        :func:`d3s_kernels.token_logprobs` takes. K is the size of the largest support. On a GPU, this causes a host
        sync.
        """
        if not self._valid():
            raise ValueError("offsets: got some that decrease: a choice of rows had more ids than its capacity")
        begins, sizes = self.offsets[:-1].unsqueeze(1), self.offsets.diff().unsqueeze(1)
        column = torch.arange(int(sizes.max()) if self.rows else 0, device=self.device)
        places = (begins + column).clamp(max=len(self.token_ids) - 1)
        return torch.where(column < sizes, self.token_ids[places], -1)

    def __repr__(self) -> str:
        return f"SamplingMask(rows={self.rows}, token_ids={len(self.token_ids)}, device='{self.device}')"


LabelOutside = Literal["nan", "include"]


class SamplingOptions(NamedTuple):
    """A public function's arguments that belong to sampling masks, before any check."""

    sampling_mask: SamplingMask | None
    label_outside: LabelOutside
    max_dense_rows: int | None

    def supports(self, like: Tensor) -> OptionalSupports:
        return supports_of(self.sampling_mask, self.max_dense_rows, like, self.label_outside)

    def values(self) -> dict[str, Any]:
        """Returns all values in a dict. The keys are the names that error messages use."""
        mask = self.sampling_mask
        tensors = {"sampling_mask": mask and mask.token_ids, "the offsets of sampling_mask": mask and mask.offsets}
        return tensors | {"label_outside": self.label_outside, "max_dense_rows": self.max_dense_rows}


def supports_of(
    sampling_mask: SamplingMask | None,
    max_dense_rows: int | None,
    like: Tensor,
    label_outside: LabelOutside = "nan",
) -> OptionalSupports:
    """Checks a sampling mask with its options, and returns the supports of the rows."""
    if max_dense_rows is not None:
        require_whole(max_dense_rows=max_dense_rows)
    if label_outside not in ("nan", "include"):
        raise ValueError(f"label_outside: got {label_outside!r}; takes 'nan' or 'include'")
    if sampling_mask is None:
        if max_dense_rows is not None:
            raise ValueError(f"max_dense_rows: got {max_dense_rows} without a sampling_mask; takes it with one")
        return NO_SUPPORTS
    if not isinstance(sampling_mask, SamplingMask):
        raise TypeError(f"sampling_mask: got {type(sampling_mask).__name__}; takes a SamplingMask or None")
    require_optional_tensors(like, sampling_mask=sampling_mask.token_ids)
    include_label = label_outside == "include"
    return OptionalSupports(sampling_mask.token_ids, sampling_mask.offsets, include_label, max_dense_rows)


def known(tensor: Tensor) -> bool:
    return not torch.compiler.is_compiling() and is_known(tensor)


def _bad_list(supports: Sequence[Sequence[int]]) -> Exception:
    """Returns an error that names the first row with a wrong list."""
    for row, ids in enumerate(supports):
        if not hasattr(ids, "__len__") or isinstance(ids, (str, bytes)):
            return TypeError(f"supports: got {type(ids).__name__} at row {row}; takes a list of ids")
        for token in ids:
            if not isinstance(token, Integral):
                return TypeError(f"supports: got {token!r} at row {row}; takes ids of tokens")
            if not 0 <= token <= _MOST:
                return ValueError(f"supports: got {token} at row {row}; takes ids of tokens, in [0, 2^31)")
    return TypeError(f"supports: got {type(supports).__name__}; takes a list of lists of ids")


def _numbers(name: str, values: Tensor | bytes) -> Tensor:
    if isinstance(values, (bytes, bytearray, memoryview)):
        if len(values) % 4:
            raise ValueError(f"{name}: got {len(values)} bytes; takes those of int32, 4 each")
        return torch.frombuffer(bytearray(values), dtype=torch.int32) if len(values) else torch.empty(0).int()
    if not isinstance(values, Tensor):
        raise no_tensor(name, values, "a tensor, or bytes of int32")
    require_readable(**{name: values})
    if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: got shape {list(values.shape)} of {values.dtype}; takes int32 or int64 [n]")
    return values


def offsets_of(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _gathered(ids: Tensor, starts: Tensor, lengths: Tensor, valid: Tensor, capacity: int | None) -> SamplingMask:
    """Makes a mask of the supports in ``ids`` with these starts and lengths. If ``valid`` is false, or if the ids do
    not fit into ``capacity``, the offsets of the mask decrease, which makes the mask invalid.
    """
    offsets = offsets_of(lengths)
    if known(offsets):
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
