"""Segments of a tensor, the order of their values, and how many of each are kept: what several rooms need."""

from .order_key import order_key, order_key_value
from .quota import DOUBLE_SLACK, Quota
from .ranking import Ranking, highest_first, lowest_first
from .segments import Segments, both, flags, pool, pool_present, segments_of

__all__ = [
    "DOUBLE_SLACK",
    "Quota",
    "Ranking",
    "Segments",
    "both",
    "flags",
    "highest_first",
    "lowest_first",
    "order_key",
    "order_key_value",
    "pool",
    "pool_present",
    "segments_of",
]
