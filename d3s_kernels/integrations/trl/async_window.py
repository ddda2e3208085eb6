"""The window between the worker's queue and TRL's batcher, from which rollouts are chosen.

A worker puts samples into a queue. A sample is what TRL trains on as one sequence. A conversation of several turns is
one rollout; it becomes several samples if its tokens cannot be one sequence. This module collects samples until they
make whole groups, lets the trainer choose the rollouts, and hands on the samples of the kept ones.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from ...metrics import LATE_SAMPLES

STALE = "sample/dropped_stale_total"  # TRL's counter of the samples that its own rule drops


class Rollout:
    """One conversation, with its samples in the order in which they came."""

    def __init__(self, sample: Any, place: int) -> None:
        self.group: Hashable = sample.group_id
        self.samples, self.places = [sample], [place]
        self.kept = False  # this and the next two are set by the choice
        self.advantage = float(sample.advantage)
        self.unshared: list[Tensor] | None = None  # for each sample, its tokens that may be chosen; None: all

    def has_part(self, sample: Any) -> bool:
        """Returns whether ``sample`` is of this conversation too. Only a conversation of several messages has several
        samples. They have the same messages and differ in their tokens; equal tokens are of an equal conversation.
        """
        first = self.samples[0]
        return (
            len(sample.completion) > 1
            and sample.completion == first.completion
            and sample.prompt == first.prompt
            and not any(np.array_equal(sample.input_ids, own.input_ids) for own in self.samples)
        )

    def add(self, sample: Any, place: int) -> None:
        self.samples.append(sample)
        self.places.append(place)

    def remove_samples(self, are_unwanted: Callable[[Any], bool]) -> bool:
        """Removes samples, and returns whether any is left."""
        left = [pair for pair in zip(self.samples, self.places, strict=True) if not are_unwanted(pair[0])]
        self.samples, self.places = [sample for sample, _ in left], [place for _, place in left]
        return bool(left)


class RolloutWindow:
    """Takes the place of the worker's queue. ``get`` returns the samples of kept rollouts, in the order in which they
    came.

    Rollouts are chosen as soon as ``groups`` groups are whole. A group that is not whole then waits for the next
    choice, and takes part in it whether it is whole or not. Two things end a window early, so that nothing waits for
    ever: four times as many rollouts as a window has, and no sample for ``patience`` seconds. A sample that comes after
    its rollout was chosen or dropped shares the fate of its rollout.

    Args:
        samples: the worker's queue.
        groups: the number of groups of a window.
        group_size: the number of rollouts of a group.
        patience: in seconds.
        is_stale: TRL's rule: whether a sample is too old.
        choose: sets ``kept`` of each rollout that it gets.
        prepared: returns the samples of kept rollouts as they are trained on, in the order of their rollouts.
        metrics: the trainer's metrics, by name.
    """

    def __init__(
        self,
        samples: Any,
        groups: int,
        group_size: int,
        patience: float,
        *,
        is_stale: Callable[[Any], bool],
        choose: Callable[[list[Rollout]], None],
        prepared: Callable[[list[Rollout]], Iterable[Any]],
        metrics: dict[str, list[Any]],
    ) -> None:
        self._samples, self._groups, self._group_size, self._patience = samples, groups, group_size, patience
        self._is_stale, self._choose, self._prepared, self._metrics = is_stale, choose, prepared, metrics
        self._waiting: dict[Hashable, list[Rollout]] = {}
        self._waited: set[Hashable] = set()  # the groups that were waiting at the last choice
        self._chosen: dict[Hashable, list[Rollout]] = {}  # the rollouts of the groups that were chosen from last
        self._ready: deque[Any] = deque()
        self._arrived, self._last_arrival = 0, time.monotonic()

    def qsize(self) -> int:
        """Returns the number of samples that were not handed on yet."""
        waiting = sum(len(rollout.samples) for rollouts in self._waiting.values() for rollout in rollouts)
        return int(self._samples.qsize()) + waiting + len(self._ready)

    def get(self, timeout: float) -> Any:
        """Returns the next sample of a kept rollout. Raises ``queue.Empty`` if there is none after ``timeout`` seconds,
        so that TRL can check whether the worker is alive.
        """
        end = time.monotonic() + timeout
        while not self._ready:
            if self._is_full():
                self._close()
                continue
            now = time.monotonic()
            patient_until = self._last_arrival + self._patience if self._waiting else end
            try:
                self._add(self._samples.get(timeout=max(0.0, min(end, patient_until) - now)))
            except queue.Empty:
                if self._waiting and time.monotonic() >= patient_until:
                    self._close(with_parts=True)
                elif time.monotonic() >= end:
                    raise
            else:
                if not self._ready and time.monotonic() >= end:  # all that comes may be stale
                    raise queue.Empty
        return self._ready.popleft()

    def _is_full(self) -> bool:
        sizes = [len(rollouts) for rollouts in self._waiting.values()]
        whole = sum(size >= self._group_size for size in sizes)
        return whole >= self._groups or sum(sizes) >= 4 * self._groups * self._group_size

    def _add(self, sample: Any) -> None:
        self._last_arrival = time.monotonic()
        self._arrived += 1
        if self._drop_if_stale(sample):
            return
        for rollout in reversed(self._chosen.get(sample.group_id, [])):
            if rollout.has_part(sample):
                self._metrics[LATE_SAMPLES].append(1.0)
                late = Rollout(sample, self._arrived)
                late.kept, late.advantage = rollout.kept, rollout.advantage
                rollout.add(sample, self._arrived)
                self._ready.extend(self._prepared([late]) if late.kept else ())
                return
        rollouts = self._waiting.setdefault(sample.group_id, [])
        for rollout in reversed(rollouts):
            if rollout.has_part(sample):
                rollout.add(sample, self._arrived)
                return
        rollouts.append(Rollout(sample, self._arrived))

    def _drop_if_stale(self, sample: Any) -> bool:
        stale = self._is_stale(sample)
        if stale:
            self._metrics[STALE].append(1.0)
        return stale

    def _close(self, with_parts: bool = False) -> None:
        """Chooses from the groups that are whole, and from those that waited before. ``with_parts``: from all."""
        whole = {label for label, rollouts in self._waiting.items() if len(rollouts) >= self._group_size}
        labels = self._waited | whole
        if with_parts or len(whole) < self._groups:
            labels = set(self._waiting)
        groups = {label: self._waiting.pop(label) for label in list(self._waiting) if label in labels}
        self._waited = set(self._waiting)
        rollouts = [
            rollout
            for rollouts in groups.values()
            for rollout in rollouts
            if rollout.remove_samples(self._drop_if_stale)  # the policy may be newer than when they came
        ]
        if not rollouts:
            return
        self._choose(rollouts)
        kept = [rollout for rollout in rollouts if rollout.kept]
        places = [place for rollout in kept for place in rollout.places]
        in_order = sorted(zip(places, self._prepared(kept), strict=True), key=lambda pair: pair[0])
        self._ready.extend(sample for _, sample in in_order)
        for rollout in rollouts:
            self._chosen.setdefault(rollout.group, []).append(rollout)
        while len(self._chosen) > 4 * self._groups:
            del self._chosen[next(iter(self._chosen))]
