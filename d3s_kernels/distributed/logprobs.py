"""Log-probabilities and entropies for a vocabulary that is sharded across ranks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as DTensorShard

from .._arguments.checks import (
    checked_mask,
    is_known,
    no_tensor,
    require_no_tangent,
    require_readable,
    require_tensors,
    require_whole,
    temperature_argument,
)
from .._collectives import Ranks, ranks_of
from .._dispatch import ops
from .._lm_head import op
from .._lm_head.problem import HeadProblem, Shard, checked_problem
from ..support.sampling_mask import LabelOutside, SamplingMask, SamplingOptions
from .agreement import agree, asks, require_alike

Group = dist.ProcessGroup | DeviceMesh


def vocab_parallel_logprob_entropy(
    logits_shard: Tensor,
    labels: Tensor,
    vocab_start: int | None = None,
    process_group: Group | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    label_outside: LabelOutside = "nan",
    max_dense_rows: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`d3s_kernels.logprob_entropy` for logits whose vocabulary is sharded across the ranks of a group.

    Each rank reduces its columns to the softmax state of every row, ``(max, S, T, the label's logit)``. The ranks then
    exchange these states in one all-gather: float32 ``[rows, 4]``, so 16 bytes for each row and rank. Each rank merges
    the states in rank order. Nothing else is communicated. The results are bitwise equal on all ranks.

    **Backward.** Nothing is communicated. The loss must be the same on all ranks, as for Megatron's vocab-parallel
    cross entropy. Then the incoming gradients are also the same, and each rank computes the gradient of its columns
    from the incoming gradients and from the entropy, maximum and log S of each row. Do not scale the loss by the number
    of these ranks, and do not all-reduce the terms of the loss over these ranks: if autograd sees the all-reduce,
    gradients are too large by a factor of the number of ranks.

    If ``logits_shard`` is a DTensor, the other tensors may be DTensors too: replicated, or with their rows sharded as
    in ``logits_shard``. If rows are sharded, plain tensors and the sampling mask must have only this rank's rows.

    Args:
        logits_shard: ``[..., V_r]``, this rank's columns of the logits, in bfloat16, float16 or float32. The stride of
            the last dimension must be 1; all other strides are allowed. Ranks may have different numbers of columns, or
            none. An id that only pads the vocabulary has a column of ``-inf``; a whole shard may be padding. A DTensor
            must have ``Shard(-1)`` on one dimension of its mesh, and ``Replicate`` or a ``Shard`` of rows on each other
            dimension.
        labels: int64 or int32 ``[...]``, ids of the whole vocabulary, the same on all ranks; -100 means no target: the
            logprob is 0, and the entropy is as usual. For a label in no shard, the logprob and the gradients are NaN;
            with ``vocab_size``, a CPU refuses it.
        vocab_start: the id of this rank's first column; None for a DTensor.
        process_group: a process group, or a mesh of one dimension, whose ranks share the vocabulary; None for a
            DTensor.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``; the same
            on all ranks.
        mask: bool, or integer (0 means False) ``[...]``, the same on all ranks; rows where the mask is False are not
            read, and both of their results are 0.
        sampling_mask: as in :func:`d3s_kernels.logprob_entropy`, with ids of the whole vocabulary, and the same on all
            ranks. Each rank reads the ids of its shard. An id in no shard is ignored; with ``D3S_KERNELS_CHECK=1``, and
            on a CPU with ``vocab_size``, it raises an error.
        label_outside, max_dense_rows: as in :func:`d3s_kernels.logprob_entropy`, and the same on all ranks.
        vocab_size: the number of ids of the whole vocabulary, with those that only pad it: the sum of all shards
            (Megatron's ``padded_vocab_size``). The same on all ranks, or None on all. With it, shards that do not make
            up the vocabulary are refused, and so is the whole vocabulary in place of a shard. If all ranks pass the
            whole, and ``vocab_start`` follows its length, only this number shows it: without it, each logprob is too
            low by the logarithm of the number of ranks. In the first call with a group and a size, the ranks gather
            their shards, 24 bytes each, and the host waits; so do not capture the first call in a CUDA graph. Later
            calls communicate nothing more, and take the same shard. Under ``torch.compile``, each rank checks only its
            own shard. A DTensor has this number: it is compared with the argument.

    Returns:
        ``(logprob, entropy)``, float32 ``[...]`` each, in nats: plain tensors, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, a temperature that is not above 0, a group that this
            process is not in, a DTensor with other placements. If only one rank raises, the other ranks wait for it
            until the group's timeout. If the first call with a ``vocab_size`` finds shards that do not make up the
            vocabulary, all ranks raise the same error.
            With ``D3S_KERNELS_CHECK=1`` all ranks raise the same error, except for errors about the group or about
            placements of DTensors. All ranks then also raise if labels, temperatures or masks differ between ranks, if
            shards overlap or leave a gap, and if a label is in no shard.

    Example:
        Here the group has one rank; a trainer takes its group from its mesh, ``mesh["tp"]``.

        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_logprob_entropy
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logprob, entropy = vocab_parallel_logprob_entropy(
        ...     torch.zeros(2, 4), torch.tensor([1, -100]), vocab_start=0, process_group=dist.group.WORLD, vocab_size=4
        ... )
        >>> logprob, entropy
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 1.3863]))
        >>> dist.destroy_process_group()
    """
    sharded = ShardedArgument("logits_shard", logits_shard, -1, vocab_start, process_group, vocab_size)
    logits, ranks, sampling = (
        sharded.local,
        sharded.ranks,
        SamplingOptions(sampling_mask, label_outside, max_dense_rows),
    )
    labels, mask, temperature = sharded.beside(labels=labels, mask=mask, temperature=temperature)

    def check() -> tuple[Any, tuple[Any, ...]]:
        first_token = sharded.first_token
        require_readable(labels=labels, mask=mask, temperature=temperature)
        require_tensors(logits_shard=logits, labels=labels)
        require_no_tangent(logits_shard=logits)
        kept = checked_mask(mask, logits)
        numbers = temperature_argument(temperature, logits)
        supports = sampling.supports(logits)
        state = logits.new_empty((logits.shape[:-1].numel(), 4), dtype=torch.float32)
        shard = logits, labels, first_token, ranks.group.group_name
        ops.check("softmax_state_", state, *shard[:3], *numbers, kept)
        if supports.ids is None:
            return op.vocab_parallel_logprob_entropy, (*shard, *numbers, kept)
        ops.check("support_rows", logits, *supports[:2], supports.max_dense_rows, kept)
        ops.check("support_softmax_state_", state, *shard[:2], *supports.required, first_token, *numbers, kept)
        return op.vocab_parallel_support_logprob_entropy, (*shard, *supports, *numbers, kept)

    def alike(checked: tuple[Any, tuple[Any, ...]]) -> dict[str, Any]:
        return {
            "the rows of logits_shard": list(logits.shape[:-1]), "labels": labels, "temperature": temperature,
            "mask": checked[1][-1],  # converted to bool
            **sampling.values(), "vocab_size": vocab_size,
        }  # fmt: skip

    op_of_shard, arguments = agree(ranks, "vocab_parallel_logprob_entropy", check, alike)
    sharded.require_one_vocabulary(labels, sampling_mask)
    logprob, entropy, *_ = op_of_shard(*arguments)
    return logprob, entropy


def vocab_parallel_linear_logprob_entropy(
    hidden: Tensor,
    weight_shard: Tensor,
    labels: Tensor,
    vocab_start: int | None = None,
    process_group: Group | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    workspace_bytes: int | None = None,
    weight_grad_into: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    label_outside: LabelOutside = "nan",
    max_dense_rows: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`d3s_kernels.linear_logprob_entropy` for an LM head whose vocabulary is sharded across a group's
    ranks.

    Each rank has some rows of the weight, and all ranks have the same hidden states. The logits are never stored as a
    whole. The forward communicates as :func:`vocab_parallel_logprob_entropy` does: 16 bytes for each rank and each row
    that ``mask`` keeps.

    **Backward.** Each rank computes the gradients of its own weight and bias. The gradient of ``hidden`` is a sum over
    the shards. The ranks first exchange one byte for each row, to agree on the rows that have a gradient. Then they
    all-reduce only those rows, in float32: if 10 % of the tokens are kept, the all-reduce carries 10 % of the rows. If
    ``hidden`` needs no gradient, nothing is communicated. As for :func:`vocab_parallel_logprob_entropy`, the loss must
    be the same on all ranks. ``hidden.grad`` is complete, and must not be summed over these ranks again.

    All arguments except ``weight_shard``, ``bias``, ``vocab_start``, ``workspace_bytes`` and ``weight_grad_into`` must
    be the same on all ranks. If ``weight_shard`` is a DTensor, the other tensors may be DTensors too: ``bias`` and
    ``weight_grad_into`` sharded like ``weight_shard``, and all others replicated on these ranks.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32, the same on all ranks. Either all ranks need the gradient of
            ``hidden``, or no rank needs it.
        weight_shard: ``[V_r, H]``, the rows of the weight for the ``V_r`` ids from ``vocab_start`` on. It has the dtype
            of ``hidden``, or one of the two is float32 (see :func:`d3s_kernels.linear_logprob_entropy`). Ranks may have
            different numbers of ids, or none. A DTensor must have ``Shard(0)`` on one dimension of its mesh, and
            ``Replicate`` on the other dimensions. Gradients are not summed over the other dimensions.
        labels: int64 or int32 ``[...]``, ids of the whole vocabulary, the same on all ranks; -100 means no target. For
            a label in no shard, the logprob and the gradients are NaN; with ``vocab_size``, a CPU refuses it.
        vocab_start: the id of the first row of ``weight_shard``; None for a DTensor.
        process_group: a process group, or a mesh of one dimension, whose ranks share the vocabulary; None for a
            DTensor.
        bias: ``[V_r]``, for the ids of ``weight_shard``. The same dtypes are allowed as for ``weight_shard``. Pass a
            bias of ``-inf`` for an id that only pads the vocabulary.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``.
        logit_softcap: logits become ``softcap * tanh(logits / softcap)`` before they are divided by the temperature (as
            in Gemma).
        mask: bool, or integer (0 means False) ``[...]``, the same on all ranks; rows where the mask is False cost
            nothing, and both of their results are 0.
        max_rows: the caller's bound on the number of rows that ``mask`` keeps. With a bound, the forward causes no host
            sync; if the bound is exceeded, all outputs are NaN.
        max_grad_rows: the caller's bound on the number of rows with a gradient. With a bound, the backward causes no
            host sync, and the all-reduce carries as many rows as the bound; if the bound is exceeded, all gradients are
            NaN.
        logits_dtype: the dtype to which logits are rounded: ``torch.float32``, or the dtype that hidden states, weight
            and bias share.
        workspace_bytes: memory for a tile of logits; None means 512 MiB on a GPU and 32 MiB on a CPU.
        weight_grad_into: a contiguous tensor with the shape of ``weight_shard``, in float32. It may also have the dtype
            of ``weight_shard``, if hidden states, weight and bias share this dtype. Every backward **adds** the
            weight's gradient to this tensor, even a backward that asks only for other gradients. No backward zeroes the
            tensor. Autograd then has no gradient for the weight, and hooks on the weight get None. If the weight
            requires no gradient, nothing is added. Not supported under ``torch.compile``.
        sampling_mask: as in :func:`d3s_kernels.linear_logprob_entropy`, with ids of the whole vocabulary. Each rank
            computes the logits of the supports' ids in its shard. The ranks exchange 16 bytes for each row in the
            forward, and H float32 values for each row in the backward. For rows without a support, the ranks also
            exchange what they would exchange without a sampling mask.
        label_outside, max_dense_rows: as in :func:`d3s_kernels.linear_logprob_entropy`.
        vocab_size: the number of ids of the whole vocabulary, with those that only pad it, as in
            :func:`vocab_parallel_logprob_entropy`. With it, the whole weight in place of a shard is refused.

    Returns:
        ``(logprob, entropy)``, float32 ``[...]`` each, in nats: plain tensors, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: in the same cases as :func:`vocab_parallel_logprob_entropy` and
            :func:`d3s_kernels.linear_logprob_entropy`.

    Example:
        Here the group has one rank; a trainer takes its group from its mesh, ``mesh["tp"]``.

        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_linear_logprob_entropy
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(4, 8)
        >>> logprob, entropy = vocab_parallel_linear_logprob_entropy(
        ...     hidden, weight, torch.tensor([1, -100]), vocab_start=0, process_group=dist.group.WORLD, vocab_size=4
        ... )
        >>> logprob, entropy
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 1.3863]))
        >>> dist.destroy_process_group()
    """
    sharded = ShardedArgument("weight_shard", weight_shard, 0, vocab_start, process_group, vocab_size)
    sampling = SamplingOptions(sampling_mask, label_outside, max_dense_rows)
    bias, into = sharded.along("bias", bias), sharded.along("weight_grad_into", weight_grad_into)
    hidden, labels, mask, temperature = sharded.beside(hidden=hidden, labels=labels, mask=mask, temperature=temperature)

    def check() -> HeadProblem:
        shard = Shard(sharded.first_token, sharded.ranks)
        require_readable(hidden=hidden, labels=labels, bias=bias, mask=mask, temperature=temperature)
        problem = checked_problem(
            hidden, sharded.local, labels, bias=bias, temperature=temperature, logit_softcap=logit_softcap, mask=mask,
            max_rows=max_rows, max_grad_rows=max_grad_rows, logits_dtype=logits_dtype, workspace_bytes=workspace_bytes,
            weight_grad_into=into, supports=sampling.supports, shard=shard,
        )  # fmt: skip
        if not torch.compiler.is_compiling():  # while a graph is traced, values are unknown, and torch checks shapes
            problem.check()
            problem.require_memory()
            # A rank without ids runs no kernel that checks the temperature. So the temperature is checked here, before
            # other ranks wait for this rank.
            state = hidden.new_empty((problem.rows, 4), dtype=torch.float32)
            ops.check("softmax_state_finish", state, *problem.flat_temperature)
        return problem

    def alike(problem: HeadProblem) -> dict[str, Any]:
        return {
            "hidden": (list(hidden.shape), str(hidden.dtype)),
            "a gradient of hidden": torch.is_grad_enabled() and hidden.requires_grad,
            "labels": labels, "temperature": temperature, "logit_softcap": logit_softcap, "mask": problem.mask,
            "max_rows": max_rows, "max_grad_rows": max_grad_rows, "logits_dtype": str(logits_dtype),
            **sampling.values(), "vocab_size": vocab_size,
        }  # fmt: skip

    problem = agree(sharded.ranks, "vocab_parallel_linear_logprob_entropy", check, alike)
    sharded.require_one_vocabulary(labels, sampling_mask)
    return op.linear_logprob_entropy(problem, op.adding_to(into))


# ---- a vocabulary shard, as the caller or a DTensor describes it ----------------------------------------------------


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
        process_group: dist.ProcessGroup | DeviceMesh | None,
        vocab_size: int | None = None,
    ) -> None:
        self._name, self._tensor, self._vocab_size = name, tensor, vocab_size
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

    def require_one_vocabulary(self, labels: Tensor | None = None, sampling_mask: SamplingMask | None = None) -> None:
        """Refuses shards that do not make up the whole vocabulary, and labels and ids of supports in no shard. Each
        function of shards calls this after ``agree``. Without ``vocab_size`` only ``D3S_KERNELS_CHECK=1`` checks.
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
