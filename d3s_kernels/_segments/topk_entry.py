"""Entries: int64 numbers that each stand for a logit and its id. In descending order, the larger logit comes first, and
of equal logits the lower id (csrc/core/topk_entry.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segments import ZERO_KEY, order_key

NO_ENTRY = torch.iinfo(torch.int64).min
_IDS = 2**32 - 1


def entries_of(logits: Tensor, first_id: int) -> Tensor:
    """Returns the int64 entry of each logit ``[rows, n]``, as in csrc/core/topk_entry.h; NO_ENTRY for NaN."""
    ids = torch.arange(first_id, first_id + logits.shape[-1], device=logits.device)
    entries = ((order_key(logits) - ZERO_KEY) << 32) + (_IDS - ids)
    return entries.where(logits == logits, NO_ENTRY)


def logits_of(entries: Tensor) -> Tensor:
    """Returns the float32 logit of each entry; -inf for NO_ENTRY."""
    keys = (entries >> 32).int()
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32).masked_fill(entries == NO_ENTRY, -torch.inf)


def ids_of(entries: Tensor) -> Tensor:
    """Returns the int32 id of each entry; -1 for NO_ENTRY."""
    return (_IDS - (entries & _IDS)).int().masked_fill(entries == NO_ENTRY, -1)
