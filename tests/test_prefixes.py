"""Random prefixes: a mean over all cuts that is unbiased, and one cut for all that takes part in it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import assert_identical, random_generator, rounds
from ranks import Ranks, on_ranks

import d3s_kernels as d3s

RATIOS = (0.5, 0.55, 0.6, 0.7, 0.75, 0.9, 1.0)


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_mean_over_all_cuts_is_the_gradient_of_all_tokens(ratio: float) -> None:
    """Every cut is equally likely, so the mean over one draw for each is the expectation."""
    lengths = [1, 2, 5, 8]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    logprob = torch.randn(mask.shape, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(logprob.exp()[mask].sum() / mask.sum(), logprob)
    cuts = [length - max(1, -int(-(round((2 * ratio - 1) * length, 7)) // 1)) + 1 for length in lengths]
    mean, kept = torch.zeros_like(expected), 0.0
    for places in product(*map(range, cuts)):
        draws = torch.tensor([(place + 0.5) / number for place, number in zip(places, cuts, strict=True)])
        cut = d3s.random_prefixes(mask, ratio, draws=draws)
        loss = (logprob.exp() * cut.weight)[cut.mask].sum() / mask.sum()
        mean += torch.autograd.grad(loss, logprob)[0] / torch.tensor(cuts).prod()
        kept += float(cut.count) / float(torch.tensor(cuts).prod())
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-9)
    assert ratio * mask.sum() - 1e-4 <= kept <= ratio * mask.sum() + len(lengths) / 2 + 1e-4


def test_a_cut_of_a_generator_is_uniform() -> None:
    cut = d3s.random_prefixes(torch.ones(4000, 4, dtype=torch.bool), generator=random_generator(0))
    shares = cut.mask.sum(dim=1).bincount(minlength=5)[1:] / 4000
    assert (shares - 0.25).abs().max() < 0.05


def test_tokens_are_chosen_before_the_cuts() -> None:
    generator = random_generator(1)
    entropy, advantages = torch.rand(5, 9, generator=generator), torch.randn(5, generator=generator)
    advantages[1] = 0.0
    cut = d3s.random_prefixes(torch.ones(5, 9, dtype=torch.bool), draws=torch.rand(5, generator=generator))
    every = d3s.select_tokens(entropy, None, 0.5, rule="prefix", mask=cut)
    assert torch.equal(every.mask, cut.mask)
    assert int(every.count) == int(cut.count)
    useful = d3s.select_tokens(entropy, advantages, 0.5, rule="prefix", mask=cut, drop_zeros=True)
    assert torch.equal(useful.mask, cut.mask & (advantages != 0).unsqueeze(1))
    best = d3s.select_tokens(entropy, advantages, 0.3, rule="prefix_advantage_entropy", mask=cut)
    assert torch.equal(best.mask, d3s.select_tokens(entropy, advantages, 0.3, mask=cut.mask).mask)
    for chosen in (every, useful, best):
        assert_identical(chosen.weight, torch.where(chosen.mask, cut.weight, 0.0))
    assert d3s.select_tokens(entropy, advantages, 0.3).weight is None


def test_a_selection_cuts_before_and_after_the_forward_alike() -> None:
    entropy, mask = torch.rand(4, 6), torch.ones(4, 6, dtype=torch.bool)
    selection = d3s.Selection(token_rule="prefix", token_ratio_start=0.5, token_ratio_end=1.0)
    for progress in (0.0, 0.6, 1.0):
        before = selection.prefixes(mask, progress, generator=random_generator(2))
        tokens = selection.tokens(entropy, None, progress, mask=before)
        later = selection.tokens(entropy, None, progress, mask=mask, generator=random_generator(2))
        assert torch.equal(tokens.mask, later.mask)
        assert_identical(tokens.weight, later.weight)
        assert int(selection.denominator(tokens, mask)) == 24
    assert bool(d3s.Selection().prefixes(mask, 0.0).mask.all())


def test_the_cut_compiles_in_one_graph() -> None:
    mask, draws = torch.rand(3, 7) < 0.8, torch.rand(3)
    call = lambda mask, draws: d3s.random_prefixes(mask, 0.75, draws=draws)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(mask, draws), d3s.random_prefixes(mask, 0.75, draws=draws), strict=True):
        torch.testing.assert_close(found, expected)


# ---- across ranks ----------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def ranks_cut_as_one_process_would(ranks: Ranks) -> None:
    """The ranks that have pieces of a sequence may have different seeds: the first rank's counts."""
    table = torch.rand(ranks.size * 2, 5, generator=random_generator(3)) < 0.7
    own, group = slice(2 * ranks.rank, 2 * ranks.rank + 2), {"process_group": ranks.group}
    flat, columns = table.flatten(), [3, *[0] * (ranks.size - 2), 2]
    piece = table.split(columns, dim=1)[ranks.rank].contiguous()
    for seed in range(rounds(30)):
        alike, other = ({"generator": random_generator(1000 * seed + rank)} for rank in (0, ranks.rank))
        once, rows = ({"generator": random_generator(1000 * seed)} for _ in range(2))
        of_rows = d3s.random_prefixes(table[own], 0.7, **alike, **group)
        of_pieces = d3s.random_prefixes(piece, 0.7, placement="pieces", **other, **group)
        expected = d3s.random_prefixes(table, 0.7, **once)
        assert torch.equal(of_rows.mask, expected.mask[own])
        assert torch.equal(of_pieces.mask, expected.mask.split(columns, dim=1)[ranks.rank])
        assert int(of_rows.count) == int(of_pieces.count) == int(expected.count)
        one = d3s.random_prefixes(flat, 0.7, **rows).mask.view(ranks.size, 10)[ranks.rank]
        draws = {"generator": random_generator(1000 * seed + ranks.rank)}
        assert torch.equal(d3s.random_prefixes(table[own].flatten(), 0.7, **draws, **group).mask, one)


# ---- errors ----------------------------------------------------------------------------------------------------------

MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((MASK, 0.4), ValueError, r"ratio: got 0\.4; takes a number in \[0\.5, 1\] for prefixes"),
        ((MASK, "half"), TypeError, "ratio: got str; takes a number or a 0-d tensor"),
        ((MASK, torch.tensor([0.5])), ValueError, r"ratio: got shape \[1\] of torch\.float32; takes"),
        ((MASK.double(),), (ValueError, TypeError), "mask: "),
        ((MASK, 0.5, {"draws": torch.rand(3)}), ValueError, r"draws: got shape \[3\] of torch\.float32; takes a float"),
        (
            (MASK, 0.5, {"draws": torch.rand(2), "generator": torch.Generator()}), ValueError,
            "draws: got a tensor and a generator; takes one of the two",
        ),
        ((MASK[0], 0.5, {"offsets": torch.tensor([0, 4])}), ValueError, "offsets: ends at 4; must end at"),
    ],
)  # fmt: skip
def test_errors(arguments: tuple[Any, ...], error: type[Exception], said: str) -> None:
    *given, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error, match=said):
        d3s.random_prefixes(*given, **options)


def test_a_ratio_in_a_tensor_that_is_out_of_range_keeps_nothing() -> None:
    for ratio in (0.4, 1.1, torch.nan):
        assert not d3s.random_prefixes(MASK, torch.tensor(ratio)).mask.any()


def test_prefixes_need_a_rule_that_cuts() -> None:
    cut = d3s.random_prefixes(MASK)
    with pytest.raises(TypeError, match="mask: got Prefixes with rule 'entropy'; takes them with 'prefix' or"):
        d3s.select_tokens(torch.rand(2, 3), None, 0.5, rule="entropy", mask=cut)
    with pytest.raises(ValueError, match="mask: got a Tensor with off_policy_rule 'kpop'; takes what trusted"):
        d3s.Selection(token_rule="prefix", off_policy_rule="kpop").prefixes(MASK, 0.0)
