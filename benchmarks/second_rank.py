"""A second process that mirrors the calls of this process. Both processes are ranks of a gloo group, with one thread
each.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

Works = dict[str, Callable[[], Any]]
Make = Callable[..., Works]  # make(rank, group, *arguments): the same names on both ranks


def _join(rank: int, store: str) -> dist.ProcessGroup:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _follow(store: str, calls: Connection, make: Make, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    works = make(1, _join(1, store), *arguments)
    while (name := calls.recv()) is not None:
        works[name]()
    os._exit(0)  # skips the interpreter's shutdown, during which gloo's threads may still free Python objects


@contextmanager
def with_second_rank(make: Make, *arguments: Any) -> Iterator[Works]:
    """The works of rank 0, by name; each call also runs the same work on rank 1."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        second = context.Process(target=_follow, args=(store, there, make, arguments), daemon=True)
        second.start()
        torch.set_num_threads(1)
        try:
            works = make(0, _join(0, store), *arguments)

            def on_both(name: str) -> Callable[[], Any]:
                def work() -> Any:
                    here.send(name)
                    return works[name]()

                return work

            yield {name: on_both(name) for name in works}
        finally:
            here.send(None)
            second.join(30)
            dist.destroy_process_group()
            torch.set_num_threads(threads)
