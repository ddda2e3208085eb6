"""Clocks for a GPU. A clock records events around many calls, replays short calls as a CUDA graph, or times how long
the caller waits.

A GPU works asynchronously. So it first executes a pause, during which Python queues the calls. Without the pause, the
GPU would wait for Python while it is timed. A GPU's cache holds the data that were read last. So small inputs are
copied until all copies together are larger than the cache. While the GPU executes the calls, its clock and power are
read.
"""

import contextlib
import gc
import itertools
import math
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from .clock import NOT_RECORDED, CpuClock, Inputs, Prepared, Reading, Ready, Work
from .nvml import Gauge, gauge_of, middle, watched

TURN = 0.005  # seconds; a turn has several calls if one call takes less
# Two limits for the duration of a call, in seconds. A call below the first limit is timed as a graph, without the gaps
# between launches. A call between the limits is timed as a graph only if the GPU waits for Python. Longer calls are not
# timed as graphs, since a copy within the GPU takes a quarter longer in a graph (on an H100: 2.04 ms, not 1.65).
REPLAY_BELOW, HOST_BOUND_BELOW = 1e-3, 5e-3
PAUSE = 2_000_000  # cycles, about a millisecond, in which Python queues calls
MOST_COPIES = 1024
MOST_CALLS_IN_GRAPH = 512
MOST_CALLS_QUEUED = 200  # fewer launches than the driver's queue holds; a full queue makes the caller wait


class Rotating:
    """The same work, which uses its own inputs and further inputs one after the other. All inputs together are twice as
    large as the cache, so the inputs of the next call are never in the cache.
    """

    def __init__(self, work: Callable[..., Any], inputs: Inputs, cache_bytes: int) -> None:
        wanted = math.ceil(2 * cache_bytes / max(1, inputs.touched)) if inputs.further else 1
        self.work = work
        self.count = min(MOST_COPIES, max(1, wanted))
        every = [inputs.arguments, *(inputs.further(place) for place in range(1, self.count))]
        self.next = itertools.cycle(every).__next__

    def __call__(self) -> Any:
        return self.work(*self.next())


class Replay:
    """Several calls of a work, recorded as a CUDA graph."""

    def __init__(self, work: Work, calls: int) -> None:
        self.calls = calls
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()  # the set-up on a stream's first call cannot be recorded
        torch.cuda.current_stream().wait_stream(aside)
        self.graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(self.graph, pool=pool, stream=aside):
                for _ in range(calls):
                    work()
        except BaseException:
            end_recording(pool)
            raise

    def __call__(self) -> None:
        self.graph.replay()


def cuda_works() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def end_recording(pool: Any) -> None:
    """Does what torch leaves undone when a recording fails. Otherwise torch's allocator and its default generator would
    behave as if the recording never ended, and the generator would refuse to draw.
    """
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    with contextlib.suppress(Exception):
        fresh = torch.Generator("cuda").manual_seed(0)
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)


class CudaClock:
    def __init__(self, device: torch.device) -> None:
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.gauge = gauge_of(device)
        self.read: Reading | None = None
        gc.freeze()  # torch collects garbage before every recording; this makes it skip all imported objects

    def bind(self, work: Callable[..., Any], inputs: Inputs) -> Work:
        return Rotating(work, inputs, self.cache_bytes) if inputs.arguments else work

    def ready(self, work: Work) -> Ready:
        work()
        if isinstance(work, Prepared):
            self.time(work, 1)
            return Ready(work, 1, "events")
        took = self.time(work, 1)
        if took < TURN:
            took = self.time(work, 8) / 8
        calls = max(1, math.ceil(TURN / took))
        gaps = took < REPLAY_BELOW or (took < HOST_BOUND_BELOW and host_seconds(work) > took / 2)
        replay = self.recorded(work, calls) if gaps and not synchronises(work) else None
        if replay:
            self.time(replay, replay.calls)
            replays = math.ceil(TURN / self.time(replay, replay.calls))
            return Ready(replay, replays * replay.calls, "graph replay")
        self.time(work, calls)
        return Ready(work, calls, NOT_RECORDED if gaps else "events")

    def recorded(self, work: Work, calls: int) -> Replay | None:
        """The recording, or None if recording fails. It fails if the work waits for the GPU in a way that torch does
        not see. Events then time the work.
        """
        try:
            return Replay(work, max(copies(work), min(calls, MOST_CALLS_IN_GRAPH)))
        except RuntimeError as problem:
            if not cuda_works():
                raise
            warnings.warn(f"it cannot be recorded, and is timed by events: {problem}", stacklevel=2)
            return None

    def works(self) -> bool:
        return cuda_works()

    def time(self, work: Work, calls: int) -> float:
        call, times = work, calls
        if isinstance(work, Prepared):
            made = work.prepare()

            def call() -> None:
                work.work(made)

        elif isinstance(work, Replay):
            times = calls // work.calls
        seconds, self.read = elapsed(call, times, self.gauge)
        return seconds

    def reading(self) -> Reading | None:
        return self.read

    def peak_bytes(self, work: Work) -> int | None:
        made = work.prepare() if isinstance(work, Prepared) else None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _ = work.work(made) if isinstance(work, Prepared) else work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class CallerClock(CpuClock):
    """The time until a call returns. Waiting for the GPU, before and after, is not timed."""

    def works(self) -> bool:
        return cuda_works()

    def ready(self, work: Work) -> Ready:
        work()
        return Ready(work, min(MOST_CALLS_QUEUED, self.calls_per_turn(work)), "caller")

    def time(self, work: Work, calls: int) -> float:
        seconds = 0.0
        for queued in chunks(calls):
            torch.cuda.synchronize()
            seconds += super().time(work, queued)
        torch.cuda.synchronize()
        return seconds


def elapsed(call: Work, times: int, gauge: Gauge | None = None) -> tuple[float, Reading | None]:
    """The seconds that these calls take on the GPU, and what the gauge reads during the calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with watched(gauge, start) as found:
        torch.cuda._sleep(PAUSE)
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3, middle(found)


def host_seconds(work: Work) -> float:
    """The seconds until a call returns."""
    torch.cuda.synchronize()
    start = perf_counter()
    work()
    return perf_counter() - start


def synchronises(work: Work) -> bool:
    """Whether the work synchronises with the host, so that it cannot be recorded. This is tested in advance, because a
    failed recording leaves torch's allocator in a bad state.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as problem:
        if "synchroniz" not in str(problem):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def copies(work: Work) -> int:
    return work.count if isinstance(work, Rotating) else 1


def chunks(calls: int) -> list[int]:
    full, rest = divmod(calls, MOST_CALLS_QUEUED)
    return [MOST_CALLS_QUEUED] * full + [rest] * bool(rest)
