"""The k largest log-probabilities of each row for a vocabulary that is sharded across ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments.checks import (
    checked_mask,
    require_no_tangent,
    require_readable,
    require_tensors,
    require_whole,
    temperature_argument,
)
from .._dispatch import ops
from .._lm_head import topk_logprobs as largest
from .._lm_head.problem import HeadProblem, LogitsDtype, checked_problem
from .._lm_head.topk_logprobs import TopkLogprobs
from .agreement import agree
from .vocabulary import Group, ShardedArgument


def vocab_parallel_topk_logprobs(
    logits_shard: Tensor,
    k: int,
    vocab_start: int | None = None,
    process_group: Group | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> TopkLogprobs:
    """Computes :func:`d3s_kernels.topk_logprobs` for logits whose vocabulary is sharded across the ranks of a group.

    Each rank finds the k largest logits of its columns, and reduces its other columns to the softmax state of each row.
    The ranks exchange both in one all-gather: k + 2 values of 8 bytes for each row and rank. Each rank then selects the
    k largest of all ranks. The results are bitwise equal on all ranks.

    Args:
        logits_shard: ``[..., V_r]``, this rank's columns of the logits, as in :func:`vocab_parallel_logprob_entropy`. A
            rank may have fewer than k columns.
        k: 1 to 1,024, the same on all ranks, and at most the size of the whole vocabulary. With ``vocab_size``, a
            larger k is refused; without it, the last ids are -1.
        vocab_start, process_group, temperature, mask, vocab_size: as in :func:`vocab_parallel_logprob_entropy`.

    Returns:
        :class:`d3s_kernels.TopkLogprobs` with ids of the whole vocabulary, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: in the same cases as :func:`vocab_parallel_logprob_entropy` and
            :func:`d3s_kernels.topk_logprobs`.

    Example:
        Here the group has one rank; a trainer takes its group from its mesh, ``mesh["tp"]``.

        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_topk_logprobs
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> vocab_parallel_topk_logprobs(
        ...     torch.arange(4.0).view(1, 4), 2, vocab_start=0, process_group=dist.group.WORLD, vocab_size=4
        ... ).token_ids
        tensor([[3, 2]], dtype=torch.int32)
        >>> dist.destroy_process_group()
    """
    sharded = ShardedArgument("logits_shard", logits_shard, -1, vocab_start, process_group, vocab_size)
    logits = sharded.local
    mask, temperature = sharded.beside(mask=mask, temperature=temperature)

    def check() -> tuple[Any, ...]:
        shard = sharded.shard
        require_whole(k=k)
        largest.require_k(k, vocab_size)
        require_readable(mask=mask, temperature=temperature)
        require_tensors(logits_shard=logits)
        require_no_tangent(logits_shard=logits)
        kept, each = checked_mask(mask, logits), temperature_argument(temperature, logits)
        nothing = largest.Largest.nothing(logits.shape[:-1].numel(), k, logits)
        ops.check("topk_softmax_state_", *nothing, logits, shard.tile_start, *each, kept)
        return logits, k, shard, each, kept

    def alike(checked: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "the rows of logits_shard": list(logits.shape[:-1]), "k": k, "temperature": temperature,
            "mask": checked[-1], "vocab_size": vocab_size,
        }  # fmt: skip

    arguments = agree(sharded.ranks, "vocab_parallel_topk_logprobs", check, alike)
    sharded.require_one_vocabulary()
    return largest.topk_logprobs(*arguments)


def vocab_parallel_linear_topk_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    k: int,
    vocab_start: int | None = None,
    process_group: Group | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    logits_dtype: LogitsDtype = torch.float32,
    workspace_bytes: int | None = None,
    vocab_size: int | None = None,
) -> TopkLogprobs:
    """Computes :func:`d3s_kernels.linear_topk_logprobs` for an LM head whose vocabulary is sharded across a group's
    ranks. It communicates as :func:`vocab_parallel_topk_logprobs` does.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32, the same on all ranks.
        weight_shard: ``[V_r, H]``, the rows of the weight for the ``V_r`` ids from ``vocab_start`` on, as in
            :func:`vocab_parallel_linear_logprob_entropy`.
        k: as in :func:`vocab_parallel_topk_logprobs`.
        vocab_start, process_group, bias, temperature, logit_softcap, mask: as in
            :func:`vocab_parallel_linear_logprob_entropy`. Rows where the mask is False have ids of -1, and 0 in all
            other results.
        max_rows: as in :func:`d3s_kernels.linear_topk_logprobs`.
        logits_dtype, workspace_bytes, vocab_size: as in :func:`vocab_parallel_linear_logprob_entropy`.

    Returns:
        :class:`d3s_kernels.TopkLogprobs` with ids of the whole vocabulary, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: in the same cases as :func:`vocab_parallel_linear_logprob_entropy` and
            :func:`d3s_kernels.linear_topk_logprobs`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_linear_topk_logprobs
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> vocab_parallel_linear_topk_logprobs(
        ...     torch.ones(1, 8), torch.arange(4.0).expand(8, 4).T, 2, vocab_start=0,
        ...     process_group=dist.group.WORLD, vocab_size=4,
        ... ).token_ids
        tensor([[3, 2]], dtype=torch.int32)
        >>> dist.destroy_process_group()
    """
    sharded = ShardedArgument("weight_shard", weight_shard, 0, vocab_start, process_group, vocab_size)
    bias = sharded.along("bias", bias)
    hidden, mask, temperature = sharded.beside(hidden=hidden, mask=mask, temperature=temperature)

    def check() -> HeadProblem:
        require_whole(k=k)
        largest.require_k(k, vocab_size)
        require_readable(bias=bias, mask=mask, temperature=temperature)
        problem = checked_problem(
            hidden, sharded.local, largest.no_labels(hidden), bias=bias, temperature=temperature,
            logit_softcap=logit_softcap, mask=mask, max_rows=max_rows, logits_dtype=logits_dtype,
            workspace_bytes=workspace_bytes, shard=sharded.shard,
        )  # fmt: skip
        problem.require_ready()
        return problem

    def alike(problem: HeadProblem) -> dict[str, Any]:
        return problem.alike() | {"k": k, "vocab_size": vocab_size}

    problem = agree(sharded.ranks, "vocab_parallel_linear_topk_logprobs", check, alike)
    sharded.require_one_vocabulary()
    return largest.linear_topk_logprobs(problem, k)
