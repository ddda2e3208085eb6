"""topk_mask and select_tokens across ranks. Both ops keep exactly k values of each segment, even if a segment lies on
several ranks.

The k-th largest key over all ranks is found digit by digit. Each rank takes its keys that start with the digits found
so far, and counts them by their next digit. The counts are summed over the ranks. Keys that tie with the k-th largest
key are kept in rank order, so each rank must know how many ties the lower ranks have. Thus the ranks exchange only
counts, whose size does not depend on the number of tokens. With ``drop_zeros``, the ranks also exchange the lowest kept
key of each segment. If sequences are cut between ranks, the ranks also exchange the lengths of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._arguments.bundles import SegmentArguments
from .._arguments.checks import require_readable, require_scope
from .._collectives import Ranks, ranks_of
from .._dispatch import ops
from .._rules.arguments import select_tokens_arguments, topk_mask_arguments
from .._segments.quota import Quota
from .._segments.segments import order_key_value
from .agreement import Layout as Layout
from .agreement import agree

Top = tuple[Tensor, Tensor, Tensor]
_MOST = 2**31 - 1  # the largest int32

# (shift, bits) of each digit. Each digit takes one collective. With few segments, there are three digits, with 16, 16
# and 8 KB of counts for each segment. With many segments, bytes cost more than collectives, so there are four digits,
# with 2 KB of counts for each digit and segment.
FEW_SEGMENTS = 16
_LONG_DIGITS = (21, 11), (10, 11), (0, 10)
_SHORT_DIGITS = (24, 8), (16, 8), (8, 8), (0, 8)

# With few segments and up to this many ranks, counts are gathered instead of all-reduced. This takes no longer, and the
# gathered counts of the last digit show how many ties each rank has. After an all-reduce, the ranks need one more
# collective for this.
FEW_RANKS = 8


def topk_mask(
    scores: Tensor,
    ratio: float | Tensor | None,
    k: int | Tensor | None,
    mask: Tensor | None,
    drop_zeros: bool,
    layout: Layout,
) -> Tensor:
    ranks = ranks_of(layout.process_group)

    def check() -> tuple[Any, ...]:
        require_readable(scores=scores, ratio=ratio, k=k, mask=mask, offsets=layout.offsets)
        arguments = topk_mask_arguments(scores, ratio, k, mask, layout.local_segments(ranks), drop_zeros)
        layout.check("scores", scores, "whole", "global", "pieces")
        ops.check("topk_mask", *arguments)
        return arguments

    same = {"ratio": ratio, "k": k, "drop_zeros": drop_zeros}
    arguments = agree(ranks, "topk_mask", check, lambda _: same | _alike(layout, scores))
    if ranks.size == 1 or layout.is_whole(scores):
        return ops.topk_mask(*arguments)
    _, *quota, checked_mask = arguments[:6]
    pieces = layout.offsets
    if layout.placement == "global":
        pieces = pieces_of(layout, ranks.gather_number(scores.numel(), scores), ranks, "scores")
    keys = ops.topk_order_keys(scores, None, checked_mask, None)
    return keep_top(keys, pieces, Quota(*quota), drop_zeros, ranks)[0]


def select_tokens(
    entropy: Tensor | Callable[[], Tensor],
    advantages: Tensor | None,
    ratio: float | Tensor,
    rule: str,
    mask: Tensor | None,
    scope: str,
    drop_zeros: bool,
    generator: torch.Generator | None,
    layout: Layout,
) -> tuple[Tensor, Top]:
    """Returns the values of the tokens, and (mask, count, threshold). If ``entropy`` is a function, the values are the
    entropies that it returns.
    """
    ranks = ranks_of(layout.process_group)

    def check() -> tuple[Any, ...]:
        require_readable(entropy=entropy, advantages=advantages, ratio=ratio, mask=mask, offsets=layout.offsets)
        if rule == "entropy_quantile":
            raise ValueError(f"process_group: got one with rule {rule!r}; takes None, as it is one process's")
        segments = layout.local_segments(ranks, require_scope(scope, "sequence"))
        tokens = entropy() if callable(entropy) else entropy
        arguments = select_tokens_arguments(
            tokens, advantages, ratio, rule, mask, segments, drop_zeros, generator, ranks.rank
        )
        values, weights, *rest = arguments
        layout.check("entropy", values, "whole", "global", "pieces")
        if layout.placement == "global":  # the local op would refuse one advantage for each global sequence
            assert layout.offsets is not None
            takes = values.shape[0], layout.offsets.shape[0] - 1
            if weights.dim() > 1 or (weights.dim() == 1 and weights.shape[0] not in takes):
                raise ValueError(
                    f"advantages: got shape {list(weights.shape)}; takes one for each token, [{takes[0]}], one for "
                    f"each of {takes[1]} sequences, or a 0-d tensor"
                )
            weights = weights.new_zeros(())
        ops.check("select_tokens", values, weights, *rest)
        return arguments

    same = {"ratio": ratio, "rule": rule, "scope": scope, "drop_zeros": drop_zeros}
    arguments = agree(ranks, "select_tokens", check, lambda checked: same | _alike(layout, checked[0]))
    values, weights, *share, checked_mask = arguments[:5]
    pooled = scope == "batch"
    if ranks.size == 1 or (not pooled and layout.is_whole(values)):
        return values, ops.select_tokens(*arguments)
    pieces = layout.offsets
    if pieces is not None and layout.placement != "whole":
        pieces, weights = _pieces_and_weights(layout, pieces, values, weights, ranks)
    keys = ops.topk_order_keys(values, weights, checked_mask, pieces)
    if pooled:
        keys, pieces = keys.view(-1), None
    chosen, count, threshold = keep_top(keys, pieces, Quota(*share), drop_zeros, ranks)
    shape = SegmentArguments(layout.offsets, pooled=pooled).shape_in(values)
    return values, (chosen.view(values.shape), count.view(shape), threshold.view(shape))


def _alike(layout: Layout, values: Tensor) -> dict[str, object]:
    """Returns the arguments and properties that must be the same on all ranks. The segments must be the same, unless
    each segment is whole on one rank.
    """
    segments: object = layout.offsets
    if layout.placement != "global":
        segments = list(values.shape[:-1]) if layout.offsets is None else layout.offsets.shape[0] - 1
    return {"placement": layout.placement, "offsets": None if layout.is_whole(values) else segments}


# ---- the pieces of segments that a rank has --------------------------------------------------------------------------


def pieces_of(layout: Layout, lengths: Tensor, ranks: Ranks, name: str) -> Tensor:
    """Returns offsets that cut this rank's values into one piece for every global segment. A piece may be empty."""
    layout.check_end(name, lengths)
    assert layout.offsets is not None
    return (layout.offsets - lengths[: ranks.rank].sum()).clamp(min=0).minimum(lengths[ranks.rank])


def _pieces_and_weights(
    layout: Layout, offsets: Tensor, entropy: Tensor, advantages: Tensor, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Returns offsets that cut this rank's tokens into pieces of the sequences, and the advantages of these tokens (or
    one 0-d advantage for all tokens). This takes one collective, with 24 bytes from each rank.

    If a rank has as many tokens as there are sequences, the shape of its advantages does not show whether they are per
    token or per sequence. So every rank sends two flags: whether its advantages can be per token, and whether they can
    be per sequence. All ranks then take the advantages as per sequence if two conditions hold: on every rank they can
    be per sequence, and on at least one rank they cannot be per token.
    """
    tokens, sequences = entropy.shape[0], offsets.shape[0] - 1
    number = advantages.shape[0] if advantages.dim() else -1
    fits = torch.empty(3, dtype=torch.int64, device=entropy.device)
    fits[0], fits[1], fits[2] = tokens, number == tokens, number == sequences  # copying a list would cause a host sync
    lengths, for_tokens, for_sequences = ranks.gather(fits).unbind(1)
    pieces = pieces_of(layout, lengths, ranks, "entropy") if layout.placement == "global" else offsets
    if number != sequences or 0 in (tokens, sequences):
        return pieces, advantages
    place = torch.arange(tokens, device=entropy.device)
    sequence = torch.searchsorted(pieces[1:].contiguous(), place, right=True).clamp(max=sequences - 1)
    of_sequences = advantages[sequence]
    if number != tokens:
        return pieces, of_sequences
    return pieces, torch.where(for_sequences.bool().all() & ~for_tokens.bool().all(), of_sequences, advantages)


# ---- the search for the k-th largest key -----------------------------------------------------------------------------


def digits_for(segments: int) -> tuple[tuple[int, int], ...]:
    return _LONG_DIGITS if segments <= FEW_SEGMENTS else _SHORT_DIGITS


def gathers_counts(segments: int, ranks: int) -> bool:
    return ranks <= FEW_RANKS and segments <= FEW_SEGMENTS


def keep_top(keys: Tensor, offsets: Tensor | None, quota: Quota, drop_zeros: bool, ranks: Ranks) -> Top:
    """Selects the highest keys of segments that are spread over all ranks. This rank's pieces of the segments are the
    rows of ``keys``. With ``offsets``, they are the parts into which the offsets cut ``keys``.

    Returns the mask of this rank's keys, and two results for each segment over all ranks: how many keys are kept
    (int32, clamped to the largest int32), and the lowest kept score (float32, infinite if no key is kept).
    """
    segments = keys.shape[:-1].numel() if offsets is None else offsets.shape[0] - 1
    gathers = gathers_counts(segments, ranks.size)
    search = torch.zeros(segments, 3, dtype=torch.int64, device=keys.device)
    for shift, bits in digits_for(segments):
        counts = ops.topk_count_digit(keys, search, shift, bits, offsets)
        everyones = ranks.gather(counts) if gathers else None
        total = ranks.add_(counts.clone()) if everyones is None else everyones.sum(0)
        ops.topk_choose_digit_(search, total, shift, *quota)
    last_digit = search[:, :1] & (counts.shape[1] - 1)
    if everyones is None:
        everyones = ranks.gather(counts.gather(1, last_digit))
        last_digit = torch.zeros_like(last_digit)
    before = everyones[: ranks.rank].sum(0).gather(1, last_digit).squeeze(1)
    lowest_key, left, count = search.unbind(1)
    mask, zeros, lowest = ops.topk_mask_from_key(keys, search, (left - before).clamp(min=0), offsets, drop_zeros)
    if drop_zeros:
        everyones = ranks.gather(torch.stack([zeros, lowest]))
        count = count - everyones[:, 0].sum(0)
        lowest_key = everyones[:, 1].amin(0)
    return mask, count.clamp(max=_MOST).int(), torch.where(count > 0, order_key_value(lowest_key), torch.inf)
