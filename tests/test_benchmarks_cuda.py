"""How the benchmarks time a GPU, tested with a fake GPU that finishes all work at once."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")
clock = pytest.importorskip("benchmarks.clock")
cuda_clock = pytest.importorskip("benchmarks.cuda_clock")
from benchmarks import harness, judging, report, timing  # noqa: E402

CACHE_BYTES = 4096


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Graph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


class Gpu(SimpleNamespace):
    mode = "default"

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    def nothing(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    stream = SimpleNamespace(wait_stream=nothing)
    made_up = Gpu(
        **dict.fromkeys(("stream", "graph", "_sleep", "synchronize", "reset_peak_memory_stats"), nothing),
        **dict.fromkeys(("Stream", "current_stream"), lambda: stream),
        Event=Event,
        CUDAGraph=Graph,
        graph_pool_handle=lambda: (0, 1),
        current_device=lambda: 0,
        memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 164,
        get_sync_debug_mode=lambda: "default",
        get_device_properties=lambda _: SimpleNamespace(L2_cache_size=CACHE_BYTES),
    )
    monkeypatch.setattr(cuda_clock, "torch", SimpleNamespace(cuda=made_up, Tensor=torch.Tensor))
    monkeypatch.setattr(cuda_clock, "gauge_of", lambda device: None)
    monkeypatch.setattr(cuda_clock, "TURN", 0.001)
    monkeypatch.setattr(cuda_clock.gc, "freeze", lambda: None)
    return made_up


@pytest.fixture
def cuda(gpu: Gpu):
    return cuda_clock.CudaClock(torch.device("cpu"))


@pytest.mark.parametrize(("values", "copies"), [(1, 1024), (512, 4), (2048, 1), (4096, 1)])
def test_small_inputs_rotate_through_twice_the_cache(cuda, values: int, copies: int) -> None:
    work = cuda.bind(lambda tensor: tensor, clock.copied(torch.randn(values)))
    seen = [work() for _ in range(2 * copies)]
    assert len({tensor.data_ptr() for tensor in seen}) == copies
    assert all(tensor.equal(seen[0]) for tensor in seen)


def test_short_work_is_replayed_as_a_graph_with_a_call_for_every_copy(cuda) -> None:
    ready = cuda.ready(cuda.bind(lambda tensor: tensor, clock.copied(torch.randn(1))))
    assert (ready.timed_by, ready.work.calls) == ("graph replay", 1024)
    before = ready.work.graph.replays
    cuda.time(ready.work, ready.calls)
    assert (ready.work.graph.replays - before) * ready.work.calls == ready.calls


def test_work_that_waits_for_the_gpu_is_not_recorded_and_other_errors_are_not_hidden(cuda, gpu: Gpu) -> None:
    def work() -> None:
        if gpu.mode == "error":
            raise RuntimeError(error)

    error = "called a synchronizing CUDA operation"
    ready = cuda.ready(work)
    assert (ready.work, ready.timed_by) == (work, clock.NOT_RECORDED)
    assert gpu.mode == "default"
    error = "out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda.ready(work)


def test_preparation_is_not_timed(cuda) -> None:
    def prepare() -> int:
        end = perf_counter() + 0.02
        while perf_counter() < end:
            pass
        return 3

    results = []
    ready = cuda.ready(clock.Prepared(prepare, results.append))
    assert (ready.calls, ready.timed_by) == (1, "events")
    assert cuda.time(ready.work, ready.calls) < 0.02
    assert set(results) == {3}
    assert cuda.peak_bytes(ready.work) == 64


# ---- the clock of a GPU ----------------------------------------------------------------------------------------------


def rounds(clocks: list[float | None]) -> harness.Turns:
    """The rounds of ours, always at 2,000 MHz, and of a peer at these clocks, then for ever at the last."""
    theirs = itertools.chain(clocks, itertools.repeat(clocks[-1]))
    now = SimpleNamespace()

    def time(work, calls: int) -> float:
        now.megahertz = 2_000.0 if work is report.OURS else next(theirs)
        return 1.0

    def reading() -> clock.Reading | None:
        return clock.Reading(now.megahertz, 500.0) if now.megahertz else None

    ready = {name: clock.Ready(name, 1, "events") for name in (report.OURS, "peer")}
    return harness.take_turns(ready, SimpleNamespace(time=time, reading=reading), 9, 6, 6)


@pytest.mark.parametrize(
    ("clocks", "again", "kept"),
    [
        ([1_941.0], 0, [1_941.0] * 6),
        ([2_000.0, 1_939.0, 1_900.0, 2_000.0], 2, [2_000.0] * 6),
        ([1_500.0], 6, [1_500.0] * 6),  # a GPU that cannot hold its clock ends too
        ([None], 0, None),
    ],
)
def test_a_round_with_differing_clocks_is_taken_again(clocks, again, kept, monkeypatch: pytest.MonkeyPatch) -> None:
    rested = []
    monkeypatch.setattr(harness, "sleep", rested.append)
    monkeypatch.setattr(harness.gc, "collect", lambda: None)  # it takes a while
    turns = rounds(clocks)
    assert turns.taken_again == again
    assert harness.known([read and read.megahertz for read in turns.readings["peer"]]) == kept
    assert bool(rested) is bool(again)
    assert {len(seconds) for seconds in turns.seconds.values()} == {6}


def at_clocks(*peers: float) -> dict[str, timing.Timing]:
    """Ours takes 1 s at 2,000 MHz. The peer takes 3 s at that clock, and 4 s at others."""
    seconds = [3.0 if peer == 2_000 else 4.0 for peer in peers]
    return {
        report.OURS: timing.Timing("ours", "4", 1, [1.0] * len(peers), megahertz=[2_000.0] * len(peers)),
        "all": timing.Timing("peer", "4", 1, seconds, megahertz=list(peers), watts=[700.0] * len(peers)),
    }


@pytest.mark.parametrize(
    ("clocks", "value", "outcome"),
    [
        ([2_000.0] * 6 + [1_700.0] * 7, 1 / 3, "met"),
        ([2_000.0] * 5 + [1_700.0] * 7, 1 / 3, "undecided"),
        ([1_700.0] * 12, 1 / 4, "undecided"),
    ],
)
def test_rounds_at_another_clock_do_not_decide_a_target_at_the_same_clock(clocks, value: float, outcome: str) -> None:
    rule, rivals = judging.RULES["cuda"], at_clocks(*clocks)
    judged = judging.Within("", "all", 0.34, same_clock=True).judge(rivals, rule)
    assert (judged.value, judged.outcome) == (pytest.approx(value), outcome)
    assert judging.Within("", "all", 0.34).judge(rivals, rule).outcome == "met"


def test_the_clocks_are_logged_and_told(tmp_path: Path) -> None:
    contests, file = {"a contest": at_clocks(1_700.0, 2_000.0, 2_000.0)}, tmp_path / "log"
    old = {"role": "ours", "size": "4", "calls_per_round": 1, "seconds": [1.0], "timed_by": "events", "peak_bytes": 7}
    timing.append(file, timing.contest_line("a contest", contests["a contest"], {}, None))
    timing.append(file, {"contest": "old", "contenders": {report.OURS: old}, "missing": {}, "commit": None})
    log = timing.read(file)
    assert log.contests["a contest"] == contests["a contest"]
    assert log.contests["old"][report.OURS].megahertz is None
    kept = report.data([], log.contests, judging.RULES["cuda"])["contests"]
    assert "median_megahertz" not in kept["old"][report.OURS]
    assert kept["a contest"]["all"].items() >= {
        "median_megahertz": 2_000, "megahertz_range": [1_700, 2_000], "median_watts": 700, "rounds_at_another_clock": 1
    }.items()  # fmt: skip
    assert report.other_clocks(log.contests) == ["CLOCKS more than 3% from ours, in rounds: a contest: all (1 of 3)"]
