"""Runs tasks in worker processes and reports their progress. If a run fails, the comparison ends with its traceback."""

from __future__ import annotations

import multiprocessing
import queue
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import _learn_quiet
from _learn_setting import Setting

Task = TypeVar("Task")
Result = TypeVar("Result")
# A function that runs in a worker: takes the setting, a task, and a function to call with numbers of finished steps.
Work = Callable[[Setting, Task, Callable[[int], None]], Result]

POLL = 0.2  # seconds


class Failed(Exception):
    """A run failed; the message names the run and has its traceback."""


class Workers:
    def __init__(self, setting: Setting) -> None:
        # Spawned, not forked: torch's threads and CUDA do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.setting = setting
        self.steps: multiprocessing.Queue[int] = context.Queue()
        self.pool = ProcessPoolExecutor(
            setting.jobs, mp_context=context, initializer=_start, initargs=(self.steps, setting.threads)
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def map(self, work: Work, tasks: Sequence[Task], stepped: Callable[[int], None]) -> list[Result]:
        """Results in the order of the tasks; calls `stepped` with the number of new steps of all of them."""
        futures = {self.pool.submit(_run, work, self.setting, task): task for task in tasks}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
            stepped(self._new_steps())
            for future in done:
                self._check(future, futures[future], pending)
        stepped(self._new_steps())
        return [future.result() for future in futures]

    def _check(self, future: Future, task: Any, pending: set[Future]) -> None:
        error = future.exception()
        if error is None:
            return
        for other in pending:
            other.cancel()
        raise Failed(f"{task} failed:\n{''.join(traceback.format_exception(error))}") from error

    def _new_steps(self) -> int:
        steps = 0
        while True:
            try:
                steps += self.steps.get_nowait()
            except queue.Empty:
                return steps


_steps: multiprocessing.Queue[int]  # of this worker; set by _start


def _start(steps: multiprocessing.Queue[int], threads: int) -> None:
    global _steps
    _steps = steps
    import torch

    torch.set_num_threads(threads)
    _learn_quiet.silence()


def _run(work: Work, setting: Setting, task: Any) -> Any:
    return work(setting, task, _steps.put)
