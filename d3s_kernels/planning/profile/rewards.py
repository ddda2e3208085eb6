"""Reward functions, called as TRL calls them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import TrainerState

from .queries import Row
from .records import Record

_OWN = {"prompt", "completion", "completion_ids"}  # columns that TRL does not pass on


def load_reward(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ValueError(f"reward: got {name!r}; takes 'module:function' or 'file.py:function'")
    found = getattr(_module_of_file(Path(place)) if place.endswith(".py") else _module(place), function, None)
    if not callable(found):
        raise ValueError(f"reward: {place} has no function {function}")
    result: Callable[..., Any] = found
    return result


def score(reward: Callable[..., Any], row: Row, completions: Sequence[Any], ids: Sequence[list[int]]) -> list[float]:
    """The reward of each completion of a query; NaN where it is None, which in TRL means unscorable."""
    count = len(completions)
    columns = {name: [value] * count for name, value in row.items() if name not in _OWN}
    rewards = reward(
        prompts=[row["prompt"]] * count,
        completions=list(completions),
        completion_ids=list(ids),
        **columns,
        trainer_state=TrainerState(),  # as before the first step
        log_extra=_log_nothing,
        log_metric=_log_nothing,
    )
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(_awaited(rewards))
    rewards = [math.nan if reward is None else float(reward) for reward in rewards]
    if len(rewards) != count:
        raise ValueError(f"reward: gave {len(rewards)} rewards; takes one for each of {count} completions")
    return rewards


def to_record(index: int, rewards: Sequence[float], threshold: float) -> Record:
    """The record of a query, from the rewards of its completions."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    mean = math.fsum(scored) / len(scored) if scored else None
    return Record(index, sum(reward >= threshold for reward in scored), len(scored), mean)


def _log_nothing(*_: object, **__: object) -> None:
    """Replaces the logging functions that TRL passes to reward functions."""


async def _awaited(rewards: Any) -> Any:
    return await rewards


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise  # the module exists, but one of its own imports is missing
        raise ValueError(f"reward: there is no module {name}") from None


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # since the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours, like a script
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
