"""topk_mask and select_tokens across ranks, from their public arguments on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import _ops
from .agreement import agree
from .group import Ranks, ranks_of
from .offsets import alike, is_whole, own_offsets, own_pieces, require_placement
from .top import Quota, select

_Selection = tuple[Tensor, Tensor, Tensor]


def topk_mask(
    scores: Tensor,
    quota_of: Callable[[], tuple[float | None, Tensor | None, int | None, Tensor | None]],
    mask: Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
    drop_zeros: bool,
    placement: str,
    process_group: ProcessGroup | DeviceMesh,
    **same: Any,
) -> Tensor:
    """``quota_of`` refuses what is wrong by itself; ``same`` is what else the ranks have to agree on."""
    ranks = ranks_of(process_group)

    def check() -> Quota:
        quota = Quota(*quota_of())
        require_placement(placement, scores, offsets, "scores")
        _ops.refuse("topk_mask", scores, *quota, mask, own_offsets(placement, offsets), max_segment, drop_zeros)
        return quota

    same |= {"drop_zeros": drop_zeros}
    quota = agree(ranks, "topk_mask", check, lambda _: same | alike(placement, scores, offsets))
    if ranks.size == 1 or is_whole(placement, scores, offsets):
        whole: Tensor = _ops.topk_mask(scores, *quota, mask, offsets, max_segment, drop_zeros)
        return whole
    pieces = offsets
    if placement == "global":
        assert offsets is not None
        pieces = own_pieces(offsets, ranks.gather_number(scores.numel(), scores), ranks, "scores")
    return select(_ops.topk_order_keys(scores, None, mask, None), pieces, quota, drop_zeros, ranks).mask


def select_tokens(
    factors_of: Callable[[int], tuple[Tensor, Tensor, float | None, Tensor | None]],
    mask: Tensor | None,
    offsets: Tensor | None,
    max_segment: int | None,
    scope: str,
    drop_zeros: bool,
    placement: str,
    process_group: ProcessGroup | DeviceMesh,
    **same: Any,
) -> tuple[Tensor, _Selection]:
    """What stands for the entropy, and the selection. ``factors_of(rank)`` gives that, what else |A| * H is made of and
    the ratio, and refuses what is wrong by itself.
    """
    ranks, pooled = ranks_of(process_group), scope == "batch"

    def check() -> tuple[Tensor, Tensor, Quota]:
        entropy, each, ratio, ratio_tensor = factors_of(ranks.rank)
        require_placement(placement, entropy, offsets, "entropy")
        checked = each
        if placement == "global":
            _require_one_for_each(each, entropy, offsets)
            checked = each.new_zeros(())
        own = own_offsets(placement, offsets)
        _ops.refuse("select_tokens", entropy, checked, ratio, ratio_tensor, mask, own, max_segment, pooled, drop_zeros)
        return entropy, each, Quota(ratio, ratio_tensor)

    same |= {"scope": scope, "drop_zeros": drop_zeros}
    entropy, each, quota = agree(
        ranks, "select_tokens", check, lambda checked: same | alike(placement, checked[0], offsets)
    )
    if ranks.size == 1 or (not pooled and is_whole(placement, entropy, offsets)):
        return entropy, _ops.select_tokens(entropy, each, *quota[:2], mask, offsets, max_segment, pooled, drop_zeros)
    pieces = offsets
    if offsets is not None and placement != "whole":
        pieces, each = _pieces_and_factors(entropy, each, offsets, placement, ranks)
    keys = _ops.topk_order_keys(entropy, each, mask, pieces)
    if pooled:
        kept = select(keys.view(-1), None, quota, drop_zeros, ranks)
        return entropy, (kept.mask.view(entropy.shape), kept.count.view(()), kept.threshold.view(()))
    kept = select(keys, pieces, quota, drop_zeros, ranks)
    shape = entropy.shape[:-1] if offsets is None else kept.count.shape
    return entropy, (kept.mask, kept.count.view(shape), kept.threshold.view(shape))


def _require_one_for_each(advantages: Tensor, entropy: Tensor, offsets: Tensor | None) -> None:
    assert offsets is not None
    takes = entropy.shape[0], offsets.shape[0] - 1
    if advantages.dim() > 1 or (advantages.dim() == 1 and advantages.shape[0] not in takes):
        raise ValueError(
            f"advantages: got shape {list(advantages.shape)}; takes one for each token, [{takes[0]}], one for each of "
            f"{takes[1]} sequences, or a 0-d tensor"
        )


def _pieces_and_factors(
    entropy: Tensor, advantages: Tensor, offsets: Tensor, placement: str, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """This rank's pieces of the sequences, and an advantage for each of its tokens. One round, of 24 bytes.

    A rank that has as many tokens as there are sequences cannot tell what its advantages are for. So all say what
    theirs may be for: sequences, if that fits everywhere, unless everywhere they may be for tokens too.
    """
    tokens, sequences = entropy.shape[0], offsets.shape[0] - 1
    given = advantages.shape[0] if advantages.dim() else -1
    own = torch.empty(3, dtype=torch.int64, device=entropy.device)
    own[0], own[1], own[2] = tokens, given == tokens, given == sequences  # a copy of a list would wait for the device
    everyones = ranks.gather(own)
    lengths, for_tokens, for_sequences = everyones.unbind(1)
    pieces = own_pieces(offsets, lengths, ranks, "entropy") if placement == "global" else offsets
    if given != sequences or 0 in (tokens, sequences):
        return pieces, advantages
    place = torch.arange(tokens, device=entropy.device)
    sequence = torch.searchsorted(pieces[1:].contiguous(), place, right=True).clamp(max=sequences - 1)
    spread = advantages[sequence]
    if given != tokens:
        return pieces, spread
    return pieces, torch.where(for_sequences.bool().all() & ~for_tokens.bool().all(), spread, advantages)
