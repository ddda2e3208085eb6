"""Keys: whole numbers that have the order of the floats, as in ``csrc/core/order_key.h``."""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT = 0  # the key of a value that is masked or NaN
ZERO_KEY = 2**31  # the key of 0; those of positive numbers are larger
NO_KEY = 2**32 - 1  # above the key of any float


def order_key(values: Tensor) -> Tensor:
    """The int64 key of each float32, in [1, 2^32) and in the order of the values; -0 and 0 share one key."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + ZERO_KEY


def order_key_value(keys: Tensor) -> Tensor:
    """The float32 of each key."""
    return torch.where(keys >= ZERO_KEY, keys - ZERO_KEY, -1 - keys).int().view(torch.float32)


def signed(keys: Tensor) -> Tensor:
    """The keys as int32 with the same 32 bits, since torch has few operations for uint32."""
    return torch.where(keys >= ZERO_KEY, keys - 2**32, keys).int()


def unsigned(keys: Tensor) -> Tensor:
    """The int64 keys, from int32 with the same 32 bits."""
    return keys.long() & NO_KEY
