"""The LM head with a sampling mask: logits of the kept tokens alone.

A logit has a place: one for each id of the mask, and then one for the label of each row, which may join its set.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .problem import HeadProblem

_op = torch.ops.d3s_kernels


def rows_of(matrix: Tensor) -> Tensor:
    """The same ``[n, columns]``, with the columns of a row side by side."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def flat_rows(problem: HeadProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states ``[rows, H]``, and labels and mask ``[rows]``."""
    rows, mask = problem.rows, problem.mask
    hidden = rows_of(problem.hidden.reshape(rows, problem.hidden.shape[-1]))
    return hidden, problem.labels.reshape(rows), None if mask is None else mask.reshape(rows)


def kept_logits(problem: HeadProblem) -> Tensor:
    """The logits of all places, for each row: ``[rows, places]``, which share their memory."""
    hidden, labels, mask = flat_rows(problem)
    logits: Tensor = _op.kept_logits.default(
        hidden, rows_of(problem.weight), labels, problem.sampling_ids, problem.sampling_offsets, problem.bias,
        problem.logit_softcap, mask, problem.shard.first_token, problem.include_label, problem.logits_dtype,
    )  # fmt: skip
    return logits.expand(problem.rows, -1)


def spans_of(problem: HeadProblem) -> dict[str, Any]:
    return {
        "sampling_ids": problem.sampling_ids,
        "sampling_offsets": problem.sampling_offsets,
        "include_label": problem.include_label,
    }


def has_span(problem: HeadProblem) -> Tensor:
    """bool ``[rows]``."""
    assert problem.sampling_offsets is not None
    return problem.sampling_offsets.diff() != 0


def dense_rows(problem: HeadProblem) -> HeadProblem:
    """The rows with an empty span, of which all logits are computed."""
    assert problem.sampling_ids is not None
    assert problem.sampling_offsets is not None
    # Offsets may be unchecked on a GPU: where they are bad, the row's results are NaN.
    start, end = problem.sampling_offsets[:1], problem.sampling_offsets[1:]
    empty = ~has_span(problem) & (end >= 0) & (end <= len(problem.sampling_ids))
    empty[:1] &= start == 0
    mask = empty.view(problem.labels.shape)
    mask = mask if problem.mask is None else mask & problem.mask
    return problem._replace(mask=mask, sampling_ids=None, sampling_offsets=None, max_dense_rows=None)
