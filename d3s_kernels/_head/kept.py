"""The LM head with a sampling mask: logits of the kept tokens alone.

A logit has a place: one for each id of the mask, and then one for the label of each row, which may join its set.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .problem import HeadProblem

_op = torch.ops.d3s_kernels


def rows_of(matrix: Tensor) -> Tensor:
    """The same ``[n, columns]``, with the columns of a row side by side."""
    return matrix if matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


def flat(values: Tensor, rows: int) -> Tensor:
    return values if values.dim() == 1 else values.reshape(rows)


def flat_rows(problem: HeadProblem) -> HeadProblem:
    """The same with hidden states ``[rows, H]``, and labels and mask ``[rows]``."""
    hidden, count, mask = problem.hidden, problem.rows, problem.mask
    return problem._replace(
        hidden=rows_of(hidden if hidden.dim() == 2 else hidden.reshape(count, hidden.shape[-1])),
        weight=rows_of(problem.weight),
        labels=flat(problem.labels, count),
        mask=None if mask is None else flat(mask, count),
    )


def kept_logits(problem: HeadProblem) -> Tensor:
    """The logits of all places, for each of the flat rows: ``[rows, places]``, which share their memory."""
    logits: Tensor = _op.kept_logits.default(
        problem.hidden, problem.weight, problem.labels, problem.sampling_ids, problem.sampling_offsets, problem.bias,
        problem.logit_softcap, problem.mask, problem.shard.first_token, problem.include_label, problem.logits_dtype,
    )  # fmt: skip
    return logits.expand(problem.rows, -1)


def spans_of(problem: HeadProblem) -> tuple[Tensor | None, Tensor | None, bool]:
    return problem.sampling_ids, problem.sampling_offsets, problem.include_label


def has_span(problem: HeadProblem) -> Tensor:
    """bool ``[rows]``."""
    assert problem.sampling_offsets is not None
    return problem.sampling_offsets.diff() != 0


def dense_rows(problem: HeadProblem) -> HeadProblem:
    """The rows with an empty span, of which all logits are computed."""
    offsets, ids = problem.sampling_offsets, problem.sampling_ids
    assert ids is not None
    assert offsets is not None
    # Offsets may be unchecked on a GPU: where they are bad, the row's results are NaN. Both ends of an empty span are
    # what good offsets must be; of row 0 they are 0.
    good = offsets.clamp(0, ids.shape[0])
    good[:1].zero_()
    mask = (good[:-1] == offsets[1:]).logical_and_(good[1:] == offsets[:-1]).view(problem.labels.shape)
    mask = mask if problem.mask is None else mask.logical_and_(problem.mask)
    return problem._replace(mask=mask, sampling_ids=None, sampling_offsets=None, max_dense_rows=None)
