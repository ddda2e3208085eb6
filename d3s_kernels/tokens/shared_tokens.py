"""The tokens that wrong responses share with right responses of their group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from .._arguments.checks import checked_mask, require_optional_tensors, require_readable, require_tensors
from .._rules.groups import in_groups
from .._rules.rules import usable
from .._segments.segments import segments_of


@torch.no_grad()
def shared_tokens(
    token_ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    groups: Iterable[Hashable] | Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Marks the tokens that a response with a negative advantage shares with a right response of its group (GTPO, in
    TRL's issue 5226). Leave these tokens out of the loss, so that the loss does not make tokens of right responses less
    likely.

    A response is right if its advantage is above 0. Two responses share the longest sequence of tokens with which both
    begin. They also share the longest sequence with which both end, but no token of the shorter response is counted
    twice. In a response with a negative advantage, the longest beginning and the longest end that it shares with any
    right response of its group are marked. A response that equals a right one is marked as a whole; other responses
    have no marked tokens. Only the tokens of ``mask`` count: all other tokens are skipped. So the tokens of a tool
    neither end a common sequence nor are marked.

    Compute it from whole groups, before rollouts are dropped, and pass ``mask & ~shared`` to a choice of tokens. All
    responses are compared with one response of their group at a time, so this takes a few times the memory of the
    padded ``token_ids``.

    Args:
        token_ids: integers ``[B, T]``, each row is a response; or ``[N]`` with ``offsets``.
        advantages: float ``[groups, n]``, where the responses are in the order of the flat tensor; or ``[B]`` with
            ``groups``. NaN is neither right nor negative.
        mask: bool, or integer (0 means False), the shape of ``token_ids``. Padding may be on either side.
        groups: a label for each of the B responses, or an integer tensor ``[B]``. Responses with equal labels form a
            group. They may be in any order, and groups may have any size.

    Ragged batches:
        offsets: int32 or int64 ``[B + 1]``, from 0 to N. The host then reads the largest number of tokens of a
            response: a host sync on a GPU.

    Returns:
        bool, the shape of ``token_ids``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype, device or offsets.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> ids = torch.tensor([[5, 6, 7, 1], [5, 8, 9, 1]])
        >>> d3s.shared_tokens(ids, torch.tensor([[1.0, -1.0]]))
        tensor([[False, False, False, False],
                [ True, False, False,  True]])
    """
    require_tensors(token_ids=token_ids, advantages=advantages)
    require_optional_tensors(token_ids, offsets=offsets)
    require_readable(token_ids=token_ids, advantages=advantages, offsets=offsets)
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype is torch.bool:
        raise ValueError(f"token_ids: got dtype {token_ids.dtype}; takes integers")
    if offsets is None and token_ids.dim() != 2:
        raise ValueError(f"token_ids: got shape {list(token_ids.shape)}; takes [B, T], or [N] with offsets")
    # usable() also checks mask and offsets.
    present = usable(torch.zeros_like(token_ids, dtype=torch.float32), checked_mask(mask, token_ids), offsets).flatten()
    sequences = segments_of(token_ids, offsets)
    mates = _mates(advantages, groups, sequences.number)

    place = sequences.count_before(present)  # a present token's index in its sequence
    lengths = sequences.total(present)
    most = int(lengths.max()) if offsets is not None and len(lengths) else token_ids.shape[-1]
    if most == 0 or mates.shape[1] == 0:
        return torch.zeros_like(token_ids, dtype=torch.bool)

    def aligned(places: Tensor) -> Tensor:
        """Returns ``[B, most]``: each response's present tokens at these places."""
        rows = token_ids.new_zeros(len(lengths), most + 1)  # the last column takes the tokens that are not present
        columns = torch.where(present, places, most)
        rows.view(-1).scatter_(0, sequences.segment_ids * (most + 1) + columns, token_ids.flatten())
        return sequences.without_ends(rows)[:, :most]

    from_start, from_end = aligned(place), aligned(lengths[sequences.segment_ids] - 1 - place)
    lengths, advantages = sequences.without_ends(lengths), advantages.flatten()
    columns = torch.arange(most, dtype=torch.int32, device=token_ids.device)

    def alike(rows: Tensor, others: Tensor) -> Tensor:
        """Returns ``[B]``: the number of columns before the first one in which two rows differ."""
        return torch.where(rows != rows[others], columns, most).amin(dim=1)

    beginning = end = torch.zeros_like(lengths)
    for mate in mates.unbind(dim=1):  # one response of each group
        other = mate.clamp(min=0)
        shorter = torch.minimum(lengths, lengths[other])
        first = torch.minimum(alike(from_start, other), shorter)
        last = torch.minimum(alike(from_end, other), shorter - first)
        counts = (advantages < 0) & (mate >= 0) & (advantages[other] > 0)
        beginning = torch.where(counts, torch.maximum(beginning, first), beginning)
        end = torch.where(counts, torch.maximum(end, last), end)
    marked = (place < sequences.spread(beginning)) | (place >= sequences.spread(lengths - end))
    return (marked & present & ~sequences.left_out()).view(token_ids.shape)


def _mates(advantages: Tensor, groups: Iterable[Hashable] | Tensor | None, number: int) -> Tensor:
    """Returns int64 ``[number, largest group]``: the indices of the responses in each response's group, then -1."""
    if groups is None:
        if advantages.dim() != 2 or advantages.numel() != number:
            shape = list(advantages.shape)
            raise ValueError(
                f"advantages: got shape {shape}; takes [groups, n] for {number} responses, or [{number}] with groups"
            )
        indices = torch.arange(number, device=advantages.device).view(advantages.shape)
        return indices.repeat_interleave(advantages.shape[1], 0)
    if advantages.shape != (number,):
        raise ValueError(f"advantages: got shape {list(advantages.shape)} with groups; takes [{number}]")
    table, places = in_groups(torch.arange(number, dtype=torch.float64, device=advantages.device), groups)
    members = table.nan_to_num(-1).long()
    return members if number == 0 else members[places // members.shape[1]]
