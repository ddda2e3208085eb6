"""select_tokens and select_tokens_from_logits: topk_mask of |A| * H or another score, with count and threshold."""

import pytest
import torch
from helpers import (
    NAN,
    assert_identical,
    cut,
    random_generator,
    slow,
)

from d3s_kernels import TokenSelection, reference, select_tokens


def check(found: TokenSelection, expected: reference.TokenSelection) -> None:
    assert isinstance(found, TokenSelection)
    for name in expected._fields:
        assert_identical(getattr(found, name), getattr(expected, name))


# ---- the score -------------------------------------------------------------------------------------------------------


def test_the_score_is_the_product_in_float32() -> None:
    """Scores that tie when rounded to half precision are told apart. The sign of the advantage does not matter."""
    values = torch.full((2, 2), 1.0, dtype=torch.bfloat16)
    each = torch.tensor([[1.0, -1.0 - 2**-20], [1.0 + 2**-20, 0.5]])
    assert select_tokens(values, each, 0.25).mask.tolist() == [[False, True], [False, False]]
    assert select_tokens(values, each, 0.5).mask.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("short", range(4))
def test_a_sequence_of_one_token_has_its_own_advantage(short: int) -> None:
    """At any position beside longer sequences, it uses its own advantage and not that of a neighbour."""
    lengths, each = torch.full((4,), 3), torch.full((4,), 2.0)
    lengths[short] = each[short] = 1
    offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    highest = torch.ones(10, dtype=torch.bool)
    highest[offsets[short]] = False
    assert_identical(select_tokens(torch.ones(10), each, 0.9, offsets=offsets).mask, highest)
    assert_identical(select_tokens(torch.ones(10), 3 - each, 0.1, offsets=offsets).mask, ~highest)


def test_as_many_advantages_as_tokens_are_for_the_tokens() -> None:
    values, offsets = torch.ones(3), torch.tensor([0, 0, 1, 3])  # three sequences, three tokens
    found = select_tokens(values, torch.tensor([3.0, 1.0, 2.0]), 0.3, offsets=offsets)
    assert found.mask.tolist() == [True, False, False]


def test_half_precision_advantages() -> None:
    values, each = torch.rand(4, 30), torch.randn(4).bfloat16()
    check(select_tokens(values, each, 0.2), select_tokens(values, each.float(), 0.2))


# ---- other rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_entropy_alone(scope: str) -> None:
    """Advantages are ignored, even NaN or of a wrong shape. The entropies that are given come back."""
    values, mask = torch.rand(6, 50), torch.rand(6, 50) < 0.8
    found = select_tokens(values, None, 0.2, rule="entropy", mask=mask, scope=scope)
    assert found.entropy is values
    check(found, select_tokens(values, torch.tensor(1.0), 0.2, mask=mask, scope=scope))
    check(select_tokens(values, torch.full((3,), NAN), 0.2, rule="entropy", mask=mask, scope=scope), found)


def test_random_tokens_are_spread_evenly() -> None:
    """Half of 200,000 tokens are drawn: each tenth of the batch gets 10,000, with a standard deviation below 100."""
    found = select_tokens(torch.zeros(200_000), None, 0.5, rule="random")
    assert found.count == 100_000
    assert ((found.mask.view(10, -1).sum(-1) - 10_000).abs() < 600).all()


def test_random_tokens_follow_their_generator() -> None:
    values, mask = torch.zeros(8, 100), torch.rand(8, 100) < 0.7
    for scope in ("batch", "sequence"):
        one, same, other = (
            select_tokens(values, None, 0.3, rule="random", mask=mask, scope=scope, generator=random_generator(seed))
            for seed in (1, 1, 2)
        )
        assert_identical(one.mask, same.mask)
        assert not torch.equal(one.mask, other.mask)
        assert not one.mask[~mask].any()


# ---- awkward batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "shape"),
    [
        ("batch", (2, 70_000)),
        slow("batch", (70_000, 2), shows="as many sequences pooled"),
        ("sequence", (2, 70_000)),
        slow("sequence", (70_000, 2), shows="more sequences than 16 bits count"),
    ],
)
def test_long_batches(shape: tuple[int, int], scope: str) -> None:
    values, each, mask = torch.rand(shape), torch.randn(shape[0]), torch.rand(shape) < 0.9
    options = {"mask": mask, "scope": scope}
    check(select_tokens(values, each, 0.1, **options), reference.select_tokens(values, each, 0.1, **options))


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_long_ragged_batch(per: str) -> None:
    """The pieces in which a long pooled batch is processed begin and end inside sequences."""
    offsets = cut(300_000, 40)
    values, each = torch.rand(300_000), torch.randn(300_000 if per == "token" else 40)
    for scope in ("batch", "sequence"):
        options = {"offsets": offsets, "scope": scope}
        check(select_tokens(values, each, 0.1, **options), reference.select_tokens(values, each, 0.1, **options))
