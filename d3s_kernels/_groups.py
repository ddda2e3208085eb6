"""The collectives of the ops that work across ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

# The function is called all_gather_single from torch 2.13 on, and all_gather_into_tensor before.
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
        """Returns int64 ``[ranks]``, on the device of ``like``: the number of every rank."""
        return self.gather(torch.full((1,), number, dtype=torch.int64, device=like.device)).view(-1)

    def gather_text(self, text: str) -> list[str]:
        """Returns the text of every rank. One collective gathers the lengths; another gathers the UTF-8 bytes, padded
        to the longest text. The host waits for both. No rank unpickles data from another rank, so a text can describe a
        fault but cannot run code.
        """
        message = text.encode()
        # The device from which torch sends objects: the CPU if the group has a back-end for it, else the group's own
        # device.
        device = torch.device(c10d._get_object_coll_device(self.group))
        lengths = self.gather(torch.tensor([len(message)], device=device)).view(-1).tolist()
        if max(lengths) == 0:
            return [""] * self.size
        padded = torch.frombuffer(bytearray(message.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        everyones = self.gather(padded.to(device)).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(everyones, lengths, strict=True)]


def ranks_of(process_group: dist.ProcessGroup | DeviceMesh, name: str = "process_group") -> Ranks:
    """The ranks of a process group or mesh. Error messages call the argument ``name``."""
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
    """The ranks of the group that torch has registered under this name. An op takes the name because it cannot take the
    group itself.
    """
    return ranks_of(c10d._resolve_process_group(name))  # type: ignore[arg-type, attr-defined]
