"""How the benchmarks judge a run: the machine's quiet, intervals, targets, and the page that shows them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("pytest_benchmark")
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import performance
import performance_picture as picture

from benchmarks import __main__ as run
from benchmarks import harness, judging, quiet, report, targets
from benchmarks.clock import ONE_CALL, Once, Ready
from benchmarks.harness import OURS
from benchmarks.timing import Timing

USUAL = quiet.Rates(30, 200)
SLOW = quiet.Rates(30, 160)

# ---- the machine's quiet ---------------------------------------------------------------------------------------------


def watch(*probes: quiet.Rates) -> quiet.Watch:
    """Sees these after the usual ones of its start, and then the last one for ever."""
    first = [USUAL] * (1 + quiet.FIRST)
    return quiet.Watch(iter([*first, *probes, *itertools.repeat(probes[-1], 1000)]).__next__)


class Counting:
    """A clock whose n-th round takes n seconds."""

    def __init__(self) -> None:
        self.rounds = itertools.count(1)

    def ready(self, work: Callable[[], Any]) -> Ready:
        return Ready(work, 1, "host")

    def time(self, work: Callable[[], Any], calls: int) -> float:
        return next(self.rounds)


def rounds_that_count(seen: quiet.Watch | None, fewest: int = 4) -> list[float]:
    turns, _ = harness.take_turns({OURS: print}, Counting(), 0, fewest, seen)
    return turns[OURS]


def test_disturbed_rounds_are_made_again() -> None:
    seen = watch(USUAL, USUAL, SLOW, USUAL, USUAL, USUAL)  # before the 1st round and after each
    assert rounds_that_count(seen) == [1, 4, 5, 6]  # the slow probe is that after the 2nd and before the 3rd
    assert (seen.dropped, seen.watched().lows) == (2, [USUAL] * 4)
    assert rounds_that_count(None) == [1, 2, 3, 4]


def test_rounds_are_made_again_at_most_as_often_as_they_count() -> None:
    seen = watch(SLOW)
    assert rounds_that_count(seen) == [5, 6, 7, 8]
    assert seen.dropped == 4
    judged = quiet.judge([seen.watched()], quiet.Rates())
    assert (judged.disturbed, judged.rounds, judged.quiet) == (4, 4, False)
    assert "was not quiet: around 4 of 4 rounds" in judged.said


def test_a_run_has_a_bound_too() -> None:
    seen = watch(SLOW)
    seen.start(4)
    assert seen.repeats(quiet.REPEAT_SECONDS / 2)
    assert seen.repeats(quiet.REPEAT_SECONDS / 2)
    assert not seen.repeats(1)


def test_a_level_that_rises_later_judges_earlier_rounds() -> None:
    fast = quiet.Rates(40, 200)
    seen = watch(*[USUAL] * 5, *[fast] * 30)
    rounds_that_count(seen)
    first = seen.watched()
    assert (first.dropped, first.level) == (0, USUAL)
    rounds_that_count(seen, fewest=20)
    both = [first, seen.watched()]
    assert both[1].level == fast
    judged = quiet.judge(both, quiet.Rates())
    assert judged.disturbed == 4 + both[1].lows.count(USUAL)
    assert quiet.judge(both[:1], quiet.Rates()).disturbed == 0


def test_a_few_fast_probes_are_no_level() -> None:
    seen = watch(*[quiet.Rates(90, 900)] * 2, USUAL)
    rounds_that_count(seen, 8)
    assert seen.level == USUAL


def test_a_level_never_falls() -> None:
    seen = watch(SLOW)
    for _ in range(400):
        seen.look()
    assert seen.level == USUAL


@pytest.mark.parametrize(("disturbed", "is_quiet"), [(2, True), (3, False)])
def test_a_quiet_run_has_few_disturbed_rounds(disturbed: int, is_quiet: bool) -> None:
    lows = [SLOW] * disturbed + [USUAL] * (20 - disturbed)
    judged = quiet.judge([quiet.Watched(lows, 0, USUAL)], quiet.Rates())
    assert judged.quiet is is_quiet


def test_a_machine_that_was_slow_throughout_is_told_by_earlier_results(tmp_path: Path) -> None:
    seen = [quiet.Watched([USUAL] * 6, 0, USUAL)]
    (tmp_path / "old.json").write_text(json.dumps({"machine": "a"}))  # from before there was a level
    assert quiet.earlier_level(tmp_path, "a") == quiet.Rates()
    for machine, factor in (("a", 1.25), ("b", 9.0)):
        faster = quiet.judge([quiet.Watched([], 0, quiet.Rates(30, 200 * factor))], quiet.Rates())
        (tmp_path / f"{machine}.json").write_text(json.dumps({"machine": machine, "quiet": faster.data()}))
    judged = quiet.judge(seen, quiet.earlier_level(tmp_path, "a"))
    assert judged.quiet
    assert judged.said.endswith("Its level of products is 20% lower than in an earlier run: it was slow throughout.")


def test_a_probe_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = quiet.Probe.__new__(quiet.Probe)
    probe.parts, probe.matrix, probe.threads = itertools.cycle(quiet.torch.ones(2, 8)), quiet.torch.ones(2, 2), 7
    asked: list[int] = []
    monkeypatch.setattr(quiet.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(quiet.torch, "set_num_threads", asked.append)
    assert min(probe()) > 0
    assert asked == [7, 1]


# ---- intervals and targets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(3, 13))
def test_an_interval_has_the_median_in_95_percent_of_cases(count: int) -> None:
    """Over all ways in which values may lie below (0) or above (1) their median; a narrower one has it too rarely."""
    found = judging.interval([float(value) for value in range(count)])
    if found is None:
        assert count < 6
        return
    rank = int(found[0])
    assert found == (rank, count - 1 - rank)

    def cover(rank: int) -> float:
        ways = [sorted(sides) for sides in itertools.product((0, 1), repeat=count)]
        return sum(sides[rank] == 0 and sides[count - 1 - rank] == 1 for sides in ways) / len(ways)

    assert cover(rank) >= 0.95 > cover(rank + 1)


def timings(ours: list[float], role: str = "peer", timed_by: str = "host", **others: list[float]) -> dict[str, Timing]:
    lists = {OURS: ours} | others
    return {
        name: Timing(
            "ours" if name == OURS else role, "4", median(times), 1, times, "host" if name == OURS else timed_by
        )
        for name, times in lists.items()
    }


AROUND_TWO = [1.9, 2.0, 2.0, 2.1, 2.2, 2.2]


@pytest.mark.parametrize(
    ("bound", "outcome"), [(1.8, "met"), (1.9, "met"), (2.0, "undecided"), (2.3, "missed"), (None, "reported")]
)
def test_a_target_within_the_interval_is_undecided(bound: float | None, outcome: str) -> None:
    judged = judging.Faster("", ("PyTorch",), bound).judge(timings([1.0] * 6, PyTorch=AROUND_TWO))
    assert (judged.value, judged.interval, judged.outcome) == (pytest.approx(2.05), (1.9, 2.2), outcome)
    inverse = {"missed": "met", "met": "missed"}.get(outcome, outcome)
    within = judging.Within("", "copy", bound and bound - 0.001).judge(timings(AROUND_TWO, copy=[1.0] * 6))
    assert within.outcome == inverse


def test_too_few_rounds_decide_nothing() -> None:
    judged = judging.Faster("", ("PyTorch",), 2).judge(timings([1.0] * 5, PyTorch=[9.0] * 5))
    assert (judged.interval, judged.outcome) == (None, "undecided")


def test_a_time_that_was_taken_once_may_be_off() -> None:
    rivals = timings([1.0] * 6, timed_by=ONE_CALL, slow=[10.0] * 6)
    found = judging.Within("", "slow", 0.11).judge(rivals)
    assert (found.value, found.outcome) == (0.1, "undecided")
    assert found.interval == pytest.approx((0.085, 0.1 / 0.85))
    assert harness.CpuClock().ready(Once(int)).timed_by == ONE_CALL
    assert report.between(rivals["slow"]) == "none"


# ---- AVX2 alone ------------------------------------------------------------------------------------------------------

LEVELS = {"simd_levels": ["baseline", "avx2", "avx512"]}


@pytest.mark.parametrize(("simd", "above"), [("baseline", False), ("avx2", False), ("avx512", True)])
def test_avx2_alone_is_a_target_of_better_machines(simd: str, above: bool) -> None:
    held = targets.targets_of("cpu", LEVELS | {"simd": simd})
    assert any(target.contest.endswith(targets.AVX2_ALONE) for target in held) is above
    assert not targets.above_avx2({"simd_levels": ["baseline"], "simd": "baseline"})


@pytest.mark.parametrize(
    ("short", "device", "above"), [(False, "cpu", True), (True, "cpu", True), (False, "cuda", True)]
)
def test_avx2_alone_runs_in_a_process_of_its_own(
    short: bool, device: str, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, dict[str, str]]] = []

    def child(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        ran.append((command[3], env))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of all others")
    monkeypatch.setattr(run.subprocess, "run", child)
    run.measure(Namespace(short=short, only=None, device=device, seconds=None), above)
    file, environment = ran[0]
    cache = environment.pop("TORCHINDUCTOR_CACHE_DIR")
    others = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    assert (file, environment) == (str(run.HERE), others | run.LARGE_PAGES)
    assert cache != "of all others"
    if short or device == "cuda":
        assert len(ran) == 1
        return
    file, environment = ran[1]
    assert file == str(run.HERE / "bench_avx2.py")
    assert environment.items() >= targets.AVX2_ENVIRONMENT.items()
    assert environment["TORCHINDUCTOR_CACHE_DIR"] not in ("of all others", cache)


# ---- the page and its picture ----------------------------------------------------------------------------------------


@pytest.fixture
def result(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A result as a run writes it, of made-up times of one contest."""
    rivals = timings([0.1] * 6, TRL=[0.2, 0.2, 0.3, 0.3, 0.4, 0.4], verl=[1.5] * 6)
    seen = quiet.judge([quiet.Watched([USUAL] * 6, 0, USUAL)], quiet.Rates())
    contests = {"logprob_entropy forward": rivals}
    facts = {
        "machine": "some-cpu", "device": "cpu", "date": "2000-01-01", "cpu": "Some CPU", "cores": 2, "threads": 2,
        "versions": {"torch": "9"}, "commit": "abc", "build_info": {"simd": "avx512"}, "quiet": seen.data(),
    }  # fmt: skip
    held = [targets.Faster("logprob_entropy forward", ("TRL",), bound) for bound in (2, 3, 5)]
    base = run.write(tmp_path, facts, "A title", "A caption", report.lines(contests, held), contests, {})
    return base, json.loads(base.with_suffix(".json").read_text())


def test_the_page_says_what_the_run_says(result: tuple[Path, dict[str, Any]]) -> None:
    base, found = result
    page = performance.page([(base.with_suffix(".json"), found)])
    assert "## Some CPU, 2 cores, 2000-01-01\n" in page
    assert "SIMD avx512" in page
    assert "The machine was quiet: around 0 of 6 rounds" in page
    assert "Of 3 targets: 1 met, 1 undecided, 1 missed." in page
    assert "| 100 ms | TRL: 300 ms | 3x as fast (2 to 4) | >= 3x as fast: **undecided** |" in page
    assert performance.NEVER_QUIET not in page


def test_the_page_says_first_that_no_run_was_quiet(result: tuple[Path, dict[str, Any]]) -> None:
    base, found = result
    noisy = found | {"quiet": found["quiet"] | {"quiet": False}}
    page = performance.page([(base, noisy)])
    assert page.startswith(performance.TITLE + performance.NEVER_QUIET)
    assert "2000-01-01, not quiet" in page
    assert performance.NEVER_QUIET not in performance.page([(base, noisy), (base, found)])


def test_the_picture_keeps_its_words(result: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, (_, found) = tmp_path / "some.png", result
    assert picture.words_in(file) is None
    picture.draw(file, "Some CPU", found)
    said = picture.words_in(file)
    assert said == picture.words("Some CPU", found)
    assert said.splitlines()[2:] == [
        "Log-probability and entropy: TRL: 3x [2.0, 4.0]",
        "Log-probability and entropy: verl: 15x [15.0, 15.0]",
    ]
    assert file.stat().st_size < picture.MOST_BYTES


def test_a_run_that_was_not_quiet_says_so_in_its_title() -> None:
    calm = quiet.judge([quiet.Watched([USUAL] * 6, 0, USUAL)], quiet.Rates())
    assert "quiet" not in run.title_of(Namespace(short=False), calm)
    assert run.title_of(Namespace(short=False), dataclasses.replace(calm, disturbed=1)).endswith("was not quiet")
    assert "quiet" not in run.title_of(Namespace(short=False), None)
