"""shared_tokens: what a wrong response shares with a right one of its group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import d3s_kernels as d3s
from d3s_kernels import shared_tokens

WRONG, RIGHT = -1.0, 1.0


def marked(wrong: list[int], *right: list[int], mask: list[int] | None = None) -> list[int]:
    """The marked places of a wrong response, in a group with right ones."""
    rows, width = [wrong, *right], max(map(len, [wrong, *right]))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    present = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    if mask is not None:
        present[0, : len(mask)] &= torch.tensor(mask).bool()
    found = shared_tokens(ids, torch.tensor([[WRONG, *[RIGHT] * len(right)]]), present)
    assert not found[1:].any()
    return found[0].nonzero().flatten().tolist()


def test_beginning_and_end() -> None:
    assert marked([5, 6, 7, 8, 9], [5, 6, 3, 9]) == [0, 1, 4]
    assert marked([5, 6, 7], [1, 2, 3]) == []
    assert marked([5, 6, 7], [5, 6, 7]) == [0, 1, 2]
    assert marked([5, 6, 7], [5, 6, 7, 8]) == [0, 1, 2]
    assert marked([5, 6, 7, 8], [7, 8]) == [2, 3]
    # Of several right responses, the longest beginning and the longest end.
    assert marked([5, 6, 7, 8, 9], [5, 1, 8, 9], [5, 6, 2, 9]) == [0, 1, 3, 4]


def test_no_token_counts_twice() -> None:
    """A right response of two tokens does not explain three."""
    assert marked([4, 4, 4], [4, 4]) == [0, 1]
    assert marked([1, 4, 4, 2], [1, 4, 2]) == [0, 1, 3]


def test_other_tokens_are_skipped() -> None:
    """A tool has answered 7; it is neither compared nor marked."""
    assert marked([5, 7, 6, 3], [5, 6, 2], mask=[1, 0, 1, 1]) == [0, 2]
    assert marked([7, 7, 5, 6], [5, 8], mask=[0, 0, 1, 1]) == [2]  # padding on the left


def test_nothing_waits_for_the_device() -> None:
    with FakeTensorMode() as mode:
        ids, advantages = (mode.from_tensor(part) for part in (torch.ones(4, 5).long(), torch.randn(2, 2)))
        assert shared_tokens(ids, advantages).shape == (4, 5)


IDS = torch.ones(4, 3).long()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token_ids": IDS.float()}, r"token_ids: got dtype torch\.float32; takes integers"),
        ({"token_ids": IDS.flatten()}, r"token_ids: got shape \[12\]; takes \[B, T\], or \[N\] with offsets"),
        (
            {"advantages": torch.ones(4)},
            r"advantages: got shape \[4\]; takes \[groups, n\] for 4 responses, or \[4\] with",
        ),
        ({"advantages": torch.ones(3, 2)}, r"advantages: got shape \[3, 2\]; takes \[groups, n\] for 4 responses"),
        ({"groups": "aabb"}, r"advantages: got shape \[2, 2\] with groups; takes \[4\]"),
        ({"groups": "aab", "advantages": torch.ones(4)}, "groups: got 3 for values of shape"),
        ({"mask": torch.ones(4, 2).bool()}, "mask"),
        ({"mask": torch.ones(4, 3)}, "mask: got dtype torch.float32; takes bool or integers"),
        ({"token_ids": IDS.flatten(), "offsets": torch.tensor([0, 5])}, "offsets"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared_tokens(**{"token_ids": IDS, "advantages": torch.ones(2, 2)} | given)


def test_a_selection_chooses_among_the_others() -> None:
    ids, mask = torch.tensor([[1, 2, 3], [1, 4, 5]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[RIGHT, WRONG]])
    assert d3s.Selection().candidates(ids, advantages, mask).equal(mask.bool())
    selection = d3s.Selection(drop_shared_tokens=True, off_policy_rule="token_mask", token_ratio_start=1.0)
    left = selection.candidates(ids, advantages, mask)
    assert left.tolist() == [[True, True, True], [False, True, False]]
    logprob = torch.zeros(2, 3)
    trusted = selection.trusted(logprob, torch.tensor([[0.0, -9, 0], [0, 0, 0]]), mask=mask).only(left)
    tokens = selection.tokens(torch.rand(2, 3), advantages.flatten(), 0.0, mask=trusted)
    assert tokens.mask.tolist() == [[True, False, True], [False, True, False]]
    assert trusted.weight.equal(trusted.mask.float())
    assert trusted.count == 3
