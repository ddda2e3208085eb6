"""select_rollouts(equal_rows=True): ranks keep equally many, with the largest variance under that limit."""

import itertools

import pytest
import torch
from cases.draw import SPECIAL, Draw, draws
from helpers import NAN, assert_identical, rounds
from ranks import SIZES, Ranks, world
from torch import Tensor

from d3s_kernels import max_variance_select, select_rollouts
from d3s_kernels._rules.equal_rows import most_varied

sizes = pytest.mark.parametrize("size", SIZES)
KINDS = ("whole numbers", "binary", "normal", "constant groups", "opposites", "far from 0")
kinds = pytest.mark.parametrize("kind", KINDS)


def drawn(draw: Draw, kind: str, ranks: int, most: int) -> Tensor:
    """Values ``[ranks, most]``, some of them not usable."""
    shape, generator = (ranks, most), draw.generator()
    values = {
        "whole numbers": lambda: torch.randint(-3, 4, shape, generator=generator).float(),
        "binary": lambda: torch.randint(0, 2, shape, generator=generator).float(),
        "normal": lambda: torch.randn(shape, generator=generator),
        "constant groups": lambda: (
            torch.randn(ranks, 1, generator=generator) + (torch.rand(shape, generator=generator) < 0.2)
        ),
        # The choice amounts to dividing numbers into equal sums.
        "opposites": lambda: torch.rand(ranks, 1, generator=generator) * torch.tensor([1.0, -1.0]).repeat(most)[:most],
        # And rounded, so that some values tie.
        "far from 0": lambda: torch.randn(shape, generator=generator) + 1_000_000,
    }[kind]()
    unusable = torch.rand(shape, generator=generator) < draw.choice((0.0, 0.1, 0.4))
    special = torch.tensor(SPECIAL)[torch.randint(3, shape, generator=generator)]
    return torch.where(unusable, special, values)


def spread(values: Tensor) -> float:
    """The sum of squared deviations."""
    exact = values.double()
    return (exact - exact.mean()).square().sum().item() if len(exact) else 0.0


def in_order(values: Tensor) -> list[Tensor]:
    """The sorted usable values of each row, less a common number, which changes no variance."""
    shift = values[values.isfinite()].double().mean()
    return [row[row.isfinite()].double().sort().values - shift for row in values]


def quota(values: Tensor, keep: int) -> int:
    return min(-(-keep // len(values)), min(int(row.isfinite().sum()) for row in values))


def best_of_all(rows: list[Tensor], each: int) -> float:
    splits = itertools.product(range(each + 1), repeat=len(rows))
    chosen = [
        torch.cat([part for row, i in zip(rows, low, strict=True) for part in (row[:i], row[len(row) - each + i :])])
        for low in splits
    ]
    return max(map(spread, chosen))


def bound(rows: list[Tensor], each: int) -> tuple[float, float]:
    """An upper bound, min over c of the largest sum of (x - c)^2; and d^2 / (4 k), which exchanges that tie at that c
    may lose. The best choice for a centre is found value by value, independently of the algorithm under test."""
    low = torch.cat([row[:each] for row in rows])
    high = torch.cat([row[len(row) - each :] for row in rows])

    def best_around(centres: Tensor) -> Tensor:
        squares = torch.stack([low - centres.unsqueeze(1), high - centres.unsqueeze(1)]).square()
        return squares.max(0).values.sum(1)

    begin, end = low.min().item(), high.max().item()
    for _ in range(14):  # convex in the centre: the minimum lies beside the best point of the grid
        centres = torch.linspace(begin, end, 33, dtype=torch.float64)
        nearest = int(best_around(centres).argmin())
        begin, end = centres[max(nearest - 1, 0)].item(), centres[min(nearest + 1, 32)].item()
    near = ((low + high) / 2 - begin).abs() <= 1e-6 * (1 + abs(begin))
    largest = (high - low)[near].max().item() if near.any() else 0.0
    return best_around(torch.tensor([begin], dtype=torch.float64)).item(), largest**2 / (4 * len(low))


def random_case(draw: Draw, kind: str, ranks: int, most: int) -> tuple[Tensor, int]:
    return drawn(draw, kind, ranks, most), draw.integer(1, max(1, 2 * ranks * most - 1))


@kinds
def test_against_all_choices(kind: str) -> None:
    tried = best = 0
    for draw in draws(rounds(250)):
        ranks, most = draw.integer(1, 6), draw.integer(1, 6)
        values, keep = random_case(draw, kind, ranks, most)
        each = quota(values, keep)
        kept = most_varied(values, torch.tensor(keep))
        assert kept.sum(1).tolist() == [each] * ranks
        assert values[kept].isfinite().all()
        if each == 0 or (each + 1) ** ranks > 400:
            continue
        rows = in_order(values)
        optimum, found = best_of_all(rows, each), spread(values[kept])
        largest = max((row[len(row) - each :] - row[:each]).max().item() for row in rows)
        rounding = 1e-9 * (1 + optimum)
        assert found <= optimum + rounding
        assert found >= optimum - largest**2 / (4 * ranks * each) - rounding
        tried, best = tried + 1, best + (found >= optimum - rounding)
    assert tried > rounds(100)
    assert best > 0.5 * tried


@kinds
def test_against_the_bound(kind: str) -> None:
    """For sizes at which trying all choices takes too long."""
    tried = 0
    for draw in draws(25):
        ranks, most = draw.integer(1, 19), 40
        values, keep = random_case(draw, kind, ranks, most)
        each = quota(values, keep)
        if each == 0:
            continue
        tried += 1
        found = spread(values[most_varied(values, torch.tensor(keep))])
        above, slack = bound(in_order(values), each)
        rounding = 1e-6 * (1 + above)
        assert above - slack - rounding <= found <= above + rounding
    assert tried > 10


@kinds
def test_one_rank_keeps_what_max_variance_keeps(kind: str) -> None:
    for draw in draws(rounds(300)):
        values, keep = random_case(draw, kind, 1, draw.integer(1, 39))
        assert_identical(most_varied(values, torch.tensor(keep))[0], max_variance_select(values[0], keep))


def test_on_each_rank_it_is_the_lowest_and_the_highest() -> None:
    """Values are ordered by (value, index), and -0 is 0. Exchanges that tie are made on all ranks in turn."""
    values = torch.tensor([[0.0, -0.0, 5.0, 5.0], [0.0, 5.0, -0.0, 5.0]])
    kept = most_varied(values, torch.tensor(4))
    assert kept.tolist() == [[True, False, False, True], [True, False, False, True]]


def test_a_bad_keep_that_nobody_checked_keeps_nothing() -> None:
    for keep in (0, -3, -(2**62)):
        assert most_varied(torch.randn(2, 5), torch.tensor(keep)).sum() == 0


# ---- across ranks ---------------------------------------------------------------------------------------------------


def any_split(ranks: Ranks, seed: int) -> int:
    draw, unequal = Draw(seed), 0
    for step in range(60):
        kind = KINDS[step % len(KINDS)]
        length, groups = 4, draw.integer(1, 12)
        everyones = drawn(draw, kind, groups, length).to((torch.float32, torch.bfloat16)[step % 2])
        given = torch.rand(groups, length, generator=draw.generator()) < 0.8 if step % 3 else None
        usable = everyones.isfinite() if given is None else everyones.isfinite() & given
        keep = draw.integer(1, 5)
        form = keep if step % 5 else torch.tensor(keep, dtype=torch.int32)
        options = {"process_group": ranks.group, "equal_rows": True}
        options |= {"max_rollouts": groups * length} if step % 7 < 4 else {}

        in_rows = step % 2 == 0
        pieces = draw.parts(groups if in_rows else groups * length, ranks.size)
        flat = [everyones.view(-1), usable.view(-1)]
        if not in_rows:
            offsets = torch.arange(0, groups * length + 1, length)
            options |= {"offsets": offsets, "placement": "global"}

        def own(tensor: Tensor, pieces: list[int] = pieces, in_rows: bool = in_rows) -> Tensor:
            return (tensor if in_rows else tensor.view(-1)).split(pieces)[ranks.rank]

        mask = None if given is None else own(given)
        kept = select_rollouts(own(everyones), form, mask=mask, **options)
        lengths = [n * length for n in pieces] if in_rows else pieces
        table = torch.full((ranks.size, max(lengths)), NAN)
        for row, values, good in zip(table, *(part.split(lengths) for part in flat), strict=True):
            row[: len(values)] = values.float().masked_fill(~good, NAN)
        expected = most_varied(table, torch.tensor(keep * groups))[ranks.rank, : kept.numel()]
        assert_identical(kept, expected.view(kept.shape))
        sums = ranks.gather_number(int(kept.sum()), kept)
        assert (sums == sums[0]).all()
        alone = select_rollouts(own(everyones), form, mask=mask, process_group=ranks.group) if in_rows else kept
        unequal += int(not torch.equal(alone, kept))
    return unequal


@sizes
def test_the_same_number_on_every_rank(size: int) -> None:
    assert max(world(size).run(any_split, int(torch.randint(2**31, ())))) > 0


def test_without_a_process_group_there_is_one_rank() -> None:
    advantages = torch.randn(5, 8)
    assert_identical(select_rollouts(advantages, 3, equal_rows=True), select_rollouts(advantages, 3))


def test_other_rules_and_scopes_are_refused() -> None:
    for options in ({"rule": "highest"}, {"scope": "group"}):
        with pytest.raises(ValueError, match=r"^equal_rows: got True with rule .*plan_rows evens out what others keep"):
            select_rollouts(torch.randn(2, 4), 1, equal_rows=True, **options)
    with pytest.raises(TypeError, match=r"^equal_rows: got 1; takes True or False"):
        select_rollouts(torch.randn(2, 4), 1, equal_rows=1)


def with_an_empty_rank(ranks: Ranks) -> int:
    advantages = torch.randn(3 * int(ranks.rank > 0), 8)
    return int(select_rollouts(advantages, 4, process_group=ranks.group, equal_rows=True).sum())


def test_beside_a_rank_that_has_nothing_nobody_keeps_any() -> None:
    assert world(3).run(with_an_empty_rank) == [0, 0, 0]
