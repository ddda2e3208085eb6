"""Reads pytest-benchmark's results as contests and their contenders."""

import json
from dataclasses import dataclass
from pathlib import Path

from .quiet import Watched

Contenders = dict[str, "Timing"]


@dataclass(frozen=True)
class Timing:
    role: str  # ours, peer or yardstick
    size: str
    median: float
    calls_per_round: int
    seconds: list[float]  # of one call, round by round
    timed_by: str = "host"
    peak_bytes: int | None = None  # beyond what was allocated before the call
    watched: Watched | None = None  # the same for all contenders; None where no probe watches

    def over(self, other: "Timing") -> list[float]:
        """The ratio to another contender of the same contest, for each round."""
        return [mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True)]


def read(path: Path) -> dict[str, Contenders]:
    contests: dict[str, Contenders] = {}
    recorded = ("role", "size", "timed_by", "peak_bytes")
    for row in json.loads(path.read_text())["benchmarks"]:
        stats, facts = row["stats"], row["extra_info"]
        contests.setdefault(row["group"], {})[row["name"]] = Timing(
            median=stats["median"],
            calls_per_round=stats["iterations"],
            seconds=stats["data"],
            watched=facts["watched"] and Watched.read(facts["watched"]),
            **{name: facts[name] for name in recorded},
        )
    return contests
