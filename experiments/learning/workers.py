"""Runs tasks in processes of their own, several at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch
import transformers

from .setting import Setting

Task = TypeVar("Task")
Result = TypeVar("Result")


def results(
    setting: Setting, work: Callable[[Setting, Task], Result], tasks: Sequence[Task]
) -> Iterator[tuple[Task, Result]]:
    """Each task with what ``work`` made of it, in the order in which they end. The first error ends all."""
    if not tasks:
        return
    # Spawned, not forked: torch's threads and CUDA do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(setting.jobs, context, begin, (setting.threads,)) as pool:
        futures = {pool.submit(work, setting, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def begin(threads: int) -> None:
    """The number of threads is the same in every run, because sums depend on it."""
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
