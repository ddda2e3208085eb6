"""The rows that a choice keeps, as verl's trainer takes them."""

from typing import Any

from torch import Tensor

from d3s_kernels.selection import choose_rollouts


def choose_rows(advantages: Tensor, groups: Any, keep: int, **options: Any) -> Tensor:
    return choose_rollouts(advantages, keep, groups=groups, **options).nonzero().flatten()
