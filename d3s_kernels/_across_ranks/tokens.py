"""topk_mask and select_tokens across ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import checked_mask, require_readable
from .._dispatch import ops
from .._groups import Ranks, ranks_of
from .._segments.quota import Quota
from .._selection.tokens import Factors, Selection, TokenArguments, TopkArguments, checked_quota
from .agreement import agree
from .offsets import alike, is_whole, own_offsets, own_pieces, require_placement
from .topk_mask import select


def topk_mask(arguments: TopkArguments, process_group: ProcessGroup | DeviceMesh, placement: str) -> Tensor:
    ranks = ranks_of(process_group)
    scores, ratio, k, mask, offsets, max_segment, drop_zeros = arguments

    def check() -> tuple[Quota, Tensor | None]:
        require_readable(**arguments._asdict())
        quota = Quota(*checked_quota(scores, ratio, k, offsets, max_segment, drop_zeros))
        kept = checked_mask(mask, scores)
        require_placement(placement, scores, offsets, "scores")
        ops.check("topk_mask", scores, *quota, kept, own_offsets(placement, offsets), max_segment, False, drop_zeros)
        return quota, kept

    same = {"ratio": ratio, "k": k, "drop_zeros": drop_zeros}
    quota, mask = agree(ranks, "topk_mask", check, lambda _: same | alike(placement, scores, offsets))
    if ranks.size == 1 or is_whole(placement, scores, offsets):
        return ops.topk_mask(scores, *quota, mask, offsets, max_segment, False, drop_zeros)
    pieces = offsets
    if placement == "global":
        assert offsets is not None
        pieces = own_pieces(offsets, ranks.gather_number(scores.numel(), scores), ranks, "scores")
    return select(ops.topk_order_keys(scores, None, mask, None), pieces, quota, drop_zeros, ranks).mask


def select_tokens(
    arguments: TokenArguments, process_group: ProcessGroup | DeviceMesh, placement: str
) -> tuple[Tensor, Selection]:
    """Returns the value of each token (for logits, the entropy computed here), and mask, count and threshold."""
    ranks, offsets, pooled = ranks_of(process_group), arguments.offsets, arguments.scope == "batch"

    def check() -> Factors:
        require_readable(**arguments._asdict())
        if arguments.rule == "entropy_quantile":
            raise ValueError(f"process_group: got one with rule {arguments.rule!r}; takes None, as it is one process's")
        values, weights, ratio, mask = arguments.checked_factors(ranks.rank)
        require_placement(placement, values, offsets, "entropy")
        checked = weights
        if placement == "global":
            _require_one_for_each(weights, values, offsets)
            checked = weights.new_zeros(())
        own = arguments._replace(offsets=own_offsets(placement, offsets))
        ops.check("select_tokens", *own.of_op(values, checked, ratio, mask))
        return values, weights, ratio, mask

    given = {name: getattr(arguments, name) for name in ("ratio", "rule", "scope", "drop_zeros")}
    values, weights, ratio, mask = agree(
        ranks, "select_tokens", check, lambda checked: given | alike(placement, checked[0], offsets)
    )
    if ranks.size == 1 or (not pooled and is_whole(placement, values, offsets)):
        return values, ops.select_tokens(*arguments.of_op(values, weights, ratio, mask))
    pieces = offsets
    if offsets is not None and placement != "whole":
        pieces, weights = _pieces_and_weights(values, weights, offsets, placement, ranks)
    keys, quota = ops.topk_order_keys(values, weights, mask, pieces), Quota(*ratio)
    if pooled:
        kept = select(keys.view(-1), None, quota, arguments.drop_zeros, ranks)
        return values, (kept.mask.view(values.shape), kept.count.view(()), kept.threshold.view(()))
    kept = select(keys, pieces, quota, arguments.drop_zeros, ranks)
    shape = values.shape[:-1] if offsets is None else kept.count.shape
    return values, (kept.mask, kept.count.view(shape), kept.threshold.view(shape))


def _require_one_for_each(advantages: Tensor, entropy: Tensor, offsets: Tensor | None) -> None:
    assert offsets is not None
    takes = entropy.shape[0], offsets.shape[0] - 1
    if advantages.dim() > 1 or (advantages.dim() == 1 and advantages.shape[0] not in takes):
        raise ValueError(
            f"advantages: got shape {list(advantages.shape)}; takes one for each token, [{takes[0]}], one for each of "
            f"{takes[1]} sequences, or a 0-d tensor"
        )


def _pieces_and_weights(
    entropy: Tensor, advantages: Tensor, offsets: Tensor, placement: str, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """This rank's pieces of the sequences, and an advantage for each of its tokens. One round, of 24 bytes.

    A rank with as many tokens as there are sequences cannot tell which of the two its advantages are for. So every rank
    sends which of them fit its advantages. They are for sequences if that fits on all ranks, unless tokens fit on all
    ranks too.
    """
    tokens, sequences = entropy.shape[0], offsets.shape[0] - 1
    given = advantages.shape[0] if advantages.dim() else -1
    own = torch.empty(3, dtype=torch.int64, device=entropy.device)
    own[0], own[1], own[2] = tokens, given == tokens, given == sequences  # copying a list would wait for the device
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
