"""How the benchmarks time a GPU, tested with a fake GPU that finishes all work at once."""

from __future__ import annotations

import contextlib
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")
clock = pytest.importorskip("benchmarks.clock")
cuda_clock = pytest.importorskip("benchmarks.cuda_clock")
from benchmarks import judging, report, targets, timing  # noqa: E402

CACHE_BYTES = 4096


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = perf_counter()

    def synchronize(self) -> None:
        pass

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
    monkeypatch.setattr(cuda_clock, "TURN", 0.001)
    monkeypatch.setattr(cuda_clock.gc, "freeze", lambda: None)
    return made_up


@pytest.fixture
def cuda(gpu: Gpu):
    return cuda_clock.CudaClock(torch.device("cpu"))


@pytest.mark.parametrize(("values", "copies"), [(1, 512), (512, 4), (2048, 1), (4096, 1)])
def test_small_inputs_rotate_through_twice_the_cache(cuda, values: int, copies: int) -> None:
    work = cuda.bind(lambda tensor: tensor, (torch.randn(values),))
    seen = [work() for _ in range(2 * copies)]
    assert len({tensor.data_ptr() for tensor in seen}) == copies
    assert all(tensor.equal(seen[0]) for tensor in seen)


def test_short_work_is_replayed_as_a_graph_with_a_call_for_every_copy(cuda) -> None:
    ready = cuda.ready(cuda.bind(lambda tensor: tensor, (torch.randn(1),)))
    assert (ready.timed_by, ready.work.calls) == ("graph replay", 512)
    before = ready.work.graph.replays
    cuda.time(ready.work, ready.calls)
    assert (ready.work.graph.replays - before) * ready.work.calls == ready.calls


@pytest.mark.parametrize(("host", "timed_by"), [(0.0001, "events"), (0.002, "graph replay")])
def test_longer_work_is_replayed_where_the_gpu_waits_for_the_host(
    cuda, host: float, timed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_clock, "elapsed", lambda call, times: 0.003 * times)
    monkeypatch.setattr(cuda_clock, "host_seconds", lambda work: host)
    assert cuda.ready(print).timed_by == timed_by


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


def test_work_that_cannot_be_recorded_is_timed_by_events(cuda, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def graph(*_: object, **__: object):
        recording.append("begun")
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    recording = []
    monkeypatch.setattr(gpu, "graph", graph)
    private = SimpleNamespace(_cuda_endAllocateToPool=lambda device, pool: recording.append((device, pool)))
    monkeypatch.setattr(cuda_clock.torch, "_C", private, raising=False)
    with pytest.warns(UserWarning, match="timed by events: operation failed"):
        ready = cuda.ready(print)
    assert (ready.work, ready.timed_by, recording) == (print, clock.NOT_RECORDED, ["begun", (0, (0, 1))])


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


def test_work_that_is_slow_on_a_cpu_is_called_once_there_and_repeated_on_a_gpu(cuda) -> None:
    calls = []
    work = clock.Once(lambda: calls.append(perf_counter()))
    for device, repeated in ((clock.CpuClock(), False), (cuda, True)):
        ready = device.ready(work)
        times = {device.time(ready.work, ready.calls) for _ in range(3)}
        assert (len(times) > 1, len(calls) > 1) == (repeated, repeated)


def test_the_callers_clock_lets_the_gpu_finish_before_its_queue_is_full(gpu: Gpu, monkeypatch) -> None:
    events = []
    monkeypatch.setattr(gpu, "synchronize", lambda: events.append("wait"))
    assert cuda_clock.CallerClock().time(lambda: events.append("call"), 450) > 0
    assert events == ["wait", *["call"] * 200, "wait", *["call"] * 200, "wait", *["call"] * 50, "wait"]


def test_bandwidth_is_judged_by_that_of_the_same_run() -> None:
    rivals = {
        report.OURS: timing.Timing("ours", "4", 1, [1.0, 2.0, 4.0] * 2),
        "copy": timing.Timing("yardstick", "4", 1, [0.9, 1.9, 3.7] * 2),
    }
    share = judging.ShareOf("", "copy", 90).judge(rivals, judging.RULES["cuda"])
    assert (share.value, share.outcome) == (pytest.approx(92.5), "met")


def test_a_target_that_was_not_measured_is_told_in_a_whole_run() -> None:
    rule = judging.RULES["cuda"]
    absent = report.lines({}, targets.CUDA, rule, whole=True)
    assert [line.what for line in absent] == [target.contest for target in targets.CUDA]
    assert {line.outcome for line in absent} == {"not measured"}
    assert report.lines({}, targets.CUDA, rule) == []
