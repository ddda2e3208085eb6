"""A rank's shard of the vocabulary, as the caller or a DTensor describes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as DTensorShard

from .._arguments import require_readable, require_whole
from .._groups import Ranks, ranks_of


class ShardedArgument:
    """A tensor whose dimension ``dim`` is the vocabulary: ``local`` is this rank's shard; the ``ranks`` have all."""

    local: Tensor
    first_token: int
    ranks: Ranks

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        dim: int,
        vocab_start: int | None,
        process_group: dist.ProcessGroup | DeviceMesh | None,
    ) -> None:
        self._name, self._tensor = name, tensor
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; takes a tensor")
        if isinstance(tensor, DTensor):
            for argument, value in (("vocab_start", vocab_start), ("process_group", process_group)):
                if value is not None:
                    raise ValueError(f"{argument}: got {value!r}; takes None where {name} is a DTensor, which says it")
            self._mesh_dim = self._dimension_of_the_vocabulary(tensor, dim % max(1, tensor.dim()))
            self.ranks = ranks_of(tensor.device_mesh.get_group(self._mesh_dim), name)
            self.local = tensor.to_local()
        else:
            require_readable(**{name: tensor})
            if process_group is None:
                raise TypeError(f"process_group: got None; takes None only where {name} is a DTensor")
            self.local, self.ranks = tensor, ranks_of(process_group)
        self._dim, self._start = dim, vocab_start
        self.tokens = self.local.shape[dim] if self.local.dim() else 0

    def find_start(self) -> None:
        """Sets ``first_token``. It is checked within ``agree``, since an error may occur on this rank alone."""
        if isinstance(self._tensor, DTensor):
            self.first_token = _first_token(self._name, self._tensor, self._dim, self._mesh_dim)
            return
        if self._start is None:
            raise TypeError(f"vocab_start: got None; takes None only where {self._name} is a DTensor")
        require_whole(vocab_start=self._start)
        if self._start < 0:
            raise ValueError(f"vocab_start: got {self._start}; takes at least 0")
        self.first_token = self._start

    def _dimension_of_the_vocabulary(self, tensor: DTensor, dim: int) -> int:
        """The mesh dimension that cuts the vocabulary. The others replicate the tensor, or cut the rows of logits."""
        rows_may_be_cut = dim > 0
        rest = "Replicate, or a Shard of rows," if rows_may_be_cut else "Replicate"
        found = [i for i, placement in enumerate(tensor.placements) if _cuts(placement) == dim]
        others = [placement for i, placement in enumerate(tensor.placements) if i not in found]
        if len(found) != 1 or not all(
            placement.is_replicate() or (rows_may_be_cut and _cuts(placement) is not None) for placement in others
        ):
            raise ValueError(
                f"{self._name}: got a DTensor with placements {tensor.placements}; takes Shard({dim}), which cuts the "
                f"vocabulary, on one dimension of the mesh, and {rest} on the others"
            )
        return found[0]

    def beside(self, **tensors: Any) -> list[Any]:
        """Arguments that are the same on these ranks: the local tensor of a DTensor, other values as they are."""
        return [self._beside(name, value) if isinstance(value, DTensor) else value for name, value in tensors.items()]

    def _beside(self, name: str, tensor: DTensor) -> Tensor:
        same_mesh = isinstance(self._tensor, DTensor) and tensor.device_mesh == self._tensor.device_mesh
        for i, placement in enumerate(tensor.placements):
            cuts_rows = same_mesh and i != self._mesh_dim and _cuts(placement) is not None
            if not (placement.is_replicate() or cuts_rows):
                raise ValueError(
                    f"{name}: got a DTensor with placements {tensor.placements}; takes Replicate on the ranks that "
                    "share the vocabulary"
                )
        return tensor.to_local()

    def along(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """An argument that is cut as the vocabulary is: the local tensor of a DTensor, another value as it is."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole = self._tensor
        if not isinstance(whole, DTensor) or (tensor.device_mesh, tensor.placements) != (
            whole.device_mesh,
            whole.placements,
        ):
            raise ValueError(
                f"{name}: got a DTensor with placements {tensor.placements}; takes one that is cut as {self._name}, or "
                "this rank's part"
            )
        return tensor.to_local()


def _cuts(placement: Placement) -> int | None:
    """The dimension that it cuts in rank order, or None. Other kinds of Shard have another order: None."""
    return placement.dim if type(placement) is DTensorShard else None


def _first_token(name: str, tensor: DTensor, dim: int, mesh_dim: int) -> int:
    """The rank's first token. A DTensor is cut as by torch.chunk: the last ranks may have fewer tokens, or none."""
    mesh, vocabulary = tensor.device_mesh, tensor.shape[dim]
    step = -(-vocabulary // mesh.size(mesh_dim))
    first = min(mesh.get_local_rank(mesh_dim) * step, vocabulary)
    tokens, own = min(step, vocabulary - first), tensor._local_tensor.shape[dim]
    if own != tokens:
        raise ValueError(
            f"{name}: got a DTensor with {own} of {vocabulary} tokens on rank {mesh.get_local_rank(mesh_dim)} of "
            f"{mesh.size(mesh_dim)}; takes one that is cut evenly, {tokens} tokens there"
        )
    return first
