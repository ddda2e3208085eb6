"""The window between the worker's queue and TRL's batcher, from which rollouts are chosen.

A worker puts samples into a queue. A sample is one sequence that TRL trains on. A rollout is a conversation; it has
several samples if the tokens of its turns do not make one sequence.
"""

from __future__ import annotations

import copy
import queue
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ...selection.metrics import LATE_SAMPLES

STALE = "sample/dropped_stale_total"  # TRL's counter of the samples that its own rule drops


class Rollout:
    """One conversation. ``kept`` and ``advantage`` are set by the choice."""

    def __init__(self, sample: Any) -> None:
        self.group: Hashable = sample.group_id
        self.samples: dict[int, Any] = {}  # by their numbers, in the order in which all samples came
        self.first = sample
        self.kept, self.advantage = False, float(sample.advantage)
        self._given = self.advantage

    def has_part(self, sample: Any) -> bool:
        """Returns whether ``sample`` belongs to this conversation. Only a conversation of several messages has several
        samples: their messages and advantages are equal, their tokens differ. Equal messages alone are not enough,
        since a parser may have removed the difference between two conversations.
        """
        return (
            len(sample.completion) > 1
            and sample.advantage == self._given
            and sample.completion == self.first.completion
            and sample.prompt == self.first.prompt
            and not any(np.array_equal(sample.input_ids, own.input_ids) for own in self.samples.values())
        )


class RolloutWindow:
    """Replaces the worker's queue. ``get`` returns the samples of kept rollouts, in the order in which they came.

    Rollouts are chosen when the number of whole groups reaches the number of groups of a window. A group that is not
    whole at this moment takes part in the next choice, whole or not. A window ends early in two cases, so that no
    rollout waits for ever: there are four times as many rollouts as in a window, or no sample has come for ``patience``
    seconds. A sample that comes after the choice is kept if its rollout was kept, and dropped if its rollout was
    dropped. A rollout that comes after the choice from its group waits for the next choice.

    Args:
        incoming: the worker's queue.
        group_size: the number of rollouts of a whole group.
        number_of_groups: returns how many groups a window has now.
        is_stale: whether a sample is too old, by TRL's rule.
        choose: sets ``kept`` and ``advantage`` of rollouts.
        prepared: returns a sample of a kept rollout in the form in which TRL trains on it.
        metrics: the trainer's metrics, by name.
    """

    def __init__(
        self, incoming: Any, group_size: int, patience: float, *, number_of_groups: Callable[[], int],
        is_stale: Callable[[Any], bool], choose: Callable[[list[Rollout]], None],
        prepared: Callable[[Rollout, Any], Any], metrics: dict[str, list[Any]],
    ) -> None:  # fmt: skip
        self._incoming, self._group_size, self._patience = incoming, group_size, patience
        self._number_of_groups, self._is_stale, self._choose = number_of_groups, is_stale, choose
        self._prepared, self._metrics = prepared, metrics
        self._waiting: dict[Hashable, list[Rollout]] = {}
        self._waited: set[Hashable] = set()  # the groups that were waiting at the last choice
        self._chosen: dict[Hashable, list[Rollout]] = {}  # the rollouts of the groups in the latest choices
        self._ready: deque[Any] = deque()
        self._number, self._last_arrival = 0, time.monotonic()  # how many samples have come, and when

    def qsize(self) -> int:
        """Returns the number of samples that were not handed on yet."""
        waiting = [len(rollout.samples) for rollouts in self._waiting.values() for rollout in rollouts]
        return int(self._incoming.qsize()) + sum(waiting) + len(self._ready)

    def get(self, timeout: float) -> Any:
        """Returns the next sample of a kept rollout. Raises ``queue.Empty`` if there is none after ``timeout`` seconds;
        TRL then checks whether the worker is alive.
        """
        end = time.monotonic() + timeout
        while not self._ready:
            until = min(end, self._last_arrival + self._patience) if self._waiting else end
            try:
                self._add(self._incoming.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                if self._waiting and time.monotonic() >= self._last_arrival + self._patience:
                    self._close(everything=True)
                elif time.monotonic() >= end:
                    raise
            else:
                if not self._ready and time.monotonic() >= end:  # perhaps all samples that come are stale
                    raise queue.Empty
        return self._ready.popleft()

    def _add(self, sample: Any) -> None:
        self._last_arrival, self._number = time.monotonic(), self._number + 1
        if self._drop_if_stale(sample):
            return
        sample = copy.copy(sample)
        chosen, waiting = self._chosen.get(sample.group_id, []), self._waiting.get(sample.group_id, [])
        rollout = next((each for each in reversed(chosen + waiting) if each.has_part(sample)), None)
        if rollout is None:
            rollout = Rollout(sample)
            self._waiting.setdefault(sample.group_id, []).append(rollout)
        rollout.samples[self._number] = sample
        if any(rollout is each for each in chosen):
            self._metrics[LATE_SAMPLES].append(1.0)
            self._ready.extend([self._prepared(rollout, sample)] if rollout.kept else [])
            return
        sizes, number = [len(rollouts) for rollouts in self._waiting.values()], self._number_of_groups()
        if sum(size >= self._group_size for size in sizes) >= number:
            self._close()
        elif sum(sizes) >= 4 * number * self._group_size:
            self._close(everything=True)

    def _drop_if_stale(self, sample: Any) -> bool:
        stale = self._is_stale(sample)
        if stale:
            self._metrics[STALE].append(1.0)
        return stale

    def _close(self, everything: bool = False) -> None:
        """Chooses from the groups that are whole, have waited before, or were chosen from before. With ``everything``,
        chooses from all groups.
        """
        labels = [
            label
            for label, rollouts in self._waiting.items()
            if everything or label in self._waited or label in self._chosen or len(rollouts) >= self._group_size
        ]
        rollouts = [rollout for label in labels for rollout in self._waiting.pop(label)]
        self._waited = set(self._waiting)
        for rollout in rollouts:  # the policy may have changed since a sample came
            rollout.samples = {place: one for place, one in rollout.samples.items() if not self._drop_if_stale(one)}
        rollouts = [rollout for rollout in rollouts if rollout.samples]
        if not rollouts:
            return
        self._choose(rollouts)
        kept = {place: rollout for rollout in rollouts if rollout.kept for place in rollout.samples}
        self._ready.extend(self._prepared(kept[place], kept[place].samples[place]) for place in sorted(kept))
        for rollout in rollouts:
            self._chosen.setdefault(rollout.group, []).append(rollout)
        while len(self._chosen) > 4 * self._number_of_groups():
            del self._chosen[next(iter(self._chosen))]
