"""The collectives of the ops that work across ranks. Imports nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(NamedTuple):
    """A process group, the rank of this process in it, and the number of ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def add_(self, values: Tensor) -> Tensor:
        """Sums the values over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def maximum_(self, values: Tensor) -> Tensor:
        """Takes the maximum of the values over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Returns ``[ranks, ...]``: the values of every rank. ``values`` must have the same shape on all ranks."""
        everyones = values.new_empty(self.size, values.numel())
        _all_gather(everyones.view(-1), values.reshape(-1), group=self.group)
        return everyones.view(self.size, *values.shape)

    def gather_number(self, number: int, like: Tensor) -> Tensor:
        """Gathers one integer from every rank. Returns int64 ``[ranks]``, on the device of ``like``."""
        return self.gather(torch.full((1,), number, dtype=torch.int64, device=like.device)).view(-1)

    def gather_whole_numbers(self, *numbers: int) -> list[list[int]]:
        """Gathers a few integers from every rank, with one collective that the host waits for. The tensors are on the
        device for messages, so no GPU is waited for if the group has a back-end for CPUs.
        """
        everyones: list[list[int]] = self.gather(torch.tensor(numbers, device=self._device_of_messages)).tolist()
        return everyones

    @property
    def _device_of_messages(self) -> torch.device:
        """The device that torch uses to send Python objects in this group: the CPU if the group has a back-end for
        CPUs, else the device of the group's back-end.
        """
        return torch.device(c10d._get_object_coll_device(self.group))

    def gather_text(self, text: str) -> list[str]:
        """Gathers one text from every rank, with two collectives that the host waits for: one for the lengths, one for
        the padded UTF-8 bytes. Torch's own collectives for Python objects are not used, since they unpickle data, and
        unpickling may run code.
        """
        message = text.encode()
        lengths = [length for (length,) in self.gather_whole_numbers(len(message))]
        if max(lengths) == 0:
            return [""] * self.size
        padded = torch.frombuffer(bytearray(message.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        everyones = self.gather(padded.to(self._device_of_messages)).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(everyones, lengths, strict=True)]


def ranks_of(process_group: dist.ProcessGroup | DeviceMesh, name: str = "process_group") -> Ranks:
    """Returns the :class:`Ranks` of a process group or mesh. ``name`` is the name of the argument in error messages."""
    group: object = process_group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{name}: got a mesh of {group.ndim} dimensions; takes one dimension of it")
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this process is not in it; takes one that it is in")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name}: got {type(group).__name__}; takes a torch.distributed process group, a mesh of one "
            "dimension, or None"
        )
    return Ranks(group, group.rank(), group.size())


def ranks_named(name: str) -> Ranks:
    """Returns the :class:`Ranks` of the group that torch has registered under this name. Ops take the name of a group,
    because a group itself cannot be an argument of an op.
    """
    return ranks_of(c10d._resolve_process_group(name))  # type: ignore[arg-type, attr-defined]
