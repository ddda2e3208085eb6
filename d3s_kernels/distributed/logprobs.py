"""Log-probabilities and entropies for a vocabulary that is sharded across ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments.checks import (
    checked_mask,
    require_no_tangent,
    require_readable,
    require_tensors,
    temperature_argument,
)
from .._dispatch import ops
from .._lm_head import op
from .._lm_head.problem import HeadProblem, LogitsDtype, checked_problem
from ..support.sampling_mask import LabelOutside, SamplingMask, SamplingOptions
from .agreement import agree
from .vocabulary import Group, ShardedArgument


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
        of_rank = sharded.shard
        require_readable(labels=labels, mask=mask, temperature=temperature)
        require_tensors(logits_shard=logits, labels=labels)
        require_no_tangent(logits_shard=logits)
        kept = checked_mask(mask, logits)
        numbers = temperature_argument(temperature, logits)
        supports = sampling.supports(logits)
        state = logits.new_empty((logits.shape[:-1].numel(), 4), dtype=torch.float32)
        shard = logits, labels, *of_rank.arguments
        ops.check("softmax_state_", state, *shard[:3], *numbers, kept)
        if supports.ids is None:
            return op.vocab_parallel_logprob_entropy, (*shard, *numbers, kept)
        ops.check("support_rows", logits, *supports[:2], supports.max_dense_rows, kept)
        ops.check("support_softmax_state_", state, *shard[:2], *supports.required, of_rank.tile_start, *numbers, kept)
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
    logits_dtype: LogitsDtype = torch.float32,
    workspace_bytes: int | None = None,
    keep_logits_bytes: int | None = None,
    weight_grad_into: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    label_outside: LabelOutside = "nan",
    max_dense_rows: int | None = None,
    vocab_size: int | None = None,
    sum_hidden_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`d3s_kernels.linear_logprob_entropy` for an LM head whose vocabulary is sharded across a group's
    ranks.

    Each rank has some rows of the weight, and all ranks have the same hidden states. No rank ever has logits of the
    whole vocabulary; with ``keep_logits_bytes``, it keeps logits of its shard. The forward communicates as
    :func:`vocab_parallel_logprob_entropy` does: 16 bytes for each rank and each row that ``mask`` keeps.

    **Backward.** Each rank computes the gradients of its own weight and bias. The gradient of ``hidden`` is a sum over
    the shards. The ranks first exchange one byte for each row, to agree on the rows that have a gradient. Then they
    all-reduce only those rows, in float32: if 10 % of the tokens are kept, the all-reduce carries 10 % of the rows. If
    ``hidden`` needs no gradient, nothing is communicated. As for :func:`vocab_parallel_logprob_entropy`, the loss must
    be the same on all ranks. ``hidden.grad`` is complete, and must not be summed over these ranks again, unless
    ``sum_hidden_grad`` is False.

    All arguments except ``weight_shard``, ``bias``, ``vocab_start``, ``workspace_bytes``, ``keep_logits_bytes`` and
    ``weight_grad_into`` must be the same on all ranks. If ``weight_shard`` is a DTensor, the other tensors may be
    DTensors too: ``bias`` and ``weight_grad_into`` sharded like ``weight_shard``, and all others replicated on these
    ranks.

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
        logits_dtype: the dtype to which logits are rounded: ``torch.float32``; or the dtype that hidden states, weight
            and bias share, which ``"auto"`` stands for.
        workspace_bytes: memory for a tile of logits; None means 512 MiB on a GPU and 32 MiB on a CPU.
        keep_logits_bytes: as in :func:`d3s_kernels.linear_logprob_entropy`, for the logits of this shard.
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
        sum_hidden_grad: False means that ``hidden.grad`` is only this rank's term of the gradient, and that the
            backward communicates nothing. The caller must then sum the terms over the ranks, as the reduce-scatter of
            sequence parallelism does. A term has the dtype of ``hidden``, so it is rounded before the sum.

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
    sharded = ShardedArgument("weight_shard", weight_shard, 0, vocab_start, process_group, vocab_size, sum_hidden_grad)
    sampling = SamplingOptions(sampling_mask, label_outside, max_dense_rows)
    bias, into = sharded.along("bias", bias), sharded.along("weight_grad_into", weight_grad_into)
    hidden, labels, mask, temperature = sharded.beside(hidden=hidden, labels=labels, mask=mask, temperature=temperature)

    def check() -> HeadProblem:
        shard = sharded.shard
        require_readable(hidden=hidden, labels=labels, bias=bias, mask=mask, temperature=temperature)
        problem = checked_problem(
            hidden, sharded.local, labels, bias=bias, temperature=temperature, logit_softcap=logit_softcap, mask=mask,
            max_rows=max_rows, max_grad_rows=max_grad_rows, logits_dtype=logits_dtype, workspace_bytes=workspace_bytes,
            keep_logits_bytes=keep_logits_bytes, weight_grad_into=into, supports=sampling.supports, shard=shard,
        )  # fmt: skip
        problem.require_ready()
        return problem

    def alike(problem: HeadProblem) -> dict[str, Any]:
        return problem.alike() | sampling.values() | {"vocab_size": vocab_size}

    problem = agree(sharded.ranks, "vocab_parallel_linear_logprob_entropy", check, alike)
    sharded.require_one_vocabulary(labels, sampling_mask)
    return op.linear_logprob_entropy(problem, op.adding_to(into))
