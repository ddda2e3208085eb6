"""Measures time and peak memory of verl's fused LM head with two back-ends, in turns: our ``d3s`` and verl's ``torch``.

    .venv/verl-0.9.1/bin/python -m benchmarks.verl_head

The micro-batch has packed rows: each is a prompt followed by a response. An update keeps a share of the response
tokens. verl's back-end computes all positions. Our back-end computes only the positions whose results are read. Both
are called as verl's models call them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
import verl  # loads the plug-in, which registers our back-end
from torch import Tensor
from verl.utils.experimental.torch_functional import FusedLinearForPPO

from benchmarks import machine
from benchmarks.memory import growth
from d3s_kernels.integrations.verl import head

MIB = 1 << 20


class MicroBatch:
    """Hidden states of packed rows and the head's weight, of a model of 0.5 B parameters."""

    def __init__(self, rows: int, prompt: int, response: int, kept: float, width: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        positions = rows * (prompt + response)
        self.hidden = torch.randn(1, positions, width, generator=generator, requires_grad=True)
        self.weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5 * 3).requires_grad_()
        self.labels = torch.randint(vocabulary, (1, positions), generator=generator)
        read = torch.zeros(rows, prompt + response, dtype=torch.bool)
        read[:, prompt - 1 : -1] = True
        self.read = read.flatten()
        self.in_loss = self.read & (torch.rand(positions, generator=generator) < kept)

    def log_probs(self, backend: str) -> Tensor:
        """The pass that gives old log-probabilities and entropies."""
        with torch.no_grad():
            return self._outputs(backend, self.read)[0]

    def update(self, backend: str) -> Tensor:
        """Forward and backward of a loss that reads the kept tokens."""
        log_probs, _ = self._outputs(backend, self.in_loss)
        (log_probs.flatten() * self.in_loss).sum().backward()
        return log_probs

    def forget(self) -> None:
        """Frees the gradients of the last update."""
        self.hidden.grad = self.weight.grad = None

    def _outputs(self, backend: str, mask: Tensor) -> tuple[Tensor, Tensor]:
        ours = backend == head.BACKEND
        token = head._READ.set(head.Read(mask) if ours else None)
        outputs: tuple[Tensor, Tensor] = FusedLinearForPPO(impl_backend=backend)(
            self.hidden, self.weight, self.labels, temperature=0.8
        )
        head._READ.reset(token)
        return outputs


def compared(batch: MicroBatch, step: Callable[[str], Tensor], rounds: int) -> str:
    times: dict[str, list[float]] = {"torch": [], "d3s": []}
    peaks = {}
    for _ in range(rounds):
        for backend, of_backend in times.items():
            batch.forget()
            start = perf_counter()
            step(backend)
            of_backend.append(perf_counter() - start)
    for backend in times:
        batch.forget()
        peaks[backend] = growth(partial(step, backend)) / MIB
    medians = {backend: statistics.median(of_backend) for backend, of_backend in times.items()}
    return (
        f"{medians['torch']:8.2f} s {medians['d3s']:8.2f} s {medians['torch'] / medians['d3s']:8.1f} x"
        f"{peaks['torch']:12.0f} MiB {peaks['d3s']:8.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for option, default in {"rows": 4, "prompt": 64, "response": 128, "width": 896, "vocabulary": 151_936}.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--kept", type=float, default=0.2, help="the share of tokens that an update keeps")
    parser.add_argument("--rounds", type=int, default=3)
    given = vars(parser.parse_args())
    rounds = given.pop("rounds")
    print(machine.cpu_model(), "torch", torch.__version__, "verl", verl.__version__, "commit", machine.commit(), given)
    batch = MicroBatch(**given)
    print(f"{'':24}verl's torch      ours      ratio     peak of verl's     ours")
    for name, step in (("old log-probabilities", batch.log_probs), ("update", batch.update)):
        print(f"{name:24}{compared(batch, step, rounds)}")


if __name__ == "__main__":
    main()
