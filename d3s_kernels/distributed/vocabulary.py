"""A vocabulary shard, as the caller or a DTensor describes it, and the check that the shards of all ranks make up the
vocabulary.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as DTensorShard

from .._arguments.checks import is_known, no_tensor, require_readable, require_whole
from .._collectives import Ranks, ranks_of
from .._lm_head.problem import Shard
from ..support.sampling_mask import SamplingMask
from .agreement import asks, require_alike

Group = dist.ProcessGroup | DeviceMesh

Shards = list[tuple[int, int]]  # for each rank, the first id of its shard, and the id after the last one

# The shards of the first call with each vocab_size, for each group as long as it exists.
_shards_of_first_calls: WeakKeyDictionary[dist.ProcessGroup, dict[int, Shards]] = WeakKeyDictionary()


class ShardedArgument:
    """A tensor whose dimension ``dim`` is the vocabulary, which is sharded over ``ranks``; ``local`` is this rank's
    shard.
    """

    local: Tensor
    ranks: Ranks

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        dim: int,
        vocab_start: int | None,
        process_group: Group | None,
        vocab_size: int | None = None,
        sum_hidden_grad: bool = True,
    ) -> None:
        self._name, self._tensor, self._vocab_size, self._sum_hidden_grad = name, tensor, vocab_size, sum_hidden_grad
        # Asked once: if a check refuses a shard while a graph is traced, torch goes on in eager mode, where this rank
        # would gather shards while the others do not.
        self._is_traced = torch.compiler.is_compiling()
        if not isinstance(tensor, Tensor):
            raise no_tensor(name, tensor)
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

    @property
    def shard(self) -> Shard:
        """This rank's shard. It is read within ``agree``, as :attr:`first_token`."""
        return Shard(self.first_token, self.ranks, self._sum_hidden_grad)

    @property
    def first_token(self) -> int:
        """The first id of this rank's shard. A read of this property may raise an error on this rank but not on others,
        so the first read is within ``agree``.
        """
        require_whole(vocab_size=self._vocab_size)
        if self._vocab_size is not None and self._vocab_size < 1:
            raise ValueError(f"vocab_size: got {self._vocab_size}; takes at least 1")
        if isinstance(self._tensor, DTensor):
            return self._first_token_of(self._tensor)
        if self._start is None:
            raise TypeError(f"vocab_start: got None; takes None only where {self._name} is a DTensor")
        require_whole(vocab_start=self._start)
        if self._start < 0:
            raise ValueError(f"vocab_start: got {self._start}; takes at least 0")
        if self._is_traced:
            self._require_room(self._start)
        return self._start

    def _require_room(self, first: int) -> None:
        """Checks what a rank that traces a graph can tell alone: that its shard is within the vocabulary, and is not
        all of it while there are other ranks.
        """
        tokens, size, (_, rank, ranks) = self.tokens, self._vocab_size, self.ranks
        if size is None or tokens == 0 or (first + tokens <= size and (tokens < size or ranks == 1)):
            return
        raise ValueError(
            f"{self._name}: got tokens [{first}, {first + tokens}) on rank {rank} of {ranks}; takes this rank's shard "
            f"of the {size} tokens of vocab_size"
        )

    def _first_token_of(self, tensor: DTensor) -> int:
        """Returns the first id of this rank's shard of a DTensor. The vocabulary is cut as by torch.chunk: the last
        ranks may have fewer ids, or none.
        """
        mesh, vocabulary = tensor.device_mesh, tensor.shape[self._dim]
        if self._vocab_size is not None and self._vocab_size != vocabulary:
            raise ValueError(f"vocab_size: got {self._vocab_size}; takes {vocabulary}, as the DTensor {self._name} has")
        rank, ranks = mesh.get_local_rank(self._mesh_dim), mesh.size(self._mesh_dim)
        step = -(-vocabulary // ranks)
        first = min(rank * step, vocabulary)
        expected, tokens = min(step, vocabulary - first), tensor._local_tensor.shape[self._dim]
        if tokens != expected:
            raise ValueError(
                f"{self._name}: got a DTensor with {tokens} of {vocabulary} tokens on rank {rank} of {ranks}; takes "
                f"one that is cut evenly, {expected} tokens there"
            )
        return first

    def _dimension_of_the_vocabulary(self, tensor: DTensor, dim: int) -> int:
        """Returns the mesh dimension that shards the vocabulary. Checks that each other mesh dimension replicates the
        tensor, or shards the rows of logits.
        """
        rows_may_be_cut = dim > 0
        rest = "Replicate, or a Shard of rows," if rows_may_be_cut else "Replicate"
        cutting = [i for i, placement in enumerate(tensor.placements) if _cuts(placement) == dim]
        others = [placement for i, placement in enumerate(tensor.placements) if i not in cutting]
        if len(cutting) != 1 or not all(
            placement.is_replicate() or (rows_may_be_cut and _cuts(placement) is not None) for placement in others
        ):
            raise ValueError(
                f"{self._name}: got a DTensor with placements {tensor.placements}; takes Shard({dim}), which cuts the "
                f"vocabulary, on one dimension of the mesh, and {rest} on the others"
            )
        return cutting[0]

    def beside(self, **tensors: Any) -> list[Any]:
        """Returns arguments that must be the same on these ranks. A DTensor's placements are checked, and the DTensor
        is replaced by its local tensor. Other values are returned unchanged.
        """
        local = []
        for name, value in tensors.items():
            if isinstance(value, DTensor):
                same_mesh = isinstance(self._tensor, DTensor) and value.device_mesh == self._tensor.device_mesh
                for i, placement in enumerate(value.placements):
                    cuts_rows = same_mesh and i != self._mesh_dim and _cuts(placement) is not None
                    if not (placement.is_replicate() or cuts_rows):
                        raise ValueError(
                            f"{name}: got a DTensor with placements {value.placements}; takes Replicate on the ranks "
                            "that share the vocabulary"
                        )
                value = value.to_local()
            local.append(value)
        return local

    def along(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Returns an argument that must be sharded like the vocabulary. DTensors are treated as in :meth:`beside`."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole = self._tensor
        placed = (whole.device_mesh, whole.placements) if isinstance(whole, DTensor) else None
        if (tensor.device_mesh, tensor.placements) != placed:
            raise ValueError(
                f"{name}: got a DTensor with placements {tensor.placements}; takes one that is cut as {self._name}, or "
                "this rank's part"
            )
        return tensor.to_local()

    def require_one_vocabulary(
        self,
        labels: Tensor | None = None,
        sampling_mask: SamplingMask | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        """Refuses shards that do not make up the whole vocabulary, and labels, given ids and ids of supports in no
        shard. Each function of shards calls this after ``agree``. Without ``vocab_size`` only ``D3S_KERNELS_CHECK=1``
        checks.
        """
        shards = None
        if asks():
            shards = self._gathered_shards()
            tokens = sum(last - first for first, last in shards)
        elif self._vocab_size is None or self._is_traced:
            return
        else:
            tokens = self._vocab_size
        if self._vocab_size is not None and not isinstance(self._tensor, DTensor):  # each rank knows a DTensor's shards
            self._require_shards_of_first_call(self._vocab_size, shards)
        if labels is not None and is_known(labels):
            bad = labels[(labels != -100) & ((labels < 0) | (labels >= tokens))]
            if len(bad):
                raise ValueError(f"labels: got {int(bad[0])}; takes -100 (no target) or a token in [0, {tokens})")
        if token_ids is not None and is_known(token_ids):
            bad = token_ids[(token_ids < -1) | (token_ids >= tokens)]
            if len(bad):
                raise ValueError(f"token_ids: got {int(bad[0])}; takes -1 (no id) or a token in [0, {tokens})")
        if sampling_mask is not None and is_known(sampling_mask.token_ids):
            ids = sampling_mask.token_ids[: int(sampling_mask.offsets[-1])]
            if len(ids) and int(ids.max()) >= tokens:
                raise ValueError(f"sampling_mask: got id {int(ids.max())}; takes tokens in [0, {tokens})")

    def _require_shards_of_first_call(self, vocab_size: int, shards: Shards | None) -> None:
        """Refuses a shard that is not the shard of the first call with the same group and size. In the first call, the
        ranks gather their shards and check them. In later calls nothing is communicated: ``shards`` is None, unless the
        ranks have just gathered them for another reason.

        All ranks must make the same choice whether to gather, since a rank that gathers alone waits for the others. So
        the choice depends on the group and the size. It must not depend on the shard, which could be known on one rank
        and new on another.
        """
        of_group = _shards_of_first_calls.setdefault(self.ranks.group, {})
        known = of_group.get(vocab_size)
        if known is None:
            of_group[vocab_size] = self._gathered_shards() if shards is None else shards
            return
        own = self.ranks.rank
        now = [*known[:own], self._shard, *known[own + 1 :]] if shards is None else shards
        for rank, ((first, last), (was_first, was_last)) in enumerate(zip(now, known, strict=True)):
            both_empty = first == last and was_first == was_last
            if (first, last) != (was_first, was_last) and not both_empty:
                name = "vocab_start" if last - first == was_last - was_first else self._name
                raise ValueError(
                    f"{name}: got tokens [{first}, {last}) on rank {rank}; takes [{was_first}, {was_last}), as in the "
                    f"first call with this process group and vocab_size={vocab_size}"
                )

    def _gathered_shards(self) -> Shards:
        """Gathers the shards of all ranks. Raises the same error on all ranks unless they make up the vocabulary."""
        first, last = self._shard
        size = self._vocab_size
        everyones = self.ranks.gather_whole_numbers(first, last, -1 if size is None else size)
        require_alike([{"vocab_size": each} for _, _, each in everyones])
        shards = [(first, last) for first, last, _ in everyones]
        got = ", ".join(f"[{first}, {last}) on rank {rank}" for rank, (first, last) in enumerate(shards))
        end, follow = 0, True
        for first, last in sorted(shard for shard in shards if shard[0] < shard[1]):
            follow &= first == end
            end = last
        if size is not None and not (follow and end == size) and any(last - first == size for first, last in shards):
            raise ValueError(
                f"{self._name}: got tokens {got}; takes this rank's shard of the {size} tokens of vocab_size, not all"
            )
        if not follow:
            raise ValueError(f"vocab_start: got tokens {got}; takes shards that follow one another from token 0 on")
        if size is not None and end != size:
            raise ValueError(f"vocab_size: got {size} with tokens {got}; takes the sum of all shards, {end}")
        return shards

    @property
    def _shard(self) -> tuple[int, int]:
        """The first id of this rank's shard, and the id after its last one."""
        return self.first_token, self.first_token + self.tokens


def _cuts(placement: Placement) -> int | None:
    """Returns the dimension that a ``Shard`` placement shards in rank order. Returns None for a placement of another
    type.
    """
    return placement.dim if type(placement) is DTensorShard else None
