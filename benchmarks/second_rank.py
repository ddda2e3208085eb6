"""A second process that does what this one does: the two ranks of a gloo group, with one thread each."""

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
    os._exit(0)  # not by way of the interpreter's end: there gloo's threads may still want to free what Python holds


@contextmanager
def with_second_rank(make: Make, *arguments: Any) -> Iterator[Works]:
    """What rank 0 can do; whatever it is, rank 1 is told to do the same."""
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
