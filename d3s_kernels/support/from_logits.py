"""Makes sampling masks from logits by top-k, top-p and min-p, for loops that sample without an inference engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._arguments.checks import require_number, require_readable, require_temperature, require_tensors, require_whole
from .._dispatch import ops
from .sampling_mask import SamplingMask, known, offsets_of

_ORDERS = {"transformers": ("top_k", "top_p", "min_p"), "vllm": ("min_p", "top_k", "top_p")}
_LOGITS_AT_ONCE = 1 << 25  # limits memory: the rules take about 40 bytes for each logit
_UNIT = 2.0**40  # probabilities are summed as integer multiples of 1 / _UNIT, so sums do not depend on the order


def sampling_mask_from_logits(
    logits: Tensor,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    temperature: float = 1.0,
    order: str = "transformers",
    max_kept: int = 4096,
) -> SamplingMask:
    """Returns the sampling mask of the ids that top-k, top-p and min-p keep.

    Pass only the logits that are sampled from. Logits that a trainer recomputes differ from these logits, and give
    other supports.

    Top-k also keeps ids whose logits tie with the k-th logit. Top-p keeps the most likely ids until at most
    ``1 - top_p`` of the probability is left. It keeps at least one id; of equally likely ids, the lower ids come first.
    Min-p keeps ids whose probability is at least ``min_p`` times the largest probability. Each rule is applied to the
    ids that the previous rules have kept. The result is the same in every run. Half-precision logits often tie, and
    transformers' warpers break ties differently. So sample only from the ids of this mask.

    Args:
        logits: ``[..., V]``, a float dtype; the leading dimensions, flattened, are the rows.
        top_k: at least 1; None keeps all.
        top_p: in (0, 1]; None keeps all.
        min_p: in [0, 1]; None keeps all.
        temperature: in [1e-15, 1e15]; the logits are divided by it first.
        order: the order of the rules. "transformers" is top-k, top-p, min-p; "vllm" is min-p, top-k, top-p.
        max_kept: the maximum number of ids that a row may keep. On a CPU, a row that keeps more is an error. On a GPU
            there is no host sync: memory is allocated for ``max_kept`` ids of each row, and a row that keeps more has
            NaN results.

    Raises:
        ValueError, TypeError: an argument out of its range; a row that keeps more than ``max_kept`` ids; a row with NaN
            or ``+inf``, or without a finite logit. On a GPU, such a row raises no error, but its results are NaN.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]])
        >>> d3s.sampling_mask_from_logits(logits, top_k=3, top_p=0.9).to_lists()
        [[1, 2]]
    """
    require_tensors(logits=logits)
    require_readable(logits=logits)
    if logits.dim() == 0 or not logits.is_floating_point() or logits.shape[-1] == 0:
        raise ValueError(f"logits: got shape {list(logits.shape)} of {logits.dtype}; takes floats [..., V]")
    _require_options(top_k, top_p, min_p, temperature, order, max_kept)
    rows = logits.detach().reshape(-1, logits.shape[-1])
    bounds = {"top_k": top_k, "top_p": None if top_p == 1 else top_p, "min_p": min_p}
    rules = [(_RULES[name], bounds[name]) for name in _ORDERS[order] if bounds[name] is not None]
    kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    bad = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    step = max(1, _LOGITS_AT_ONCE // rows.shape[1])
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        scores = rows[part].float() / temperature
        bad[part] = ~scores.amax(1).isfinite()  # NaN, +inf, or only -inf
        for rule, bound in rules:
            scores = scores.masked_fill(~rule(scores, bound), -torch.inf)
        kept[part] = scores > -torch.inf
    return _from_kept(kept, bad, max_kept)


def _require_options(
    top_k: int | None, top_p: float | None, min_p: float | None, temperature: float, order: str, max_kept: int
) -> None:
    require_whole(top_k=top_k, max_kept=max_kept)
    require_temperature(temperature)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if share is not None:
            require_number(**{name: share})
    for name, whole in (("top_k", top_k), ("max_kept", max_kept)):
        if whole is not None and whole < 1:
            raise ValueError(f"{name}: got {whole}; takes at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p: got {top_p}; takes a number in (0, 1]")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p: got {min_p}; takes a number in [0, 1]")
    if order not in _ORDERS:
        raise ValueError(f"order: got {order!r}; takes one of {', '.join(map(repr, _ORDERS))}")


def _top_k(scores: Tensor, top_k: int) -> Tensor:
    return scores >= scores.topk(min(top_k, scores.shape[1]), dim=1).values[:, -1:]


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    down = scores.sort(dim=1, descending=True, stable=True)
    # `left`: for each id in this order, the probability of the id and all ids after it.
    shares = (down.values.double().softmax(1) * _UNIT).round().long()
    left = shares.flip(1).cumsum(1).flip(1)
    kept = left.float() > left[:, :1].float() * (1 - top_p)
    kept[:, 0] = True
    return torch.empty_like(kept).scatter_(1, down.indices, kept)


def _min_p(scores: Tensor, min_p: float) -> Tensor:
    probability = scores.double().softmax(1)
    return probability >= min_p * probability.amax(1, keepdim=True)


_RULES: dict[str, Callable[[Tensor, Any], Tensor]] = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p}


def _from_kept(kept: Tensor, bad: Tensor, max_kept: int) -> SamplingMask:
    """Converts bools ``[rows, V]`` to a sampling mask. Refuses bad rows and rows that keep more than ``max_kept``. If a
    refusal would cause a host sync, such a row has the single id -1 instead, for which the ops return NaN.
    """
    lengths = kept.sum(1)
    many = lengths > max_kept
    if known(bad) and bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"logits: got NaN, infinity or no finite number in row {row}; takes some that can be sampled from"
        )
    if known(many) and bool(many.any()):
        row = int(many.nonzero()[0])
        raise ValueError(f"max_kept: got {max_kept}; takes at least what row {row} keeps, {int(lengths[row])}")
    bad = bad | many
    # A bad row keeps one id, which becomes -1 below.
    kept = torch.where(bad.unsqueeze(1), torch.arange(kept.shape[1], device=kept.device) == 0, kept)
    room = int(lengths.sum()) if kept.is_cpu else len(kept) * min(max_kept, kept.shape[1])
    places, _ = ops.compact(kept, room)
    places = places.clamp(min=0)
    ids = torch.where(bad.index_select(0, places // kept.shape[1]), -1, places % kept.shape[1]).int()
    return SamplingMask(ids, offsets_of(kept.sum(1)))
