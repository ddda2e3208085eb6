"""Processes that compute together, as the ranks of a group on this machine.

A task is a function of a module beside this one, ``task(ranks, *arguments)``. Every process of a world runs it. Tests
share worlds, because starting one takes seconds. A world in which a task fails or hangs is ended, and the next test
that asks for it gets a new one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from helpers import EVERYTHING

from d3s_kernels._collectives import Ranks as Ranks
from d3s_kernels._collectives import ranks_of

SIZES = (2, 3, 4) if EVERYTHING else (2, 3)
_TIMEOUT = 120.0  # seconds, for a task
_AFTER_A_FAILURE = 5.0
PRELOADED = ["d3s_kernels.distributed", "torch._dynamo", "hypothesis", "pytest"]  # a folder of tests may add to it


def _serve(rank: int, size: int, folder: str, calls: Connection, seconds: float, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    assert dist.group.WORLD is not None
    ranks = ranks_of(dist.group.WORLD)
    while True:
        try:
            task, arguments, environment = calls.recv()
        except EOFError:  # the tests are over
            # Without the interpreter's shutdown: gloo's threads may still want to free objects that Python holds.
            os._exit(0)
        os.environ.update(environment)
        try:
            calls.send((True, task(ranks, *arguments)))
        except Exception as error:
            calls.send((False, (error, traceback.format_exc())))
        for name in environment:
            del os.environ[name]


class World:
    """``size`` processes that wait for tasks."""

    def __init__(self, size: int, seconds: float = _TIMEOUT, backend: str = "gloo") -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        # Forked from a server that has imported torch once and has no threads: a new world takes a tenth of a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.calls, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = rank, size, self._folder.name, there, seconds, backend
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.calls.append(here)
            self.processes.append(process)

    def run(self, task: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
        """What the task returns on each rank. Raises if a rank raises or does not answer."""
        results = self.outcomes(task, *arguments, **environment)
        for result in results:
            if isinstance(result, Exception):
                self.end()
                raise result
        return results

    def outcomes(self, task: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
        """What the task returns or raises on each rank."""
        for calls in self.calls:
            calls.send((task, arguments, environment))
        results: dict[int, Any] = {}
        broken = False
        while len(results) < self.size:
            # After one rank fails, others may wait for it in a collective.
            waiting = [calls for rank, calls in enumerate(self.calls) if rank not in results]
            ready = wait(waiting, _AFTER_A_FAILURE if broken else _TIMEOUT)
            if not ready:
                break
            for rank in (self.calls.index(calls) for calls in ready):
                good, result = self.calls[rank].recv()
                if not good:
                    result, trace = result
                    if hasattr(result, "add_note"):  # from Python 3.11 on
                        result.add_note(f"on rank {rank} of {self.size}:\n{trace}")
                    broken |= type(result) not in (ValueError, TypeError)
                results[rank] = result
        missing = set(range(self.size)) - results.keys()
        if broken or missing:
            self.end()  # some ranks may still be in a collective
        if missing and not broken:
            raise TimeoutError(f"ranks {sorted(missing)} of {self.size} do not answer")
        return [results.get(rank) for rank in range(self.size)]

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        world.cache_clear()
        self._folder.cleanup()


@cache
def world(size: int) -> World:
    return World(size)


def assert_all_refuse(task: Callable[..., Any], *of: Any, bad: Any, said: str, good: Any = None) -> None:
    """Two ranks that are both given something bad refuse it before anything is sent, so none waits. If one of them is
    given it, and the ranks are asked to check, both say so. ``task(ranks, *of, each)`` calls with ``each[rank]``.
    """
    for error in world(2).outcomes(task, *of, [bad, bad]):
        assert isinstance(error, TypeError | ValueError), error
        assert str(error).startswith(said)
    if good is not None:
        first, second = world(2).outcomes(task, *of, [good, bad], D3S_KERNELS_CHECK="1")
        assert (type(first), str(first)) == (type(second), str(second))
        assert str(first).startswith(said)
        assert str(first).endswith(" (on rank 1 of 2)")


def assert_told_apart(task: Callable[..., Any], *of: Any, good: Any, other: Any, said: str) -> None:
    """What differs between two ranks that are asked to check is refused by both in the same words."""
    first, second = world(2).outcomes(task, *of, [good, other], D3S_KERNELS_CHECK="1")
    assert [type(first), type(second)] == [ValueError, ValueError]
    assert str(first) == str(second)
    assert str(first).startswith(said)


def on_ranks(*sizes: int, **environment: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a task: all ranks run it, in worlds of these sizes. The test has the task's name behind `test_`.
    The task keeps its own, by which the other processes find it.
    """

    def made(task: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("size", sizes)
        def test(size: int) -> None:
            world(size).run(task, **environment)

        test.__doc__ = task.__doc__
        setattr(sys.modules[task.__module__], f"test_{task.__name__}", test)
        return task

    return made
