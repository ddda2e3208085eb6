"""Log-probabilities and entropies for a vocabulary that is sharded across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import (
    checked_mask,
    require_head_options,
    require_no_tangent,
    require_optional_tensors,
    require_readable,
    require_tensors,
    temperature_argument,
)
from .._dispatch import ops
from .._head.at_backward import with_weight_grad_into
from .._head.operands import operands
from .._head.problem import HeadProblem, require_bounds, require_memory
from .._head.shard import Shard
from ..sampling import LabelOutside, SamplingMask, op_arguments
from .agreement import agree, asks
from .sharded_argument import ShardedArgument

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
) -> tuple[Tensor, Tensor]:
    """:func:`d3s_kernels.logprob_entropy` of logits whose vocabulary is sharded across the ranks of a group.

    Each rank reduces its columns to the softmax state of every row, ``(max, S, T, the label's logit)``. One all-gather
    of these ``[rows, 4]`` float32 numbers follows, 16 bytes for each row and rank, and each rank merges them in rank
    order. Nothing else is communicated, and all ranks have the same results, to the bit.

    **Backward.** Nothing is communicated. The loss is the same on all ranks, and so is the incoming gradient of
    ``logprob`` and ``entropy``. From it and the row's entropy, maximum and log S, each rank computes the gradient of
    its columns. This is the convention of Megatron's vocab-parallel cross entropy. Do not scale the loss by the number
    of these ranks, and do not sum its terms over them: an all-reduce that autograd sees would give the right loss, but
    gradients that are too large by the number of ranks.

    If ``logits_shard`` is a DTensor, the other tensors may be DTensors too: replicated, or with rows cut as its rows
    are. If its rows are cut, plain tensors and the sampling mask have only this rank's rows.

    Args:
        logits_shard: ``[..., V_r]``, this rank's columns of the logits, bfloat16, float16 or float32, any strides
            except in the last dimension. Ranks may have different numbers of columns, or none. A token that only pads
            the vocabulary is a column of ``-inf``; a whole shard may be padding. Or a DTensor with ``Shard(-1)`` on one
            dimension of its mesh, and ``Replicate``, or ``Shard`` of rows, on the others.
        labels: int64 or int32 ``[...]``, tokens of the whole vocabulary, the same on all ranks; -100 means no target:
            logprob 0, entropy as usual. A label that no rank has gives NaN, and NaN gradients.
        vocab_start: the token of this rank's first column; None for a DTensor.
        process_group: a process group, or a mesh of one dimension, whose ranks share the vocabulary; None for a
            DTensor.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``; the same
            on all ranks.
        mask: bool or integer (True where it is not 0) ``[...]``, the same on all ranks; rows where it is False are not
            read and give 0 and 0.
        sampling_mask: as in :func:`d3s_kernels.logprob_entropy`, with tokens of the whole vocabulary, the same on all
            ranks: each reads those of its shard. A token that no rank has is left out, unless
            ``D3S_KERNELS_CHECK=1`` has the ranks compare what they have.
        label_outside, max_dense_rows: as in :func:`d3s_kernels.logprob_entropy`, the same on all ranks.

    Returns:
        ``(logprob, entropy)``, float32 ``[...]`` each, in nats: plain tensors, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, a temperature that is not above 0, a group that this
            process is not in, a DTensor that is cut otherwise. If one rank alone refuses its arguments, the others wait
            for it. With ``D3S_KERNELS_CHECK=1`` all ranks raise the same error, also if labels, temperatures or masks
            differ between ranks, if shards overlap or leave a gap, and if a label is in no shard.

    Example:
        Here the group has one rank; a trainer takes its group from its mesh, ``mesh["tp"]``.

        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_logprob_entropy
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> logprob, entropy = vocab_parallel_logprob_entropy(
        ...     torch.zeros(2, 4), torch.tensor([1, -100]), vocab_start=0, process_group=dist.group.WORLD
        ... )
        >>> logprob, entropy
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 1.3863]))
        >>> dist.destroy_process_group()
    """
    shard = ShardedArgument("logits_shard", logits_shard, -1, vocab_start, process_group)
    logits, rows = shard.local, shard.local.shape[:-1]
    labels, mask, temperature = shard.beside(labels=labels, mask=mask, temperature=temperature)

    def arguments() -> tuple[Any, ...]:
        nonlocal mask
        require_readable(labels=labels, mask=mask, temperature=temperature)
        require_tensors(logits_shard=logits, labels=labels)
        require_no_tangent(logits_shard=logits)
        mask = checked_mask(mask, logits)
        number, tensor = temperature_argument(temperature, logits)
        spans = op_arguments(sampling_mask, max_dense_rows, logits, label_outside)
        return logits, labels, shard.first_token, shard.ranks.group.group_name, number, tensor, mask, *spans

    def refuse(*given: Any) -> None:
        state = logits.new_empty((rows.numel(), 4), dtype=torch.float32)
        ops.check("softmax_state_", state, *given[:3], *given[4:])

    def alike() -> dict[str, Any]:
        return {
            "the rows of logits_shard": list(rows), "labels": labels, "temperature": temperature, "mask": mask,
            **_of_mask(sampling_mask, label_outside, max_dense_rows),
        }  # fmt: skip

    given = _agreed("vocab_parallel_logprob_entropy", shard, arguments, refuse, alike, sampling_mask)
    logprob, entropy, _, _ = ops.vocab_parallel_logprob_entropy(*given)
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
) -> tuple[Tensor, Tensor]:
    """:func:`d3s_kernels.linear_logprob_entropy` of an LM head whose vocabulary is sharded across the ranks of a group.

    Each rank has some rows of the weight, and all ranks have the same hidden states. The logits are never held as a
    whole. The forward communicates as :func:`vocab_parallel_logprob_entropy` does: 16 bytes for each rank and each row
    that ``mask`` keeps.

    **Backward.** Each rank has its own gradients of weight and bias. The gradient of ``hidden`` is a sum over the
    shards. For it the ranks exchange a byte for each row, to agree on the rows that have a gradient, and then sum only
    those rows, in float32. With 10 % of the tokens kept the all-reduce carries 10 % of the rows. If ``hidden`` needs no
    gradient, nothing is communicated. The loss is the same on all ranks, as in :func:`vocab_parallel_logprob_entropy`.
    ``hidden.grad`` is complete, and must not be summed over these ranks again.

    All arguments except ``weight_shard``, ``bias``, ``vocab_start``, ``workspace_bytes`` and ``weight_grad_into`` are
    the same on all ranks. If ``weight_shard`` is a DTensor, the other tensors may be DTensors too: ``bias`` and
    ``weight_grad_into`` cut as the weight is, the rest replicated on these ranks.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32, the same on all ranks. It needs a gradient on all or none.
        weight_shard: ``[V_r, H]``, the dtype of ``hidden``, or one of the two float32 (see
            :func:`d3s_kernels.linear_logprob_entropy`): the weight of tokens ``vocab_start`` to ``vocab_start + V_r``.
            Ranks may have different numbers of tokens, or none. Or a DTensor with ``Shard(0)`` on one dimension of its
            mesh, and ``Replicate`` on the others; nothing is summed over the others here.
        labels: int64 or int32 ``[...]``, tokens of the whole vocabulary, the same on all ranks; -100 means no target.
            A label that no rank has gives NaN, and NaN gradients.
        vocab_start: the token of the first row of ``weight_shard``; None for a DTensor.
        process_group: a process group, or a mesh of one dimension, whose ranks share the vocabulary; None for a
            DTensor.
        bias: ``[V_r]``, likewise; ``-inf`` for a token that only pads the vocabulary.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``.
        logit_softcap: logits become ``softcap * tanh(logits / softcap)`` before the temperature (Gemma).
        mask: bool or integer (True where it is not 0) ``[...]``, the same on all ranks; rows where it is False cost
            nothing and give 0 and 0.
        max_rows: the caller's bound on the rows that ``mask`` keeps. With it the forward needs no host synchronisation;
            if it is exceeded, all outputs are NaN.
        max_grad_rows: the caller's bound on the rows with a gradient. With it the backward needs no host
            synchronisation, and the all-reduce carries that many rows; if it is exceeded, all gradients are NaN.
        logits_dtype: what the logits are rounded to: ``torch.float32``, or the one dtype of hidden states, weight and
            bias.
        workspace_bytes: memory for a tile of logits; None is 512 MiB on a GPU and 32 MiB on a CPU.
        weight_grad_into: a contiguous tensor of the shape of ``weight_shard``, in float32; or in its dtype, if nothing
            is converted. Every backward **adds** the weight's gradient to it, also one that asks for other gradients
            alone, and never zeroes it. Autograd then has no gradient for the weight, and hooks on the weight get None.
            If the weight requires no gradient, nothing is added. Not under ``torch.compile``.
        sampling_mask: as in :func:`d3s_kernels.linear_logprob_entropy`, with tokens of the whole vocabulary: each rank
            computes those of its shard. The ranks then exchange 16 bytes for each row, and in the backward H float32
            numbers for each row, besides what rows with an empty span take.
        label_outside, max_dense_rows: as in :func:`d3s_kernels.linear_logprob_entropy`.

    Returns:
        ``(logprob, entropy)``, float32 ``[...]`` each, in nats: plain tensors, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: as :func:`vocab_parallel_logprob_entropy` and
            :func:`d3s_kernels.linear_logprob_entropy`.

    Example:
        Here the group has one rank; a trainer takes its group from its mesh, ``mesh["tp"]``.

        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_linear_logprob_entropy
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> hidden, weight = torch.zeros(2, 8), torch.randn(4, 8)
        >>> logprob, entropy = vocab_parallel_linear_logprob_entropy(
        ...     hidden, weight, torch.tensor([1, -100]), vocab_start=0, process_group=dist.group.WORLD
        ... )
        >>> logprob, entropy
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 1.3863]))
        >>> dist.destroy_process_group()
    """
    shard = ShardedArgument("weight_shard", weight_shard, 0, vocab_start, process_group)
    weight = shard.local
    bias, into = shard.along("bias", bias), shard.along("weight_grad_into", weight_grad_into)
    hidden, labels, mask, temperature = shard.beside(hidden=hidden, labels=labels, mask=mask, temperature=temperature)

    def arguments() -> tuple[Any, ...]:
        nonlocal mask
        require_readable(hidden=hidden, labels=labels, bias=bias, mask=mask, temperature=temperature)
        require_tensors(hidden=hidden, weight_shard=weight, labels=labels)
        require_optional_tensors(hidden, bias=bias, weight_grad_into=into)
        mask = checked_mask(mask, hidden)
        require_no_tangent(hidden=hidden, weight_shard=weight, bias=bias)
        require_head_options(
            logit_softcap, logits_dtype, max_rows=max_rows, max_grad_rows=max_grad_rows, workspace_bytes=workspace_bytes
        )
        number, tensor = temperature_argument(temperature, hidden)
        states, of_tokens, of_bias = operands(hidden, weight, bias, into, "weight_shard")
        return (
            states, of_tokens, labels, shard.first_token, shard.ranks.group.group_name, of_bias, number, tensor,
            logit_softcap, mask, max_rows, max_grad_rows, logits_dtype, workspace_bytes,
            *op_arguments(sampling_mask, max_dense_rows, hidden, label_outside),
        )  # fmt: skip

    def refuse(*given: Any) -> None:
        number, tensor = given[6:8]
        HeadProblem(Shard(shard.first_token, shard.ranks), *given[:3], *given[5:10], *given[12:]).check()
        require_memory(given[1], given[5])
        require_bounds(max_rows=max_rows, max_grad_rows=max_grad_rows)
        # A rank without tokens runs no kernel that checks the temperature. So it is checked before others wait.
        state = hidden.new_empty((labels.numel(), 4), dtype=torch.float32)
        ops.check(
            "softmax_state_finish", state, number, tensor if tensor is None or tensor.dim() == 0 else tensor.reshape(-1)
        )

    def alike() -> dict[str, Any]:
        return {
            "hidden": (list(hidden.shape), str(hidden.dtype)),
            "a gradient of hidden": torch.is_grad_enabled() and hidden.requires_grad,
            "labels": labels, "temperature": temperature, "logit_softcap": logit_softcap, "mask": mask,
            "max_rows": max_rows, "max_grad_rows": max_grad_rows, "logits_dtype": str(logits_dtype),
            **_of_mask(sampling_mask, label_outside, max_dense_rows),
        }  # fmt: skip

    op = "vocab_parallel_linear_logprob_entropy"
    given = _agreed(op, shard, arguments, refuse, alike, sampling_mask)
    logprob, entropy, _, _ = with_weight_grad_into(into, op, *given)
    return logprob, entropy


def _of_mask(
    sampling_mask: SamplingMask | None, label_outside: LabelOutside, max_dense_rows: int | None
) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    return {
        "sampling_mask": sampling_mask and sampling_mask.token_ids,
        "the offsets of sampling_mask": sampling_mask and sampling_mask.offsets,
        "label_outside": label_outside,
        "max_dense_rows": max_dense_rows,
    }


def _agreed(
    op: str,
    shard: ShardedArgument,
    arguments: Callable[[], tuple[Any, ...]],
    refuse: Callable[..., None],
    alike: Callable[[], dict[str, Any]],
    sampling_mask: SamplingMask | None = None,
) -> tuple[Any, ...]:
    """The op's arguments, checked beforehand, so that the op refuses none while other ranks wait."""

    def check() -> tuple[Any, ...]:
        shard.find_start()
        given = arguments()
        if not torch.compiler.is_compiling():  # else values are unknown, and torch checks shapes
            refuse(*given)
        return given

    given = agree(shard.ranks, op, check, lambda _: alike())
    if asks():
        _require_one_vocabulary(shard, alike()["labels"], sampling_mask)
    return given


def _require_one_vocabulary(shard: ShardedArgument, labels: Tensor, sampling_mask: SamplingMask | None) -> None:
    """Raises on all ranks alike, unless the shards make up the whole vocabulary, and every label and kept token lies
    in a shard.
    """
    own = torch.tensor([shard.first_token, shard.tokens], device=labels.device)
    edges = [(first, first + tokens) for first, tokens in shard.ranks.gather(own).tolist()]
    end = 0
    for first, last in sorted(edge for edge in edges if edge[0] < edge[1]):
        if first != end:
            given = ", ".join(f"[{a}, {b}) on rank {rank}" for rank, (a, b) in enumerate(edges))
            raise ValueError(f"vocab_start: got tokens {given}; takes shards that follow one another from token 0 on")
        end = last
    bad = labels[(labels != -100) & ((labels < 0) | (labels >= end))]
    if len(bad):
        raise ValueError(f"labels: got {int(bad[0])}; takes -100 (no target) or a token in [0, {end})")
    if sampling_mask is not None:
        kept = sampling_mask.token_ids[: int(sampling_mask.offsets[-1])]
        if len(kept) and int(kept.max()) >= end:
            raise ValueError(f"sampling_mask: got id {int(kept.max())}; takes tokens in [0, {end})")
