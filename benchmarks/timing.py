"""The log of a run: JSON lines, each written immediately and in one piece, so that finished contests are never lost.

- `facts`: facts about the machine, at the start of each process that measures; if two lines differ, the first counts;
- `began`: a test that began; `ended`: a test that ended, with its outcome and seconds;
- `contest`: a contest with its contenders, the missing contenders and why they are missing, and the commit;
- `probe`: how fast the machine was between two rounds (quiet.py);
- `poisoned`: a contest, and the contender after whose error CUDA no longer worked in its process.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .quiet import Rates

Contenders = dict[str, "Timing"]
SAME_CLOCK = 0.03  # two clocks count as the same if they differ by at most this share


@dataclass(frozen=True)
class Timing:
    role: str  # ours, peer or yardstick
    size: str
    calls_per_round: int
    seconds: list[float]  # of one call, round by round
    timed_by: str = "host"
    peak_bytes: int | None = None  # beyond what was allocated before the call
    megahertz: list[float] | None = None  # of a GPU's multiprocessors, round by round; None where they are not known
    watts: list[float] | None = None
    rounds_taken_again: int = 0  # rounds of the contest that do not count, since its contenders' clocks differed
    did: str = ""  # what the work did, if it says so: rows, columns and tokens, which explain the time

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def fastest(self) -> float:
        return min(self.seconds)


def same_clock(one: float, other: float) -> bool:
    """Whether times at these two clocks can be compared."""
    return abs(one / other - 1) <= SAME_CLOCK


def at_another_clock(timing: Timing, other: Timing) -> list[bool]:
    """For each round, whether the clocks of two contenders differed; all False if the clocks are not known."""
    if timing.megahertz is None or other.megahertz is None:
        return [False] * len(timing.seconds)
    return [not same_clock(*clocks) for clocks in zip(timing.megahertz, other.megahertz, strict=True)]


@dataclass
class Log:
    """The contents of a log. A contest that was measured again has its latest times."""

    facts: dict[str, Any] = field(default_factory=dict)
    contests: dict[str, Contenders] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)
    began: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    poisoned: list[tuple[str, str]] = field(default_factory=list)
    probes: list[list[Rates]] = field(default_factory=list)  # one list for each process, whose instructions may differ

    @property
    def failed(self) -> dict[str, str]:
        """The tests that failed, or never ended, and why."""
        found = {test: self.why[test] for test, outcome in self.ended.items() if outcome == "failed"}
        return found | {test: "it did not end" for test in self.began if test not in self.ended}


def append(path: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line, default=str) + "\n"
    with path.open("ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text  # after a line that was cut off
        file.write(text.encode())


def contest_line(name: str, contenders: Contenders, missing: dict[str, str], commit: str | None) -> dict[str, Any]:
    kept = {which: asdict(timing) for which, timing in contenders.items()}
    return {"contest": name, "contenders": kept, "missing": missing, "commit": commit}


def read(*paths: Path) -> Log:
    log, commits = Log(), dict[str, None]()
    for text in (text for path in paths if path.exists() for text in path.read_text().splitlines()):
        try:
            line = json.loads(text)
        except ValueError:  # cut off by a kill
            continue
        if "facts" in line:
            log.facts = line["facts"] | log.facts
            log.probes.append([])
        elif "began" in line:
            log.began.append(line["began"])
            log.ended.pop(line["began"], None)
        elif "ended" in line:
            test = line["ended"]
            log.ended[test], log.seconds[test], log.why[test] = line["outcome"], line["seconds"], line["why"]
        elif "contest" in line:
            log.contests[line["contest"]] = {name: Timing(**row) for name, row in line["contenders"].items()}
            log.missing[line["contest"]] = line["missing"]
            commits |= {line["commit"]: None} if line["commit"] else {}
        elif "probe" in line:
            log.probes[-1].append(Rates(*line["probe"]))
        elif "poisoned" in line:
            log.poisoned.append(tuple(line["poisoned"]))
    if commits:  # something may have been fixed between two calls
        log.facts["commit"] = ", ".join(commits)
    return log
