"""The LM head of a tensor-parallel rank: its part of the weight, and the hidden states that Megatron's output layer
gets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...distributed.logprobs import vocab_parallel_linear_logprob_entropy
from ...logprobs.logprob_entropy import linear_logprob_entropy
from ...support.sampling_mask import SamplingMask
from .main_grad import with_main_grad


def shard_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup,
    sequence_parallel: bool,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    max_rows: int | None = None,
    sampling_mask: SamplingMask | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes log-probabilities and entropies from the hidden states that Megatron's output layer gets.

    The rows of the weight are the ids of the vocabulary, in the order of the tensor-parallel ranks. The softmax states
    of the ranks are merged as in :func:`d3s_kernels.distributed.vocab_parallel_linear_logprob_entropy`, which says what
    is sent. A context-parallel rank passes its own rows; nothing is sent to other context-parallel ranks.

    **Sequence parallelism.** Each tensor-parallel rank has the hidden states of ``s / ranks`` positions. They are
    gathered, and their gradient is reduce-scattered, by Megatron's own functions. If each rank has fewer rows in
    ``mask`` than positions, only such rows are gathered: as many from each rank as the rank with the most of them has.
    With ``max_rows``, the host does not wait for this number, and ``max_rows + 1`` takes its place.

    **Gradient of the weight.** If Megatron's DistributedDataParallel keeps a ``main_grad``, the backward's matrix
    products add to it, and the hooks of DistributedDataParallel run as after a layer of Megatron. Otherwise autograd
    gets the gradient.

    Args:
        hidden: ``[s, b, H]``, or ``[s / ranks, b, H]`` with sequence parallelism.
        weight: ``[V / ranks, H]``, this rank's rows.
        labels: int64 or int32 ``[b, s]``, the token that follows each position, or -100 for none; the same on all
            tensor-parallel ranks.
        tp_group: the group of the tensor-parallel ranks.
        sequence_parallel: whether ``hidden`` has only this rank's positions.
        bias: ``[V / ranks]``.
        vocab_size: the number of ids of the vocabulary. Rows of the weight from this id on are padding, and count
            nothing. None counts all rows, as Megatron's own loss does.
        mask: bool ``[b, s]``, the rows that count, the same on all tensor-parallel ranks; all others cost nothing and
            get 0.
        temperature: a number above 0, or a float tensor that broadcasts to ``[b, s]``.
        max_rows: the caller's bound on the number of rows in ``mask``; if it is exceeded, all results are NaN.
        sampling_mask: the sampler's supports of the rows ``[b, s]``, row after row.
        options: ``logit_softcap``, ``max_grad_rows``, ``logits_dtype``, ``workspace_bytes``, ``label_outside`` and
            ``max_dense_rows`` of :func:`d3s_kernels.distributed.vocab_parallel_linear_logprob_entropy`.

    Returns:
        ``(logprob, entropy)``, float32 ``[b, s]``, in nats; the same on all tensor-parallel ranks.

    Raises:
        ValueError, TypeError: in the cases of the op; a wrong shape; a ``vocab_size`` that is not within the weight's
            rows; a weight of Megatron-FSDP.
    """
    ranks, rank = tp_group.size(), tp_group.rank()
    parts = ranks if sequence_parallel else 1
    rows = _Rows.of(hidden, labels, mask, temperature, sampling_mask, parts)
    picked = rows.picked(parts, max_rows)
    if picked is not None:
        here = picked.view(parts, -1)[rank] - rank * hidden.shape[:2].numel()
        hidden, rows = hidden.flatten(0, 1).index_select(0, here), rows.at(picked)
    if parts > 1:
        hidden = gathered(hidden, tp_group)
    options |= {"mask": rows.mask, "temperature": rows.temperature, "sampling_mask": rows.sampling_mask}
    start, end = _ids(len(weight), vocab_size, rank, ranks)
    weight, into = with_main_grad(weight)
    options |= {"bias": _cut(bias, end), "weight_grad_into": _cut(into, end), "max_rows": max_rows}
    if ranks == 1:
        results: tuple[Tensor, ...] = linear_logprob_entropy(hidden, _cut(weight, end), rows.labels, **options)
    else:
        results = vocab_parallel_linear_logprob_entropy(
            hidden, _cut(weight, end), rows.labels, start, tp_group, vocab_size=vocab_size or ranks * len(weight),
            sum_hidden_grad=parts == 1, **options,
        )  # fmt: skip
    if picked is not None:
        everywhere = labels.new_zeros(labels.numel(), dtype=torch.float32)
        if max_rows is not None and mask is not None:
            everywhere.masked_fill_((mask != 0).sum() > max_rows, torch.nan)
        results = tuple(everywhere.index_copy(0, picked, result) for result in results)
    logprob, entropy = (result.view(labels.shape[::-1]).t() for result in results)
    return logprob, entropy


class _Rows(NamedTuple):
    """What each row has, in Megatron's order ``[s, b]``, or for picked rows in one dimension."""

    labels: Tensor
    mask: Tensor | None
    temperature: float | Tensor
    sampling_mask: SamplingMask | None

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        temperature: float | Tensor,
        sampling_mask: SamplingMask | None,
        parts: int,
    ) -> _Rows:
        shape = labels.shape
        if hidden.dim() != 3 or shape != (hidden.shape[1], parts * hidden.shape[0]):
            part = f", the positions of one of {parts} sequence-parallel ranks" if parts > 1 else ""
            raise ValueError(
                f"labels: got shape {list(shape)} with hidden states of shape {list(hidden.shape)}; takes [b, s] with "
                f"hidden states of shape [s{' / ranks' if parts > 1 else ''}, b, H]{part}"
            )
        if mask is not None and mask.shape != shape:
            raise ValueError(f"mask: got shape {list(mask.shape)}; takes that of labels, {list(shape)}")
        if isinstance(temperature, Tensor) and temperature.dim():
            temperature = temperature.broadcast_to(shape).t()
        if sampling_mask is not None and shape[0] > 1:
            order = torch.arange(labels.numel(), device=labels.device).view(shape).t().flatten()
            sampling_mask = sampling_mask.index_select(order)
        return cls(labels.t(), None if mask is None else mask.t() != 0, temperature, sampling_mask)

    def picked(self, parts: int, max_rows: int | None) -> Tensor | None:
        """Returns the rows to gather from the ranks, the same number from each, in rank order: all rows that count,
        and others where a rank has fewer of them. Returns None if all rows are gathered.
        """
        if self.mask is None or parts == 1:
            return None
        counts = self.mask.flatten().view(parts, -1)
        # One row more than the bound, so that the op sees that the bound is exceeded.
        each = int(counts.sum(1).max()) if max_rows is None else max_rows + 1
        size = counts.shape[1]
        if each >= size:
            return None
        first = counts.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :each]
        return (first + size * torch.arange(parts, device=first.device).unsqueeze(1)).flatten()

    def at(self, picked: Tensor) -> _Rows:
        assert self.mask is not None
        temperature, sampling_mask = self.temperature, self.sampling_mask
        if isinstance(temperature, Tensor) and temperature.dim():
            temperature = temperature.flatten()[picked]
        if sampling_mask is not None:
            sampling_mask = sampling_mask.index_select(picked)
        return _Rows(self.labels.flatten()[picked], self.mask.flatten()[picked], temperature, sampling_mask)


def gathered(hidden: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Gathers the ranks' rows along the first dimension; the backward sums the ranks' gradients, and returns this
    rank's rows.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gathered: Tensor = gather_from_sequence_parallel_region(hidden, group=tp_group)
    return gathered


def _ids(rows: int, vocab_size: int | None, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the id of the first of a rank's ``rows``, and the number of its rows that are no padding."""
    if vocab_size is None:
        return rank * rows, rows
    if not 1 <= vocab_size <= ranks * rows:
        raise ValueError(f"vocab_size: got {vocab_size}; takes 1 to {ranks * rows}, the rows of all weights")
    return rank * rows, min(max(vocab_size - rank * rows, 0), rows)


def _cut(rows: Tensor | None, end: int) -> Any:
    return rows if rows is None or end == len(rows) else rows[:end]
