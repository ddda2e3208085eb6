"""The checks before the first collective: each rank's arguments are valid, and all ranks make the same call.

A rank that refuses its arguments raises before any collective; the other ranks wait for it until the group's timeout.
Under ``D3S_KERNELS_CHECK=1`` the ranks first exchange their arguments. If one rank then has an error, all ranks raise
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._arguments.bundles import SegmentFields
from .._arguments.checks import checks_everything, is_known, require_optional_tensors, whole_number
from .._collectives import Ranks

_Checked = TypeVar("_Checked")
# The error types that all ranks raise if one rank raises them. For other types, all ranks raise RuntimeError.
_TOLD = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError)}


def asks() -> bool:
    """Returns whether the ranks exchange their arguments. Under torch.compile they do not exchange them, since each
    rank traces alone.
    """
    return checks_everything() and not torch.compiler.is_compiling()


def agree(
    ranks: Ranks, op: str, check: Callable[[], _Checked], alike: Callable[[_Checked], dict[str, Any]]
) -> _Checked:
    """Returns the result of ``check``, or raises its error. When the ranks exchange arguments, all ranks raise if
    ``check`` raises on one rank, or if a value that ``alike`` returns differs between ranks.
    """
    if not asks():
        return check()
    refusal: Exception | None = None
    try:
        checked = check()
        message = json.dumps({"arguments": {"call": op} | alike(checked)}, default=_as_json)
    except Exception as error:  # any type of error, since the other ranks are waiting for this rank's answer
        refusal = error
        message = json.dumps({"refused": [type(error).__name__, str(error)]})
    everyones: list[dict[str, Any]] = [json.loads(text) for text in ranks.gather_text(message)]
    for rank, answer in enumerate(everyones):
        if "refused" in answer:
            kind, text = answer["refused"]
            raise _TOLD.get(kind, RuntimeError)(f"{text} (on rank {rank} of {ranks.size})") from refusal
    require_alike([answer["arguments"] for answer in everyones])
    return checked


def require_alike(everyones: list[dict[str, Any]]) -> None:
    """Raises ValueError if an argument differs between ranks."""
    first = everyones[0]
    for rank, arguments in enumerate(everyones):
        for name in first:  # "call" is compared first, since other ops have other arguments
            if arguments[name] != first[name]:
                raise ValueError(
                    f"{name}: got {_shortened(first[name])} on rank 0 and {_shortened(arguments[name])} on rank "
                    f"{rank}; takes the same on all ranks of the process group"
                )


def _as_json(value: Any) -> Any:
    """Converts a value that JSON cannot hold to a form that can be compared."""
    return ["tensor", str(value.dtype), value.tolist()] if isinstance(value, Tensor) else repr(value)


def _shortened(value: Any) -> str:
    text = repr(value[2] if isinstance(value, list) and value[:1] == ["tensor"] else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Layout(NamedTuple):
    """The ranks that together hold a tensor, and how the tensor's segments are placed on these ranks."""

    process_group: dist.ProcessGroup | DeviceMesh
    placement: str
    offsets: Tensor | None
    max_segment: int | None = None
    max_rollouts: int | None = None

    def local_offsets(self, ranks: Ranks) -> Tensor | None:
        """Returns the offsets for the local op, or None if the offsets cut all ranks' values instead of this rank's
        values.
        """
        return None if self.placement == "global" and ranks.size > 1 else self.offsets

    def local_segments(self, ranks: Ranks, pooled: bool = False) -> SegmentFields:
        return self.local_offsets(ranks), self.max_segment, pooled

    def is_whole(self, values: Tensor) -> bool:
        """Returns whether each segment is whole on one rank. A 1-D tensor without offsets lies on all ranks."""
        return self.placement == "whole" and (values.dim() > 1 or self.offsets is not None)

    def check(self, name: str, values: Tensor, *takes: str) -> None:
        """Makes the checks that need no information from other ranks. :meth:`check_end` makes the remaining check."""
        placement, offsets = self.placement, self.offsets
        if placement not in takes:
            raise ValueError(f"placement: got {placement!r}; takes {', '.join(map(repr, takes[:-1]))} or {takes[-1]!r}")
        if self.max_rollouts is not None:
            most = whole_number("max_rollouts", self.max_rollouts, at_least=1)
            if values.numel() > most:
                raise ValueError(
                    f"max_rollouts: got {most} with {values.numel()} values; takes no less than any rank has of them"
                )
        if placement != "global":
            return
        if offsets is None:
            raise ValueError("offsets: got None with placement='global'; takes the offsets of all ranks' values")
        require_optional_tensors(values, offsets=offsets)
        if values.dim() != 1:
            raise ValueError(f"{name}: got shape {list(values.shape)} with offsets; takes a 1-D tensor with offsets")
        if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"offsets: got shape {list(offsets.shape)} of {offsets.dtype}; takes a 1-D int64 or int32 tensor of "
                "segments + 1"
            )
        if not is_known(offsets):
            return
        if (first := int(offsets[0])) != 0:
            raise ValueError(f"offsets: starts at {first}; must start at 0")
        if (falls := (offsets.diff() < 0).nonzero()).numel():
            at = int(falls[0]) + 1
            raise ValueError(
                f"offsets: decreases from {int(offsets[at - 1])} to {int(offsets[at])} at {at}; must not decrease"
            )

    def check_end(self, name: str, lengths: Tensor) -> None:
        """Checks that global offsets end at the number of values on all ranks. ``lengths`` has the number of values on
        each rank. Offsets and lengths are the same on all ranks, so if one rank raises, all ranks raise.
        """
        if self.placement != "global" or self.offsets is None or not is_known(self.offsets):
            return
        if (last := int(self.offsets[-1])) != (total := int(lengths.sum())):
            raise ValueError(f"offsets: ends at {last}; must end at the length of {name} on all ranks, {total}")
