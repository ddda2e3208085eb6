"""Floats as whole numbers of the same order, as ``csrc/core/order_key.h`` has them."""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT = 0  # the key of what is masked or NaN
ZERO_KEY = 2**31  # from which on keys are those of 0 and of positive numbers
NO_KEY = 2**32 - 1  # above that of any float


def order_key(values: Tensor) -> Tensor:
    """int64 in [1, 2^32) for each of these float32 numbers, in their order; -0 and 0 share one."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + ZERO_KEY


def order_key_value(keys: Tensor) -> Tensor:
    """The float32 of each key."""
    return torch.where(keys >= ZERO_KEY, keys - ZERO_KEY, -1 - keys).int().view(torch.float32)


def signed(keys: Tensor) -> Tensor:
    """int32 of the same 32 bits: torch has little for uint32."""
    return torch.where(keys >= ZERO_KEY, keys - 2**32, keys).int()


def unsigned(keys: Tensor) -> Tensor:
    """The int64 keys of these int32."""
    return keys.long() & NO_KEY
