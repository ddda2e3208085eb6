"""topk_mask and select_tokens across ranks: exactly k of each segment, for segments that lie on several ranks.

The k-th largest key of all ranks is found digit by digit: each rank counts its keys by their next digit, among those
that have the digits found so far, and the counts are summed over the ranks. That decides which keys are kept, except
for ties, which go to the lower rank: each rank has to know how many ties the ranks before it have. So the ranks
exchange counts, whose size does not depend on the number of tokens; with ``drop_zeros`` also the lowest kept key of
each segment, and for cut sequences the lengths of their pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import is_known, require_readable
from .._dispatch import ops
from .._groups import Ranks, ranks_of
from .._segments.quota import Quota, QuotaOfOp
from .._segments.segments import order_key_value
from .._selection.arguments import Logits, Tokens, checked_scores, checked_tokens
from .agreement import Layout as Layout
from .agreement import agree, require_offsets

Top = tuple[Tensor, Tensor, Tensor]
_MOST = 2**31 - 1  # the largest int32

# (shift, bits) of each digit. Few segments take three rounds, of 16, 16 and 8 KB for each segment. Many segments take
# four rounds of 2 KB for each segment, since then bytes cost more than rounds.
FEW_SEGMENTS = 16
_LONG_DIGITS = (21, 11), (10, 11), (0, 10)
_SHORT_DIGITS = (24, 8), (16, 8), (8, 8), (0, 8)

# With few segments and up to this many ranks, counts are gathered instead of all-reduced. This takes no longer, and the
# gathered counts of the last digit include all ranks' ties. With more ranks, the ties take one more round.
FEW_RANKS = 8


def topk_mask(
    scores: Tensor,
    ratio: float | Tensor | None,
    k: int | Tensor | None,
    mask: Tensor | None,
    drop_zeros: bool,
    layout: Layout,
) -> Tensor:
    ranks, offsets, max_segment = ranks_of(layout.process_group), layout.offsets, layout.max_segment

    def check() -> tuple[QuotaOfOp, Tensor | None]:
        require_readable(scores=scores, ratio=ratio, k=k, mask=mask, offsets=offsets)
        quota, checked = checked_scores(scores, ratio, k, mask, offsets, max_segment, drop_zeros)
        layout.check("scores", scores, "whole", "global", "pieces")
        ops.check("topk_mask", scores, *quota, checked, layout.local_offsets, max_segment, False, drop_zeros)
        return quota, checked

    same = {"ratio": ratio, "k": k, "drop_zeros": drop_zeros}
    quota, checked = agree(ranks, "topk_mask", check, lambda _: same | _alike(layout, scores))
    if ranks.size == 1 or layout.is_whole(scores):
        return ops.topk_mask(scores, *quota, checked, offsets, max_segment, False, drop_zeros)
    pieces = offsets
    if layout.placement == "global":
        assert offsets is not None
        pieces = _pieces(offsets, ranks.gather_number(scores.numel(), scores), ranks, "scores")
    return keep_top(ops.topk_order_keys(scores, None, checked, None), pieces, Quota(*quota), drop_zeros, ranks)[0]


def select_tokens(
    entropy: Tensor | Logits | None,
    advantages: Tensor | None,
    ratio: float | Tensor,
    rule: str,
    mask: Tensor | None,
    scope: str,
    drop_zeros: bool,
    generator: torch.Generator | None,
    layout: Layout,
) -> tuple[Tensor, Top]:
    """Returns the value of each token (for logits, the entropy computed here), and mask, count and threshold."""
    ranks, offsets, max_segment = ranks_of(layout.process_group), layout.offsets, layout.max_segment
    pooled = scope == "batch"

    def check() -> Tokens:
        named = entropy._asdict() if isinstance(entropy, Logits) else {"entropy": entropy}
        require_readable(**named, advantages=advantages, ratio=ratio, mask=mask, offsets=offsets)
        if rule == "entropy_quantile":
            raise ValueError(f"process_group: got one with rule {rule!r}; takes None, as it is one process's")
        tokens = checked_tokens(
            entropy, advantages, ratio, rule, mask, offsets, max_segment, scope, drop_zeros, generator, ranks.rank
        )
        values, weights, quota, checked = tokens
        layout.check("entropy", values, "whole", "global", "pieces")
        if layout.placement == "global":  # the op would refuse advantages that are for sequences of all ranks
            assert offsets is not None
            takes = values.shape[0], offsets.shape[0] - 1
            if weights.dim() > 1 or (weights.dim() == 1 and weights.shape[0] not in takes):
                raise ValueError(
                    f"advantages: got shape {list(weights.shape)}; takes one for each token, [{takes[0]}], one for "
                    f"each of {takes[1]} sequences, or a 0-d tensor"
                )
            weights = weights.new_zeros(())
        ops.check(
            "select_tokens", values, weights, *quota[:2], checked, layout.local_offsets, max_segment, pooled, drop_zeros
        )
        return tokens

    same = {"ratio": ratio, "rule": rule, "scope": scope, "drop_zeros": drop_zeros}
    values, weights, quota, checked = agree(
        ranks, "select_tokens", check, lambda tokens: same | _alike(layout, tokens[0])
    )
    if ranks.size == 1 or (not pooled and layout.is_whole(values)):
        return values, ops.select_tokens(values, weights, *quota[:2], checked, offsets, max_segment, pooled, drop_zeros)
    pieces = offsets
    if offsets is not None and layout.placement != "whole":
        pieces, weights = _pieces_and_weights(values, weights, offsets, layout.placement, ranks)
    keys = ops.topk_order_keys(values, weights, checked, pieces)
    if pooled:
        keys, pieces = keys.view(-1), None
    chosen, count, threshold = keep_top(keys, pieces, Quota(*quota), drop_zeros, ranks)
    shape = () if pooled else values.shape[:-1] if offsets is None else count.shape
    return values, (chosen.view(values.shape), count.view(shape), threshold.view(shape))


def _alike(layout: Layout, values: Tensor) -> dict[str, object]:
    """The values that must be the same on all ranks: the segments, unless each segment is whole on one rank."""
    offsets = layout.offsets
    segments: Tensor | list[int] | int | None = None
    if layout.placement == "global":
        segments = offsets
    elif not layout.is_whole(values):
        segments = list(values.shape[:-1]) if offsets is None else offsets.shape[0] - 1
    return {"placement": layout.placement, "offsets": segments}


# ---- the pieces of segments that a rank has --------------------------------------------------------------------------


def _pieces(offsets: Tensor, lengths: Tensor, ranks: Ranks, name: str) -> Tensor:
    """Offsets of this rank's piece, maybe empty, of every global segment.

    Raises:
        ValueError: on all ranks alike, if the host may read the offsets.
    """
    if is_known(offsets):
        require_offsets(offsets, int(lengths.sum()), name)
    return (offsets - lengths[: ranks.rank].sum()).clamp(min=0).minimum(lengths[ranks.rank])


def _pieces_and_weights(
    entropy: Tensor, advantages: Tensor, offsets: Tensor, placement: str, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """This rank's pieces of the sequences, and an advantage for each of its tokens. One round, of 24 bytes.

    On a rank with as many tokens as there are sequences, advantages may be for tokens or for sequences. So every rank
    sends which of the two fit. Advantages are for sequences if that fits on all ranks and tokens do not.
    """
    tokens, sequences = entropy.shape[0], offsets.shape[0] - 1
    number = advantages.shape[0] if advantages.dim() else -1
    fits = torch.empty(3, dtype=torch.int64, device=entropy.device)
    fits[0], fits[1], fits[2] = tokens, number == tokens, number == sequences  # a list would wait for the device
    lengths, for_tokens, for_sequences = ranks.gather(fits).unbind(1)
    pieces = _pieces(offsets, lengths, ranks, "entropy") if placement == "global" else offsets
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
    """Selects from segments that lie on all ranks. A rank's pieces of the segments are its rows, or are cut by its
    offsets.

    Returns the mask, which has the shape of the keys. For each segment also returns, over all ranks, how many keys are
    kept (int32, clamped to its largest value) and the lowest kept score (float32, infinite if none is kept).
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
