"""Log-probabilities at given ids for a vocabulary that is sharded across ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments.checks import checked_mask, require_no_tangent, require_readable, temperature_argument
from .._dispatch import ops
from .._lm_head import op
from .._lm_head import token_logprobs as given_ids
from .._lm_head.problem import HeadProblem, LogitsDtype, checked_problem
from .._lm_head.token_logprobs import TokenLogprobs, require_ids_of_rows, with_labels
from .agreement import agree
from .vocabulary import Group, ShardedArgument


def vocab_parallel_token_logprobs(
    logits_shard: Tensor,
    token_ids: Tensor,
    labels: Tensor | None = None,
    vocab_start: int | None = None,
    process_group: Group | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> TokenLogprobs:
    """Computes :func:`d3s_kernels.token_logprobs` for logits whose vocabulary is sharded across the ranks of a group.

    Each rank takes the logits at the given ids of its shard, and reduces its other columns to the softmax state of each
    row. The ranks exchange both in one all-gather: K + 4 float32 values for each row and rank. The results are bitwise
    equal on all ranks. The backward communicates nothing; the loss must be the same on all ranks, as for
    :func:`vocab_parallel_logprob_entropy`.

    Args:
        logits_shard: ``[..., V_r]``, this rank's columns of the logits, as in :func:`vocab_parallel_logprob_entropy`.
        token_ids: int32 or int64 ``[..., K]``, ids of the whole vocabulary, the same on all ranks; -1 stands for no id.
            An id in no shard makes its row NaN; with ``vocab_size``, a CPU refuses it.
        labels: int64 or int32 ``[...]``, ids of the whole vocabulary, the same on all ranks; -100 or None: no label.
        vocab_start, process_group, temperature, mask, vocab_size: as in :func:`vocab_parallel_logprob_entropy`.

    Returns:
        :class:`d3s_kernels.TokenLogprobs`, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: in the same cases as :func:`vocab_parallel_logprob_entropy` and
            :func:`d3s_kernels.token_logprobs`.

    Example:
        Here the group has one rank; a trainer takes its group from its mesh, ``mesh["tp"]``.

        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_token_logprobs
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> vocab_parallel_token_logprobs(
        ...     torch.zeros(1, 4), torch.tensor([[2, 0]]), vocab_start=0, process_group=dist.group.WORLD, vocab_size=4
        ... ).tail_logprob
        tensor([-0.6931])
        >>> dist.destroy_process_group()
    """
    sharded = ShardedArgument("logits_shard", logits_shard, -1, vocab_start, process_group, vocab_size)
    logits = sharded.local
    token_ids, labels, mask, temperature = sharded.beside(
        token_ids=token_ids, labels=labels, mask=mask, temperature=temperature
    )

    def check() -> tuple[Any, ...]:
        shard = sharded.shard
        require_readable(labels=labels, mask=mask, temperature=temperature)
        require_ids_of_rows(token_ids, "logits_shard", logits)
        require_no_tangent(logits_shard=logits)
        targets, kept, each = (
            with_labels(labels, token_ids),
            checked_mask(mask, logits),
            temperature_argument(temperature, logits),
        )
        rows = logits.shape[:-1].numel()
        taken = given_ids.Taken.nothing(token_ids.reshape(rows, token_ids.shape[-1]), logits)
        flat = token_ids.reshape(taken.logits.shape)
        ops.check("token_softmax_state_", *taken, logits, targets, flat, shard.tile_start, *each, kept)
        return logits, token_ids, targets, shard, each, kept

    def alike(checked: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "the rows of logits_shard": list(logits.shape[:-1]), "token_ids": token_ids, "labels": labels,
            "temperature": temperature, "mask": checked[-1], "vocab_size": vocab_size,
        }  # fmt: skip

    arguments = agree(sharded.ranks, "vocab_parallel_token_logprobs", check, alike)
    sharded.require_one_vocabulary(labels, token_ids=token_ids)
    return given_ids.token_logprobs(*arguments)


def vocab_parallel_linear_token_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    token_ids: Tensor,
    labels: Tensor | None = None,
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
    vocab_size: int | None = None,
    sum_hidden_grad: bool = True,
) -> TokenLogprobs:
    """Computes :func:`d3s_kernels.linear_token_logprobs` for an LM head whose vocabulary is sharded across a group's
    ranks.

    The forward communicates as :func:`vocab_parallel_token_logprobs` does, and the backward as
    :func:`vocab_parallel_linear_logprob_entropy` does: ``hidden.grad`` is complete, and must not be summed over these
    ranks again, unless ``sum_hidden_grad`` is False.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32, the same on all ranks. Either all ranks need the gradient of
            ``hidden``, or no rank needs it.
        weight_shard: ``[V_r, H]``, the rows of the weight for the ``V_r`` ids from ``vocab_start`` on, as in
            :func:`vocab_parallel_linear_logprob_entropy`.
        token_ids, labels: as in :func:`vocab_parallel_token_logprobs`, for the rows of ``hidden``.
        vocab_start, process_group, bias, temperature, logit_softcap, mask, max_rows, max_grad_rows: as in
            :func:`vocab_parallel_linear_logprob_entropy`.
        logits_dtype, workspace_bytes, keep_logits_bytes, weight_grad_into, vocab_size, sum_hidden_grad: as there.

    Returns:
        :class:`d3s_kernels.TokenLogprobs`, the same on all ranks of the group.

    Raises:
        ValueError, TypeError: in the same cases as :func:`vocab_parallel_linear_logprob_entropy` and
            :func:`d3s_kernels.linear_token_logprobs`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from d3s_kernels.distributed import vocab_parallel_linear_token_logprobs
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> vocab_parallel_linear_token_logprobs(
        ...     torch.zeros(1, 8), torch.randn(4, 8), torch.tensor([[2, 0]]), vocab_start=0,
        ...     process_group=dist.group.WORLD, vocab_size=4,
        ... ).logprobs
        tensor([[-1.3863, -1.3863]])
        >>> dist.destroy_process_group()
    """
    sharded = ShardedArgument("weight_shard", weight_shard, 0, vocab_start, process_group, vocab_size, sum_hidden_grad)
    bias, into = sharded.along("bias", bias), sharded.along("weight_grad_into", weight_grad_into)
    hidden, token_ids, labels, mask, temperature = sharded.beside(
        hidden=hidden, token_ids=token_ids, labels=labels, mask=mask, temperature=temperature
    )

    def check() -> HeadProblem:
        require_readable(labels=labels, bias=bias, mask=mask, temperature=temperature)
        require_ids_of_rows(token_ids, "hidden", hidden)
        problem = checked_problem(
            hidden, sharded.local, with_labels(labels, token_ids), bias=bias, temperature=temperature,
            logit_softcap=logit_softcap, mask=mask, max_rows=max_rows, max_grad_rows=max_grad_rows,
            logits_dtype=logits_dtype, workspace_bytes=workspace_bytes, keep_logits_bytes=keep_logits_bytes,
            weight_grad_into=into, shard=sharded.shard,
        )  # fmt: skip
        problem.require_ready()
        return problem

    def alike(problem: HeadProblem) -> dict[str, Any]:
        return problem.alike() | {"token_ids": token_ids, "vocab_size": vocab_size}

    problem = agree(sharded.ranks, "vocab_parallel_linear_token_logprobs", check, alike)
    sharded.require_one_vocabulary(labels, token_ids=token_ids)
    return given_ids.linear_token_logprobs(problem, token_ids, op.adding_to(into))
