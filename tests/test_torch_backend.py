"""The ops in plain PyTorch: the bits of the compiled kernels, and unchecked values. test_waits.py has what waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import unchecked
from helpers import (
    NAN,
    assert_identical,
    assert_same,
    assert_same_bits,
    random_logits,
    ratio_results,
)

from d3s_kernels._dispatch import backends
from d3s_kernels._torch import KERNELS, softmax_state


def plain(name: str, *arguments: Any, **options: Any) -> Any:
    """Calls a kernel without the checks before it, as on a GPU."""
    return KERNELS[name](*arguments, **options)


# ---- the compiled kernels' bits --------------------------------------------------------------------------------------


def test_the_same_ratios() -> None:
    compiled = ratio_results()
    with backends.forced("torch"):
        assert_same(ratio_results(), compiled)


def test_a_group_has_the_same_bits_padded_and_packed() -> None:
    rewards = torch.randn(40, 23)
    padded = torch.cat([rewards, torch.full((40, 9), NAN)], 1)
    packed = plain("group_advantages", rewards.flatten(), torch.arange(41) * 23)
    assert_same_bits(plain("group_advantages", padded)[:, :23], packed.view(40, 23))


def test_blocks_of_rows_cover_strided_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(5, 6, 7, 40)[:, 1:, ::2].transpose(0, 1)
    expected = plain("logprob_entropy", logits.contiguous(), None)
    for block in (1, 3 * 40, 4 * 40, 30 * 40):
        monkeypatch.setattr(softmax_state, "_BLOCK", block)
        assert_same(plain("logprob_entropy", logits, None), expected)


# ---- unchecked values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", unchecked.ALL)
def test_values_that_nobody_checked(check: Callable[..., None]) -> None:
    check(plain)


@pytest.mark.parametrize("offsets", [[0, 10, 5, 20], [0, 40], [-9, 20], [0, 2**31 - 1, 20], [20, 0], [7], [5, 9, 12]])
def test_bad_offsets_stay_within_bounds(offsets: list[int]) -> None:
    """Values outside the offsets are not selected, or NaN. Those inside get the same results as with good offsets."""
    values, cuts, each = torch.randn(20), torch.tensor(offsets), torch.ones(len(offsets) - 1)
    good = cuts.clamp(0, 20).cummax(0).values
    begin, end = int(good[0]), int(good[-1])
    inside, part = values[begin:end], good - begin
    for name, arguments, expected, otherwise in (
        ("topk_mask", (values, 0.5), (inside, 0.5), False),
        ("max_variance_select", (values, 2), (inside, 2), False),
        ("group_advantages", (values,), (inside,), NAN),
        ("importance_ratio", (values, 0 * values), (inside, 0 * inside), NAN),
    ):
        options = {"level": "sequence"} if name == "importance_ratio" else {}
        full = torch.full((20,), otherwise)
        full[begin:end] = plain(name, *expected, offsets=part, **options)
        assert_identical(plain(name, *arguments, offsets=cuts, **options), full)
    mask, _, _ = plain("select_tokens", values, each, 0.5, offsets=cuts)
    assert not mask[:begin].any()
    assert not mask[end:].any()
