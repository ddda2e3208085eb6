"""The selection as one object: its options, the one rule of rounding, and the same choice in every form of a batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.draw import draws
from ranks import Ranks, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels.selection import choose_rollouts, options

RULES = ["max_variance", "highest", "largest_abs", "percentile"]
SCOPES = ["batch", "group"]


def both_ends(rollouts: float, **values: Any) -> d3s.Selection:
    return d3s.Selection(rollouts_start=rollouts, rollouts_end=rollouts, **values)


# ---- options ---------------------------------------------------------------------------------------------------------


def test_keywords_a_mapping_and_words_say_the_same() -> None:
    values = {"rollouts_start": 4, "token_rule": "entropy", "drop_zeros": True, "token_ratio_end": 0.5}
    words = ["--lr", "1e-6", "--d3s.rollouts_start=4", "--d3s.token_rule", "entropy", "--d3s.drop_zeros", "true", "x"]
    from_words, rest = d3s.Selection.from_words([*words, "--d3s.token_ratio_end=0.5"])
    assert rest == ["--lr", "1e-6", "x"]
    of_options = d3s.Selection(d3s.SelectionOptions(**values))
    assert d3s.Selection.from_mapping(None).options == d3s.SelectionOptions()
    for each in (d3s.Selection(**values), d3s.Selection.from_mapping(values), of_options):
        assert each.options == from_words.options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollouts_start": 0}, r"s\.rollouts_start: got 0; takes a share in \(0, 1\] of a group's rollouts, or"),
        ({"rollouts_end": 2.5}, r"s\.rollouts_end: got 2.5; takes a share"),
        ({"token_ratio_end": 1.5}, r"s\.token_ratio_end: got 1.5; takes a number in \(0, 1\]"),
        ({"token_rule": "best"}, r"s\.token_rule: got 'best'; takes 'advantage_entropy' or "),
        ({"drop_zeros": 1}, r"s\.drop_zeros: got 1; takes true or false"),
        ({"rollout": 4}, r"s\.rollout: got 4, but it is no option; the options are s\.rollouts_start, s\.rollouts_end"),
        (
            {"token_rule": "entropy_quantile", "drop_zeros": True},
            r"s\.drop_zeros: got True with token_rule 'entropy_quantile'; takes False",
        ),
        (
            {"token_rule": "random", "drop_zeros": True},
            r"s\.drop_zeros: got True with token_rule 'random'; takes False",
        ),
    ],
)
def test_bad_options_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        d3s.Selection.from_mapping(values, "s.")
    with pytest.raises(ValueError, match=message.replace(r"s\.", "")):
        d3s.Selection(**values)


def test_options_and_values_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="options: got a SelectionOptions and drop_zeros; takes one of the two"):
        d3s.Selection(d3s.SelectionOptions(), drop_zeros=True)
    with pytest.raises(TypeError, match="options: got a dict; takes SelectionOptions"):
        d3s.Selection({"drop_zeros": True})
    with pytest.raises(ValueError, match="token_ratio_start: got 7"):
        d3s.Selection(d3s.SelectionOptions(token_ratio_start=7))
    with pytest.raises(ValueError, match=r"--d3s\.token_rule: got no value"):
        d3s.Selection.from_words(["--d3s.token_rule"])


def test_every_option_says_what_it_takes_and_is_read() -> None:
    names = [each.name for each in dataclasses.fields(d3s.SelectionOptions)]
    assert options.option_names(d3s.SelectionOptions) == names
    options.check_options(d3s.SelectionOptions())  # defaults are good values
    assert all(each.metadata["help"] for each in dataclasses.fields(d3s.SelectionOptions))


def test_the_budget_follows_the_schedule() -> None:
    selection = d3s.Selection(rollouts_start=0.25, rollouts_end=12, token_ratio_start=0.1, token_ratio_end=0.3)
    assert [selection.budget(progress, 16).rollouts for progress in (0, 0.5, 1)] == [4, 8, 12]
    assert selection.budget(0.5, 16).token_ratio == pytest.approx(0.2)
    assert selection.number_of_rollouts(0.0, groups=3, n=16, multiple_of=8) == (12, 16)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def shuffled(advantages: Tensor, seed: int) -> tuple[Tensor, list[str], Tensor]:
    """The same rollouts as a trainer without rows for groups has them: values, groups, and each one's old place."""
    order = torch.randperm(advantages.numel(), generator=torch.Generator().manual_seed(seed))
    n = advantages.shape[1]
    return advantages.flatten()[order], [f"prompt {int(place) // n}" for place in order], order


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scope", SCOPES)
def test_rows_of_groups_and_groups_in_any_order_choose_alike(rule: str, scope: str) -> None:
    """TRL has a row for each group, verl rollouts in any order: the same options choose the same rollouts."""
    for draw in draws():
        groups, n, keep, multiple = draw.integer(1, 5), draw.integer(2, 8), draw.integer(2, 8), draw.integer(1, 6)
        advantages = torch.randn(groups, n, generator=draw.generator())
        values, labels, order = shuffled(advantages, draw.integer(0, 2**20))
        selection = both_ends(keep, rollout_rule=rule, rollout_scope=scope)
        total = min(-(-min(keep, n) * groups // multiple), groups * n // multiple) * multiple
        if total == 0:
            with pytest.raises(ValueError, match=f"multiple_of: got {multiple}, and {groups * n} rollouts"):
                selection.rollouts(advantages, 0.0, multiple_of=multiple)
            continue
        assert selection.number_of_rollouts(0.0, groups, n, multiple)[1] == total
        kept = selection.rollouts(advantages, 0.0, multiple_of=multiple)
        assert int(kept.sum()) == total
        # Groups come in the order in which they first appear: with other extra places for groups that tie, none here.
        again = selection.rollouts(values, 0.0, groups=labels, multiple_of=multiple)
        assert torch.equal(again, kept.flatten()[order])
        for groups_of in (order // n, list(order // n), (order // n).numpy()):
            assert torch.equal(selection.rollouts(values, 0.0, groups=groups_of, multiple_of=multiple), again)


def test_the_last_ones_go_to_the_groups_that_vary_most() -> None:
    """Against all ways to give the groups one more, for groups of any size."""
    for draw in draws():
        sizes, keep = [draw.integer(1, 6) for _ in range(draw.integer(1, 4))], draw.integer(1, 4)
        groups = [torch.randn(size, generator=draw.generator()) for size in sizes]
        for total in range(sum(min(keep, size) for size in sizes), sum(sizes) + 1):
            assert_most_varied(groups, keep, total)


def assert_most_varied(groups: list[Tensor], keep: int, total: int) -> None:
    sizes = [len(group) for group in groups]
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    kept = choose_rollouts(torch.cat(groups), keep, scope="group", groups=labels, multiple_of=total)
    counts = [int(part.sum()) for part in kept.split(sizes)]
    each = min((count for count, size in zip(counts, sizes, strict=True) if count < size), default=max(sizes))
    assert sum(counts) == total
    for group, count, part in zip(groups, counts, kept.split(sizes), strict=True):
        if count < len(group):
            assert count in (each, each + 1)
        best = max(itertools.combinations(group.tolist(), count), key=variance) if count else ()
        assert math.isclose(variance(group[part].tolist()), variance(best), rel_tol=1e-5, abs_tol=1e-9)
    further = [  # of the groups that could have one more, whether they have it
        (count > each, variance(max(itertools.combinations(group.tolist(), each + 1), key=variance)))
        for group, count in zip(groups, counts, strict=True)
        if len(group) > each
    ]
    lack = max((most for has, most in further if not has), default=0.0)
    assert all(most >= lack * (1 - 2e-5) for has, most in further if has)


def variance(values: Any) -> float:
    values = list(values)
    mean = math.fsum(values) / len(values) if values else 0.0
    return math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0


def test_groups_that_differ_by_rounding_alone_tie() -> None:
    """Normalised groups all have a deviation of 1, up to rounding, which must not decide who keeps one more."""
    group = torch.randn(6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    advantages = torch.stack([group * (1 + 3e-7 * place) for place in range(5)]).float()
    assert advantages.double().var(dim=1).diff().gt(0).all()
    kept = choose_rollouts(advantages, 2, scope="group", multiple_of=13)
    assert kept.sum(dim=1).tolist() == [3, 3, 3, 2, 2]


def test_what_is_not_finite_is_never_kept() -> None:
    values = torch.tensor([math.nan, 1.0, -1.0, math.inf, 0.5, 2.0])
    assert choose_rollouts(values, 2, groups="aaabbb").tolist() == [False, True, True, False, True, True]
    assert choose_rollouts(values, 3, scope="group", groups="aaabbb").sum() == 4
    with pytest.raises(ValueError, match="multiple_of: got 5, and 4 rollouts with a finite advantage"):
        choose_rollouts(values, 2, groups="aaabbb", multiple_of=5)
    assert choose_rollouts(torch.full((3,), math.nan), 2, groups="aab").sum() == 0
    assert choose_rollouts(torch.empty(0), 2, groups=[]).shape == (0,)


def test_rows_and_labels_count_what_is_finite_alike() -> None:
    advantages = torch.tensor([[1.0, -1.0, math.nan, math.nan], [0.5, -0.5, 0.2, math.inf]])
    labels = [0] * 4 + [1] * 4
    for scope, keep, multiple in itertools.product(SCOPES, (2, 4), (1, 2, 4)):
        options: dict[str, Any] = {"scope": scope, "multiple_of": multiple}
        kept = choose_rollouts(advantages, keep, **options)
        assert torch.equal(kept.flatten(), choose_rollouts(advantages.flatten(), keep, groups=labels, **options))
        assert kept.sum() % multiple == 0
        assert not kept[~advantages.isfinite()].any()


def test_the_extra_rollouts_of_random_draws_go_to_any_group() -> None:
    advantages = torch.tensor([[5.0, -5.0, 5.0, -5.0]] + [[0.1, -0.1, 0.1, -0.1]] * 3)
    options: dict[str, Any] = {"rule": "random", "scope": "group", "multiple_of": 9}
    more = torch.stack([choose_rollouts(advantages, 2, **options).sum(dim=1) for _ in range(60)])
    assert (more.sum(dim=1) == 12).logical_or(more.sum(dim=1) == 9).all()
    assert (more > 2).any(dim=0).all()


def test_an_inherited_option_with_another_default_is_checked() -> None:
    @dataclasses.dataclass
    class Mine(d3s.SelectionOptions):
        rollouts_end: float = 8.0
        more: int = 3

    assert options.option_names(Mine) == options.option_names(d3s.SelectionOptions)
    assert d3s.Selection(Mine()).options.rollouts_end == 8.0
    with pytest.raises(ValueError, match=r"rollouts_end: got 2\.5; takes a share"):
        d3s.Selection(Mine(rollouts_end=2.5))
    assert options.options_from(Mine, {"rollouts_end": 4}).rollouts_end == 4


def test_rollouts_without_a_token_come_last() -> None:
    advantages = torch.tensor([[3.0, -3.0, 1.0, -1.0], [2.0, -2.0, 0.5, -0.5]])
    has_tokens = torch.tensor([[False, True, True, True], [True, True, True, False]])
    kept = both_ends(2).rollouts(advantages, 0.0, has_tokens=has_tokens)
    assert kept.tolist() == [[False, True, True, False], [True, True, False, False]]
    highest = both_ends(3, rollout_rule="highest")
    assert not highest.rollouts(advantages, 0.0, has_tokens=has_tokens)[~has_tokens].any()
    highest = both_ends(2, rollout_rule="highest")
    advantages = torch.tensor([[9e8, 1e9, math.nan, 8e8], [-1e9, 2e9, -math.inf, 3.0]])  # two are not finite
    for values in (advantages, advantages.bfloat16()):
        kept = highest.rollouts(values, 0.0, has_tokens=has_tokens.int())
        assert kept.tolist() == [[False, True, False, True], [True, True, False, False]]
    with pytest.raises(ValueError, match=r"has_tokens: got shape \[4\]; takes that of advantages, \[2, 4\]"):
        highest.rollouts(advantages, 0.0, has_tokens=has_tokens[0])


VARIED = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]])  # variances of 0, 3/16, 4/16, 3/16


@pytest.mark.parametrize(
    ("share", "multiple", "groups"),
    [
        (0.4, 1, [2]),
        (0.5, 1, [1, 2]),
        (1.0, 1, [1, 2, 3]),
        (0.4, 5, [1, 2]),  # one group has not enough rollouts for a multiple of 5: the next one is added
        (1.0, 13, [0, 1, 2, 3]),
    ],
)
def test_groups_with_a_share_of_the_variance(share: float, multiple: int, groups: list[int]) -> None:
    """Half of the rollouts of the groups that remain, rounded up; the same as if there were no others."""
    advantages = d3s.group_advantages(VARIED)
    values, labels, order = shuffled(advantages, 3)
    for scope in SCOPES:
        plain = both_ends(2, rollout_scope=scope)
        selection = both_ends(2, rollout_scope=scope, group_variance_mass=share)
        kept = selection.rollouts(advantages, 0.0, rewards=VARIED, multiple_of=multiple)
        assert int(kept.sum()) == -(-2 * len(groups) // multiple) * multiple
        assert kept[groups].equal(plain.rollouts(advantages[groups], 0.0, multiple_of=multiple))
        again = selection.rollouts(
            values, 0.0, rewards=VARIED.flatten()[order].to(torch.int64), groups=labels, multiple_of=multiple
        )
        assert int(again.sum()) == int(kept.sum())
        among = torch.zeros_like(kept).index_fill(0, torch.tensor(groups), True).flatten()[order]
        assert not (again & ~among).any()


def test_some_group_remains_without_spread() -> None:
    rewards = torch.ones(3, 4)
    selection = both_ends(2, group_variance_mass=0.9)
    for multiple, groups in ((1, 1), (5, 2), (12, 3)):
        kept = selection.rollouts(torch.zeros(3, 4), 0.0, rewards=rewards, multiple_of=multiple)
        assert kept.any(dim=1).sum() <= groups
        assert kept.sum() % multiple == 0
        assert kept.any()
    advantages = torch.zeros(3, 4).index_fill(0, torch.tensor([0]), math.nan)
    assert selection.rollouts(advantages, 0.0, rewards=rewards)[1].any()  # the first has no finite advantage
    assert selection.rollouts(torch.empty(0, 4), 0.0, rewards=torch.empty(0, 4)).shape == (0, 4)


def test_the_variance_is_of_rewards() -> None:
    selection, advantages = both_ends(2, group_variance_mass=0.9), torch.randn(3, 4)
    for more, got in (({}, "None"), ({"rewards": torch.randn(12)}, r"shape \[12\]")):
        with pytest.raises(ValueError, match=rf"rewards: got {got} with group_variance_mass; takes the shape of adv"):
            selection.rollouts(advantages, 0.0, **more)
    with pytest.raises(ValueError, match="ranks: got 3 with group_variance_mass; takes None"):
        selection.rollouts(advantages, 0.0, rewards=advantages, ranks=3)
    with pytest.raises(ValueError, match=r"group_variance_mass: got 1\.5; takes a number in \(0, 1\], or None"):
        d3s.Selection(group_variance_mass=1.5)
    assert both_ends(2).rollouts(advantages, 0.0, rewards=torch.randn(5)).sum() == 6  # not read


def test_random_draws_are_those_of_the_generator() -> None:
    selection, advantages = both_ends(2, rollout_rule="random"), torch.randn(4, 8)
    draws = [selection.rollouts(advantages, 0.0, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)
    both_ends(2).rollouts(advantages, 0.0, generator=torch.Generator())  # a rule that draws nothing takes it too


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"advantages: got shape \[4\]; takes \[groups, n\], or \[N\] with groups"):
        choose_rollouts(torch.randn(4), 2)
    with pytest.raises(ValueError, match=r"groups: got 3 for values of shape .4.; takes one for each rollout"):
        choose_rollouts(torch.randn(4), 2, groups="abc")
    with pytest.raises(ValueError, match="multiple_of: got 0"):
        choose_rollouts(torch.randn(2, 4), 2, multiple_of=0)
    with pytest.raises(ValueError, match="keep: got 0"):
        choose_rollouts(torch.randn(2, 4), 0)
    with pytest.raises(ValueError, match="scope: got 'groups'; takes 'batch' or 'group'"):
        choose_rollouts(torch.randn(2, 4), 2, scope="groups")
    for ranks, groups in ((3, None), (0, None), (2, [0, 0, 0, 0, 1, 1, 1, 1])):
        values = torch.randn(8) if groups else torch.randn(2, 4)
        with pytest.raises(ValueError, match=rf"ranks: got {ranks} with advantages of shape .*; takes \[groups, n\]"):
            choose_rollouts(values, 2, groups=groups, ranks=ranks)
    with pytest.raises(ValueError, match="process_group: takes"):
        both_ends(2).rollouts(torch.randn(2, 4), 0.0, ranks=2, process_group=object())


def test_rollouts_that_cannot_move_vary_together_with_as_many_on_each_rank() -> None:
    advantages = torch.tensor([[9.0, -9.0, 8.0, -8.0], [0.1, 0.0, 0.0, -0.1]])
    anywhere = choose_rollouts(advantages, 2)
    assert anywhere.view(2, 4).sum(dim=1).tolist() == [4, 0]
    by_rank = choose_rollouts(advantages, 2, ranks=2)
    assert by_rank.view(2, 4).tolist() == [[True, True, False, False], [True, False, False, True]]
    apart = torch.tensor([[9.0, 8.0, 1.0, 0.0], [-9.0, -8.0, -1.0, 0.0]])
    by_rank = choose_rollouts(apart, 2, ranks=2)
    # Alone, each rank would keep its highest and its lowest: 9 and 0, and 0 and -9.
    assert by_rank.view(2, 4).tolist() == [[True, True, False, False]] * 2


def test_groups_that_cannot_move_are_chosen_on_their_rank() -> None:
    advantages = torch.tensor(
        [[9.0, -9.0, 8.0, -8.0], [0.3, 0.1, 0.0, -0.1], [5.0, 1.0, 2.0, -5.0], [1.0, 2.0, 3.0, 4.0]]
    )
    kept = choose_rollouts(advantages, 2, scope="group", multiple_of=4, ranks=2)
    assert torch.equal(kept, choose_rollouts(advantages, 2, scope="group", multiple_of=4))
    straddling = choose_rollouts(advantages[:3], 2, scope="group", multiple_of=2, ranks=2)
    assert straddling.view(2, 6).sum(dim=1).tolist() == [3, 3]


# ---- advantages and tokens -------------------------------------------------------------------------------------------


def test_advantages_of_the_kept_rollouts() -> None:
    rewards = torch.tensor([[0.0, 1.0, 2.0, 7.0], [1.0, 1.0, 1.0, 1.0]])
    advantages, kept = d3s.group_advantages(rewards), torch.tensor([[True, False, True, True]] * 2)
    assert d3s.Selection().advantages(advantages, kept) is advantages
    selection = d3s.Selection(advantages_from="kept")
    anew = selection.advantages(advantages, kept)
    order = torch.randperm(8)
    shuffled = selection.advantages(advantages.flatten()[order], kept.flatten()[order], groups=order // 4)
    assert torch.equal(shuffled, anew.flatten()[order])
    for each in (selection, d3s.Selection()):
        with pytest.raises(ValueError, match=r"advantages: got shape \[8\]; takes \[groups, n\], or \[N\] with groups"):
            each.advantages(advantages.flatten(), kept.flatten())
    expected = d3s.group_advantages(rewards.masked_fill(~kept, torch.nan))
    torch.testing.assert_close(anew, expected, atol=2e-4, rtol=0)
    assert anew[1].eq(0).all()


def test_padded_and_packed_tokens_are_chosen_alike() -> None:
    random = torch.Generator().manual_seed(3)
    lengths = torch.tensor([5, 0, 3, 6])
    mask = torch.arange(6) < lengths[:, None]
    entropy, advantages = torch.rand(4, 6, generator=random), torch.randn(4, generator=random)
    for scope in ("batch", "sequence"):
        selection = d3s.Selection(token_ratio_start=0.4, token_scope=scope)
        padded = selection.tokens(entropy.requires_grad_(), advantages, 0.0, mask=mask)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        packed = selection.tokens(entropy[mask], advantages, 0.0, offsets=offsets)
        assert torch.equal(padded.mask[mask], packed.mask)
        assert not padded.mask[~mask].any()


@pytest.mark.parametrize(("over", "expected"), [("kept", 3), ("all", 6)])
def test_denominator(over: str, expected: int) -> None:
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    selection = d3s.Selection(loss_denominator=over, token_ratio_start=0.5)
    tokens = selection.tokens(torch.rand(2, 4), torch.ones(2), 0.0, mask=mask)
    assert int(selection.denominator(tokens, mask)) == expected
    nothing = torch.zeros_like(mask)
    tokens = selection.tokens(torch.rand(2, 4), torch.ones(2), 0.0, mask=nothing)
    assert int(selection.denominator(tokens, nothing)) == 1


# ---- across ranks ----------------------------------------------------------------------------------------------------


def of_rank(ranks: Ranks, advantages: Tensor, entropy: Tensor) -> None:
    """Each rank has two of six groups; together they choose what one process would. The rules: test_across_ranks.py."""
    own, rows = slice(2 * ranks.rank, 2 * ranks.rank + 2), slice(8 * ranks.rank, 8 * ranks.rank + 8)
    group, mask = torch.distributed.group.WORLD, torch.ones_like(entropy, dtype=torch.bool)
    for over, share, rewards in (("kept", None, None), ("all", 0.5, advantages * 2), ("all", 0.5, torch.zeros(6, 4))):
        selection = both_ends(3, group_variance_mass=share, token_ratio_start=0.3, loss_denominator=over)
        some = None if rewards is None else rewards[own]
        kept = selection.rollouts(advantages[own], 0.0, rewards=some, process_group=group)
        assert torch.equal(kept, selection.rollouts(advantages, 0.0, rewards=rewards)[own])
        tokens = selection.tokens(entropy[rows], advantages[own].flatten(), 0.0, process_group=group)
        whole = selection.tokens(entropy, advantages.flatten(), 0.0)
        assert torch.equal(tokens.mask, whole.mask[rows])
        shared = selection.denominator(tokens, mask[rows], process_group=group)
        assert torch.equal(shared, selection.denominator(whole, mask))


def test_ranks_choose_together() -> None:
    advantages, entropy = torch.randn(6, 4), torch.rand(24, 5)
    world(3).run(of_rank, advantages, entropy)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[1] / "docs" / "selection.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    shown = {name: value for names, default, _ in rows for name, value in pairs_of(names, default)}
    plain = lambda value: str(value).lower() if isinstance(value, bool) else str(value)  # noqa: E731
    assert shown == {name: plain(value) for name, value in dataclasses.asdict(d3s.SelectionOptions()).items()}


def pairs_of(names: str, defaults: str) -> list[tuple[str, str]]:
    words = [[word.strip().strip("`") for word in cell.split(",")] for cell in (names, defaults)]
    return list(zip(*words, strict=True))
