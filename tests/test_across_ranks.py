"""Every choice over the ranks of a process group: each rank gets its part of what one process with everything gets.

The table draws the arguments; cases/parts.py divides them. What is refused, what is sent and what draws at random is in
the files of the subjects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest import mock

import pytest
import torch
from cases import rollouts, tokens
from cases.draw import Draw
from cases.parts import divided
from cases.row import Arguments
from cases.table import FUNCTIONS
from helpers import assert_identical, rounds
from ranks import SIZES, Ranks, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels._rules.rules import ROLLOUT_RULES, TOKEN_RULES
from d3s_kernels.check.compare import moved
from d3s_kernels.distributed import rollouts as rollouts_of_ranks
from d3s_kernels.distributed import tokens as tokens_of_ranks

CPU = torch.device("cpu")
SEEDS = rounds(100)  # for each function and number of ranks
# "random" depends on the ranks, and TRL's quantile is that of one process.
OF_TOKENS = [rule for rule in TOKEN_RULES if rule not in ("random", "entropy_quantile")]
OF_ROLLOUTS = [rule for rule in ROLLOUT_RULES if rule != "random"]
# The results that have one number for each value. Others have one for each segment, or one for all.
OF_VALUES = {"mask", "entropy", "weight", "advantages"}
# Functions whose ranks may have a piece of every segment; the others are told how many values there may be.
PIECES = {"topk_mask", "select_tokens", "random_prefixes"}
NAMES = [*sorted(PIECES), "group_advantages", "max_variance_select", "select_rollouts", "variance_mass"]


def drawn(name: str, draw: Draw) -> Arguments:
    if name == "select_tokens":
        return tokens.token_rules(draw, draw.choice(OF_TOKENS))
    if name == "select_rollouts":
        return rollouts.rollout_rules(draw, draw.choice(OF_ROLLOUTS))
    return FUNCTIONS[name].draw(draw)


@contextmanager
def every_path(number: int) -> Iterator[None]:
    """In half of the rounds counts are summed as for many ranks, and the host does not know values, as on a GPU."""
    few = tokens_of_ranks.FEW_RANKS if number % 4 < 2 else 1
    known = mock.patch.object(rollouts_of_ranks, "_is_at_hand", return_value=number % 2 == 0)
    with mock.patch.object(tokens_of_ranks, "FEW_RANKS", few), known:
        yield


def called(name: str, given: Arguments) -> tuple[Any, ...]:
    found = getattr(d3s, name)(**moved(given, CPU))
    return (found,) if isinstance(found, Tensor) else tuple(found)


def same_as_one_process(ranks: Ranks, name: str, seeds: list[int]) -> None:
    for number, seed in enumerate(seeds):
        draw = Draw(seed)
        values = next(iter(signature(getattr(d3s, name)).parameters))
        whole, of_ranks, parts = divided(draw, drawn(name, draw), values, ranks.size, name in PIECES)
        across = of_ranks[ranks.rank] | {"process_group": ranks.group}
        if "scope" in whole and parts.options[0].get("placement") == "pieces":
            whole["scope"] = across["scope"] = "sequence"  # in a pool, the order of ties is that of the ranks
        if name not in PIECES and (more := draw.choice((None, 0, 1, 17))) is not None:
            groups = sum(part.numel() for part in parts.segments) if name == "variance_mass" else 0
            across["max_rollouts"] = more + max(1, groups, *(part.numel() for part in parts.values))
        try:
            expected = called(name, whole)
            with every_path(number):
                found = called(name, across)
            for output, one, other in zip(FUNCTIONS[name].results, found, expected, strict=True):
                if other is None or other.dim() == 0:
                    wanted = other
                else:
                    wanted = (parts.of_values if output in OF_VALUES else parts.of_segments)(other, ranks.rank)
                assert (one is None) == (wanted is None)
                if wanted is not None:
                    assert_identical(one, wanted)
        except Exception as error:
            raise AssertionError(f"{name}, Draw({seed}), {parts.options[ranks.rank]}: {error}") from error


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_each_rank_has_its_part_of_the_whole(name: str, size: int) -> None:
    """Some worlds check that the ranks' arguments agree, and find that they do."""
    seeds = torch.randint(2**31, (SEEDS,)).tolist()
    world(size).run(same_as_one_process, name, seeds, D3S_KERNELS_CHECK=str(size % 2))


def random_keeps_as_many(ranks: Ranks, seeds: list[int]) -> None:
    """Every rank draws with a generator of its own."""
    for seed in seeds:
        draw = Draw(seed)
        given = rollouts.rollout_rules(draw, "random")
        whole, of_ranks, _ = divided(draw, given, "advantages", ranks.size, pieces=False)
        own = of_ranks[ranks.rank] | {"generator": torch.Generator().manual_seed(seed + ranks.rank)}
        (found,) = called("select_rollouts", own | {"process_group": ranks.group})
        (expected,) = called("select_rollouts", whole)
        usable = own["advantages"].isfinite() if own["mask"] is None else own["advantages"].isfinite() & own["mask"]
        assert not (found & ~usable).any(), seed
        assert ranks.gather_number(int(found.sum()), found).sum() == expected.sum(), seed


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_draw_keep_as_many_as_one_process(size: int) -> None:
    world(size).run(random_keeps_as_many, torch.randint(2**31, (SEEDS,)).tolist())
