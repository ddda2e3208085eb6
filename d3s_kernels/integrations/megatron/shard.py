"""The LM head of a tensor-parallel rank: its part of the weight, and the hidden states that Megatron's output layer
gets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..._arguments.checks import require_whole, temperature_argument
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
    products add to it, and its hooks run. Otherwise autograd gets the gradient.

    Args:
        hidden: ``[s, b, H]``, or ``[s / ranks, b, H]`` with sequence parallelism.
        weight, bias: this rank's rows, ``[V / ranks, H]`` and ``[V / ranks]``.
        labels: int64 or int32 ``[b, s]``, the token that follows each position, or -100 for none; the same on all
            tensor-parallel ranks.
        tp_group, sequence_parallel: as Megatron's output layer has them.
        vocab_size: the number of ids of the vocabulary. Rows of the weight from this id on are padding, and count
            nothing. None counts all rows, as Megatron's own loss does.
        mask: bool ``[b, s]``, the rows that count, the same on all tensor-parallel ranks; all others cost nothing and
            get 0.
        temperature: a number above 0, or a float tensor that broadcasts to ``[b, s]``.
        max_rows: the caller's bound on the number of rows in ``mask``; if it is exceeded, all results are NaN.
        sampling_mask: the sampler's supports of the rows ``[b, s]``, row after row.
        options: ``logit_softcap``, ``max_grad_rows``, ``logits_dtype``, ``workspace_bytes``, ``keep_logits_bytes``,
            ``label_outside`` and ``max_dense_rows`` of
            :func:`d3s_kernels.distributed.vocab_parallel_linear_logprob_entropy`.

    Returns:
        ``(logprob, entropy)``, float32 ``[b, s]``, in nats; the same on all tensor-parallel ranks.

    Raises:
        ValueError, TypeError: in the cases of the op; a wrong shape; a ``vocab_size`` that is not within the weight's
            rows; a weight of Megatron-FSDP.
    """
    ranks, rank = tp_group.size(), tp_group.rank()
    parts, shape = ranks if sequence_parallel else 1, labels.shape
    if hidden.dim() != 3 or shape != (hidden.shape[1], parts * hidden.shape[0]):
        raise ValueError(
            f"labels: got shape {list(shape)} with hidden states of shape {list(hidden.shape)}; takes [b, s] with "
            f"[s{' / ranks' if sequence_parallel else ''}, b, H]"
        )
    if mask is not None and mask.shape != shape:
        raise ValueError(f"mask: got shape {list(mask.shape)}; takes that of labels, {list(shape)}")
    for name, tensor in (("labels", labels), ("mask", mask)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: is on {tensor.device}; takes the device of the hidden states, {hidden.device}")
    require_whole(vocab_size=vocab_size, max_rows=max_rows)
    if vocab_size is not None and not 1 <= vocab_size <= ranks * len(weight):
        raise ValueError(f"vocab_size: got {vocab_size}; takes 1 to {ranks * len(weight)}, the rows of all weights")
    if sampling_mask is not None and sampling_mask.rows != labels.numel():
        raise ValueError(f"sampling_mask: got {sampling_mask.rows} rows; takes one for each label, {labels.numel()}")
    mask = None if mask is None else mask != 0

    # For each hidden state of each rank, its place in the flattened [b, s].
    places = torch.arange(labels.numel(), device=hidden.device).view(shape).t().reshape(parts, -1)
    hidden, is_whole = hidden.flatten(0, 1), True
    if parts > 1:
        picked = None if mask is None else _picked(mask.flatten()[places], max_rows)
        if picked is not None:
            hidden, places, is_whole = hidden.index_select(0, picked[rank]), places.gather(1, picked), False
        hidden = gathered(hidden, tp_group)
    place = places.flatten()
    if isinstance(temperature, Tensor) and temperature.dim():
        _, of_rows = temperature_argument(temperature, labels.unsqueeze(-1))
        assert of_rows is not None
        temperature = of_rows.flatten()[place]
    if sampling_mask is not None and not (is_whole and shape[0] == 1):
        sampling_mask = sampling_mask.index_select(place)

    size = vocab_size or ranks * len(weight)
    start, (weight, into) = rank * len(weight), with_main_grad(weight)
    if (end := max(size - start, 0)) < len(weight):  # the other rows are padding
        weight, bias, into = weight[:end], None if bias is None else bias[:end], None if into is None else into[:end]
    op: Callable[..., tuple[Tensor, Tensor]] = linear_logprob_entropy
    if ranks > 1:
        op = partial(
            vocab_parallel_linear_logprob_entropy, vocab_start=start, process_group=tp_group, vocab_size=size,
            sum_hidden_grad=parts == 1,
        )  # fmt: skip
    results = op(
        hidden, weight, labels.flatten()[place], bias=bias, mask=None if mask is None else mask.flatten()[place],
        temperature=temperature, max_rows=max_rows, sampling_mask=sampling_mask, weight_grad_into=into, **options,
    )  # fmt: skip
    everywhere = labels.new_zeros(labels.numel(), dtype=torch.float32)
    if not (is_whole or max_rows is None or mask is None):
        everywhere.masked_fill_(mask.sum() > max_rows, torch.nan)
    logprob, entropy = (everywhere.index_copy(0, place, result).view(shape) for result in results)
    return logprob, entropy


def _picked(mask: Tensor, max_rows: int | None) -> Tensor | None:
    """Returns which hidden states to gather, ``[ranks, n]``: all in the mask ``[ranks, positions]``, and others where a
    rank has fewer of them. Returns None if all hidden states are gathered.
    """
    # One row more than the bound, so that the op sees that the bound is exceeded.
    each = int(mask.sum(1).max()) if max_rows is None else max_rows + 1
    if each >= mask.shape[1]:
        return None
    return mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :each]


def gathered(hidden: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Gathers the ranks' rows. The backward sums the ranks' gradients, and returns this rank's rows."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    rows: Tensor = gather_from_sequence_parallel_region(hidden, group=tp_group)
    return rows
