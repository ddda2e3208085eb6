"""One thread, or one for each core: whichever is faster here.

On a shared machine two threads can take longer than one. At the end of each product, each waits for the other, even
while the host has given one of the cores to somebody else.
"""

from __future__ import annotations

import time
from statistics import median

import torch

ROUNDS = 9
ROWS, WIDTH, WIDER = 512, 576, 1536  # the shapes of a product: some tokens, in a layer of SmolLM2


def take_the_faster() -> str:
    """Times a product with one thread and with torch's number of threads, keeps the faster, and says which it is."""
    most = torch.get_num_threads()
    if most == 1 or torch.cuda.is_available():
        return ""
    a, b = torch.rand(ROWS, WIDTH), torch.rand(WIDTH, WIDER)
    seconds: dict[int, list[float]] = {1: [], most: []}
    for _ in range(ROUNDS):
        for count, times in seconds.items():
            torch.set_num_threads(count)
            a @ b  # wakes the threads
            began = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - began)
    share = median(seconds[most]) / median(seconds[1])
    taken = most if share < 1 else 1
    torch.set_num_threads(taken)
    threads = f"{taken} threads" if taken > 1 else "one thread"
    return f"torch works with {threads}: {most} take {share:.2f} times as long as one for a product of matrices here."
