"""Serves the queries of a plan to a trainer, phase after phase, and can continue from a checkpoint."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from .._arguments.checks import require_flag, whole_number
from .plan import RolloutPlan, shuffled


class PlanSampler(Sampler[int]):
    """A sampler for a DataLoader. The sampler serves the queries of a :class:`RolloutPlan` phase after phase, and
    shuffles them in each epoch.

    One pass is the whole curriculum: the queries of phase 0, ``epochs`` times, then the queries of phase 1, and so on.
    The order depends only on ``seed``, phase and epoch, and is the same on every machine. A pass begins at the first
    row, or, after ``load_state_dict``, at the saved row. If the saved row is the end of a pass, the next pass has no
    rows.

    With ``batch_size``, no batch contains rows of two phases, and no row is dropped: the last batch of a phase is
    filled with the first queries of further epochs. These queries are served more often than the others.

    **The position of a pass**, which ``state_dict()`` saves, is the number of rows that the pass has served.
    torchdata's StatefulDataLoader (used by verl) saves the position of the batch that the trainer has. A plain
    DataLoader with workers reads up to ``num_workers * prefetch_factor`` batches ahead of the trainer; accelerate's
    loader reads one batch ahead. With the last two loaders, ``state_dict()``, ``phase`` and ``group_size`` are ahead of
    the trainer too. A trainer that knows how many rows it has consumed can tell the sampler:
    ``state_dict(consumed=rows)``, ``phase_at(row)``. A trainer that skips consumed rows itself, like the trainer of
    transformers, needs no state.

    Args:
        plan: a plan with at least one phase.
        epochs: the number of epochs of a phase, at least 1: either one number for all phases, or one for each phase.
        seed: any whole number.
        repeat: whether to serve each query ``group_size`` times before the next query, for trainers that take one row
            per rollout. TRL's RepeatSampler repeats queries in the same way.
        batch_size: the number of rows in a batch of the loader. With ``repeat``, it must be a multiple of each phase's
            group size.

    Attributes:
        starts: the index of each phase's first row. If phase 0 has converged, a trainer can begin the next pass at
            phase 1: ``sampler.load_state_dict(sampler.state_dict(sampler.starts[1]))``.

    Raises:
        ValueError, TypeError: the plan has no phase; epochs, seed, repeat or batch_size has a bad value; a loaded state
            was saved with another plan or other arguments.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> plan = d3s.plan_rollouts(torch.tensor([2, 3, 4, 1]), 8)
        >>> sampler = d3s.PlanSampler(plan, repeat=True)
        >>> list(sampler)
        [2, 2, 1, 1, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3]
        >>> sampler.starts, sampler.phase_at(4), sampler.group_size
        ((0, 4, 8), 1, 8)
    """

    def __init__(
        self,
        plan: RolloutPlan[Any],
        *,
        epochs: int | Sequence[int] = 1,
        seed: int = 0,
        repeat: bool = False,
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(plan, RolloutPlan):
            raise TypeError(f"plan: got {type(plan).__name__}; takes what plan_rollouts returns")
        if not plan.phase_sizes:
            raise ValueError("plan: has no phase, as no query is solved without being trivial; takes at least one")
        require_flag("repeat", repeat)
        phases = len(plan.phase_sizes)
        epochs = tuple(epochs) if isinstance(epochs, Sequence) else (epochs,) * phases
        if len(epochs) != phases:
            raise ValueError(f"epochs: got {len(epochs)} numbers; takes one, or one for each of the {phases} phases")
        self.plan, self.seed, self.repeat = plan, whole_number("seed", seed), repeat
        self.epochs = tuple(whole_number("epochs", number, at_least=1) for number in epochs)
        self._repeats = plan.phase_sizes if repeat else (1,) * phases  # how often a query is served before the next
        if batch_size is None:
            batch_size = 1  # a batch of one row never mixes phases
        else:
            batch_size = whole_number("batch_size", batch_size, at_least=1)
            for size in self._repeats:
                if batch_size % size:
                    raise ValueError(
                        f"batch_size: got {batch_size}; takes a multiple of the group size {size}: repeat is on"
                    )
        self.batch_size = batch_size

        self._queries: list[Tensor] = [torch.as_tensor(plan.queries(phase)).cpu() for phase in range(phases)]
        rows = [
            -(-number * len(queries) * repeats // batch_size) * batch_size  # rounded up to whole batches
            for number, queries, repeats in zip(self.epochs, self._queries, self._repeats, strict=True)
        ]
        self._ends = list(accumulate(rows))
        self.starts = (0, *self._ends[:-1])
        lists = [queries.tolist() for queries in self._queries]
        self._identity = {  # the order depends on these values, so a loaded state must have the same values
            "plan": hashlib.sha256(repr((plan.phase_sizes, lists)).encode()).hexdigest()[:16],
            "epochs": list(self.epochs),
            "seed": self.seed,
            "repeat": repeat,
            "batch_size": batch_size,
        }
        self._position = 0
        self._continues = False

    def __len__(self) -> int:
        """Returns the number of rows of a complete pass, even if the next pass begins in the middle."""
        return self._ends[-1]

    def __iter__(self) -> Iterator[int]:
        if not self._continues:
            self._position = 0
        return self._serve(self._position)

    @property
    def phase(self) -> int:
        """The phase of the latest served row, or of the first row if no row was served yet."""
        return self.phase_at(max(self._position - 1, 0))

    @property
    def group_size(self) -> int:
        """The number of rollouts of each query in ``phase``."""
        return self.plan.phase_sizes[self.phase]

    def phase_at(self, row: int) -> int:
        """Returns the phase of the row with the index ``row`` in a pass."""
        row = whole_number("row", row)
        if not 0 <= row < len(self):
            raise ValueError(f"row: got {row}; takes 0 to {len(self) - 1}")
        return bisect_right(self.starts, row) - 1

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the pass. If the loader reads ahead, set ``consumed`` to the number of rows that the
        trainer has consumed. The state then has this number instead of the number of served rows.
        """
        position = self._position if consumed is None else whole_number("consumed", consumed)
        if not 0 <= position <= len(self):
            raise ValueError(f"consumed: got {consumed}; takes 0 to {len(self)}")
        return {"position": position, **self._identity}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next pass continue at the position saved in ``state_dict``."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: got {type(state_dict).__name__}; takes what state_dict() returned")
        if missing := {"position", *self._identity} - set(state_dict):
            raise ValueError(f"state_dict: lacks {', '.join(sorted(missing))}; takes what state_dict() returned")
        for name, value in self._identity.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"state_dict: was saved with {name} {state_dict[name]!r}; takes that of this sampler, {value!r}"
                )
        position = state_dict["position"]
        if type(position) is not int or not 0 <= position <= len(self):
            raise ValueError(f"state_dict: got position {position!r}; takes 0 to {len(self)}")
        self._position, self._continues = position, True

    def _serve(self, row: int) -> Iterator[int]:
        """Yields the queries of the rows from ``row`` on."""
        self._continues = False  # not before the first row is read: loaders also make iterators that they never read
        for phase, (begin, end) in enumerate(zip(self.starts, self._ends, strict=True)):
            queries, repeats = self._queries[phase], self._repeats[phase]
            while row < end:
                epoch, skipped = divmod(row - begin, len(queries) * repeats)
                order = queries[shuffled(len(queries), self.seed, phase, epoch)].repeat_interleave(repeats)
                for query in order[skipped : skipped + end - row].tolist():
                    row += 1
                    self._position = row
                    yield query
