"""How the benchmarks judge a run: the machine's quiet, intervals, targets, and the page that shows them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("rich")
from benchmarks import __main__ as run
from benchmarks import clock, harness, judging, order, page, quiet, report, targets, timing
from benchmarks.harness import OURS
from benchmarks.sizes import sizes_for
from benchmarks.timing import Timing

USUAL = quiet.Rates(30, 200)
SLOW = quiet.Rates(30, 160)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its rounds a contest collects garbage, which takes a second where all of torch and TRL is imported."""
    monkeypatch.setattr(harness.gc, "collect", lambda: None)


# ---- rounds, and the machine's quiet ---------------------------------------------------------------------------------


def rounds_of(clocks: list[float | None], most: int = 6) -> harness.Turns:
    """The rounds of ours, always at 2,000 MHz, and of a peer at these clocks, then for ever at the last."""
    theirs = itertools.chain(clocks, itertools.repeat(clocks[-1]))
    now = SimpleNamespace()

    def time(work: str, calls: int) -> float:
        now.megahertz = 2_000.0 if work is OURS else next(theirs)
        return 1.0

    def reading() -> clock.Reading | None:
        return clock.Reading(now.megahertz, 500.0) if now.megahertz else None

    ready = {name: clock.Ready(name, 1, "events") for name in (OURS, "peer")}
    return harness.take_turns(ready, SimpleNamespace(time=time, reading=reading), 9, 6, most)


@pytest.mark.parametrize(
    ("clocks", "again", "kept"),
    [
        ([1_941.0], 0, [1_941.0] * 6),
        ([2_000.0, 1_939.0, 1_900.0, 2_000.0], 2, [2_000.0] * 6),
        ([1_500.0], 6, [1_500.0] * 6),  # a GPU that cannot hold its clock ends too
        ([None], 0, None),
    ],
)
def test_a_round_with_differing_clocks_is_taken_again(
    clocks: list[float | None], again: int, kept: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "sleep", lambda seconds: None)
    turns = rounds_of(clocks)
    assert turns.taken_again == again
    assert harness.known([read and read.megahertz for read in turns.readings["peer"]]) == kept
    assert {len(seconds) for seconds in turns.seconds.values()} == {6}


def test_a_contest_that_takes_too_long_keeps_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(rounds_of([None], most=9).seconds[OURS]) == 9
    monkeypatch.setattr(harness, "LONGEST", 0)
    assert len(rounds_of([None]).seconds[OURS]) == harness.FEWEST_ROUNDS


def test_a_quiet_run_has_few_low_probes() -> None:
    for low, is_quiet in ((2, True), (3, False)):
        judged = quiet.judge([[SLOW] * low + [USUAL] * (20 - low)], quiet.Rates())
        assert (judged.low, judged.probes, judged.quiet) == (low, 20, is_quiet)
        assert f"{low} of 20 probes between rounds were more than 15% below its level (reads 30.0" in judged.said


# ---- ranges, intervals and targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(6, 13))
def test_an_interval_has_the_median_in_95_percent_of_cases(count: int) -> None:
    """Over all ways in which values may lie below (0) or above (1) their median; a narrower one has it too rarely."""
    low, high = map(int, judging.interval([float(value) for value in range(count)]))
    assert high == count - 1 - low

    def cover(rank: int) -> float:
        ways = [sorted(sides) for sides in itertools.product((0, 1), repeat=count)]
        return sum(sides[rank] == 0 and sides[count - 1 - rank] == 1 for sides in ways) / len(ways)

    assert cover(low) >= 0.95 > cover(low + 1)


def timings(ours: list[float], role: str = "peer", timed_by: str = "host", **others: list[float]) -> dict[str, Timing]:
    lists = {OURS: ours} | others
    return {
        name: Timing("ours" if name == OURS else role, "4", 1, times, "host" if name == OURS else timed_by)
        for name, times in lists.items()
    }


CPU, GPU = judging.RULES["cpu"], judging.RULES["cuda"]
# Ours is disturbed in most rounds, and the peer in some. The fastest rounds of the three parts are 1, 1.25 and 1 of
# ours, and 2, 2 and 2.5 of the peer's.
DISTURBED = [9.0, 1.25, 9.0, 1.0, 9.0, 1.0, 9.0, 9.0, 9.0]
PEERS = [2.0, 2.0, 9.0, 9.0, 2.5, 2.5, 3.0, 9.0, 9.0]


Outcomes = dict[float | None, str]


def judged_by(rule: judging.Rule, ours: list[float], peers: list[float], outcomes: Outcomes) -> judging.Verdict:
    """Checks how each bound is judged: of how many times as fast ours is, and the other way round."""
    for bound, outcome in (outcomes | {None: "reported"}).items():
        judged = judging.Faster("", ("PyTorch",), bound).judge(timings(ours, PyTorch=peers), rule)
        within = judging.Within("", "copy", bound and bound - 0.001).judge(timings(peers, copy=ours), rule)
        inverse = {"missed": "met", "met": "missed"}.get(outcome, outcome)
        assert (judged.outcome, within.outcome) == (outcome, inverse), bound
    return judged


def test_a_cpu_is_judged_by_the_fastest_rounds() -> None:
    judged = judged_by(CPU, DISTURBED, PEERS, {1.5: "met", 1.6: "met", 2.0: "undecided", 2.6: "missed"})
    assert (judged.value, judged.interval, judged.by) == (2, (1.6, 2.5), "the fastest rounds")
    assert judged.median == pytest.approx(1.0)  # which would say that ours gains nothing


def test_a_gpu_is_judged_by_the_median() -> None:
    peers = [1.9, 2.0, 2.0, 2.1, 2.2, 2.2]
    judged = judged_by(GPU, [1.0] * 6, peers, {1.8: "met", 1.9: "met", 2.0: "undecided", 2.3: "missed"})
    assert (judged.value, judged.interval, judged.by) == (pytest.approx(2.05), (1.9, 2.2), "the medians")


def test_a_yardstick_that_is_missing_judges_nothing() -> None:
    rivals = timings([1.0] * 6)
    for target in (judging.Within("", "copy", 2), judging.ShareOf("", ("copy",), 90), judging.Faster("", ("copy",), 2)):
        judged = report.judge(target, rivals, CPU)
        assert (judged.outcome, judged.against) == ("not measured", "copy: missing here")


@pytest.mark.parametrize(("rule", "rounds"), [(CPU, 8), (GPU, 5)])
def test_too_few_rounds_decide_nothing(rule: judging.Rule, rounds: int) -> None:
    for count, interval, outcome in ((rounds, None, "undecided"), (rounds + 1, (9.0, 9.0), "met")):
        judged = judging.Faster("", ("PyTorch",), 2).judge(timings([1.0] * count, PyTorch=[9.0] * count), rule)
        assert (judged.interval, judged.outcome) == (interval, outcome)


@pytest.mark.parametrize(
    ("clocks", "value", "outcome"),
    [
        ([2_000.0] * 6 + [1_700.0] * 7, 1 / 3, "met"),
        ([2_000.0] * 5 + [1_700.0] * 7, 1 / 3, "undecided"),
        ([1_700.0] * 12, 1 / 4, "undecided"),
    ],
)
def test_rounds_at_another_clock_do_not_decide_a_target_at_the_same_clock(
    clocks: list[float], value: float, outcome: str
) -> None:
    """Ours takes 1 s at 2,000 MHz. The peer takes 3 s at that clock, and 4 s at others."""
    seconds = [3.0 if peer == 2_000 else 4.0 for peer in clocks]
    rivals = {
        OURS: Timing("ours", "4", 1, [1.0] * len(clocks), megahertz=[2_000.0] * len(clocks)),
        "all": Timing("peer", "4", 1, seconds, megahertz=clocks),
    }
    judged = judging.Within("", "all", 0.34, same_clock=True).judge(rivals, GPU)
    assert (judged.value, judged.outcome) == (pytest.approx(value), outcome)
    assert judging.Within("", "all", 0.34).judge(rivals, GPU).outcome == "met"


# ---- contests, and the log of those that have ended ------------------------------------------------------------------


def held(strict: bool, **peers: Callable[[], Any]) -> tuple[Any, ...]:
    """What a contest records, and what is wrong with it."""
    found: list[Any] = []
    contest = harness.Contest(lambda *line: found.extend(line), sizes_for("cuda", short=True), strict=strict)
    try:
        contest("a contest", "4", lambda: 1, peers=peers, yardsticks={"other": lambda: 2}, agree=same)
    except AssertionError as wrong:
        return *found, str(wrong)
    return *found, ""


def same(name: str, ours: int, theirs: int) -> None:
    assert ours == theirs, f"{name} differs"


def test_a_peer_that_fails_loses_no_contest() -> None:
    name, contenders, missing, wrong = held(strict=False, well=lambda: 1, broken=lambda: 1 / 0)
    assert (name, list(contenders), wrong) == ("a contest", [OURS, "well", "other"], "")
    assert missing == {"broken": "ZeroDivisionError: division by zero"}


def test_a_peer_that_is_wrong_fails_when_all_is_recorded() -> None:
    for strict, peer, why in ((True, lambda: 1 / 0, "division by zero"), (False, lambda: 2, "peer differs")):
        _, contenders, _, wrong = held(strict, peer=peer)
        assert list(contenders) == [OURS, "other"]
        assert why in wrong


def test_a_log_is_read_wherever_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "contests.jsonl"
    rivals = timings([1.0] * 6, TRL=[2.0] * 6)
    for line in (
        {"facts": {"machine": "some-gpu", "commit": "abc"}},
        {"began": "one"},
        timing.contest_line("a contest", rivals, {"Liger": "absent"}, "abc"),
        {"ended": "one", "outcome": "passed", "seconds": 1, "why": ""},
        {"began": "two"},
    ):
        timing.append(file, line)
    whole = file.read_bytes()
    with file.open("ab") as cut:
        cut.write(b'{"contest": "another", "conten')
    log = timing.read(file)
    assert log.contests == {"a contest": rivals}
    assert (log.missing, log.ended) == ({"a contest": {"Liger": "absent"}}, {"one": "passed"})
    assert log.failed == {"two": "it did not end"}
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        timing.read(file)


def test_the_order_of_a_gpu_names_tests_that_there_are() -> None:
    source = {path.name: path.read_text() for path in run.HERE.glob("bench_*.py")}
    for begin, _ in (*order.HEADLINES, *order.THEN, *order.LAST):
        file, _, test = begin.partition("::")
        assert f"def {test.partition('[')[0]}" in source[file], begin


@pytest.mark.slow("that every contest of a GPU runs, as far as a CPU can tell")
def test_every_contest_of_a_gpu_runs(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")  # of the extra bench
    command = [sys.executable, "-m", "benchmarks", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=run.HERE.parent, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    log = timing.read(tmp_path / "contests.jsonl")
    assert not log.failed
    reasons = {why for of in log.missing.values() for why in of.values()}
    assert all("active drivers" in why or "aten::mm.dtype" in why for why in reasons), reasons
    in_triton = {target.contest for target in targets.CUDA if target.contest.endswith(", in Triton")}
    assert {target.contest for target in targets.CUDA} - in_triton <= log.contests.keys()


# ---- the page --------------------------------------------------------------------------------------------------------

FORWARD, TRL = "logprob_entropy forward", "TRL's Triton kernel"
SAID = "All contenders ran on 2 threads: a short product took 9 ms on 1 and 5 ms on 2."


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result as a run writes it, of made-up times of one contest."""
    contests = {FORWARD: timings([0.1, 0.1, 0.1, 0.2] * 3, **{TRL: [0.2, 0.3, 0.4, 0.4] * 3}, verl=[1.5] * 12)}
    seen = quiet.judge([[USUAL] * 7], quiet.Rates())
    facts = {
        "machine": "some-cpu", "device": "cpu", "date": "2000-01-01", "cpu": "Some CPU", "cores": 2, "threads": 2,
        "versions": {"torch": "9"}, "commit": "abc", "build_info": {"simd": "avx512"}, "quiet": seen.data(),
        "threads_tried": {"said": SAID},
    }  # fmt: skip
    held = [targets.Faster(FORWARD, (TRL,), bound) for bound in (2, 3, 5)]
    base = run.write(tmp_path, facts | report.data(report.lines(contests, held, CPU), contests, CPU))
    return base.with_suffix(".json")


def test_the_page_says_what_the_run_says(result: Path) -> None:
    text = result.with_suffix(".md").read_text()
    assert text.startswith("# Some CPU, 2 cores, 2000-01-01\n")
    assert "SIMD avx512" in text
    assert f"{SAID} The machine was quiet: 0 of 7 probes" in text
    assert "Of 3 targets, judged by the fastest rounds: 1 met, 2 missed." in text
    ratio = "2x as fast (2 to 2; median 2.5) | >= 2x as fast: met |"
    assert f"| {FORWARD}, 4 | 100 ms | {TRL}: 200 ms (median 350) | {ratio}" in text
    assert f"| {FORWARD}, 4 | {TRL} | 200 ms | 350 ms (200 ms to 400 ms) | 12 |" in text
    assert "## Notes" not in text
    result.with_name(f"{result.stem}-notes.md").write_text("Some note.\n")
    assert "## Notes\n\nSome note.\n\n## Every contender" in page.page_of(result)
