"""Finished runs, in a CSV file: a row for each evaluation. A run that is in the file is not made again."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .ledger import Counts
from .run import Job, Point

COLUMNS = ["arm", "rate", "seed", *Counts._fields, *Point._fields[1:]]


@dataclass(frozen=True)
class Run:
    job: Job
    points: Sequence[Point]


def append(path: Path, run: Run) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
        for point in run.points:
            passes = ("" if value is None else round(value, 6) for value in point[2:])
            writer.writerow([run.job.arm, run.job.rate, run.job.seed, *point.counts, point.positive, *passes])


def load(path: Path) -> list[Run]:
    """The runs of the file; none where there is no file."""
    if not path.exists():
        return []
    found: dict[Job, list[Point]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            counts = Counts(*(int(row[name]) for name in Counts._fields))
            passes = (float(row[name]) if row[name] else None for name in Point._fields[2:])
            job = Job(row["arm"], float(row["rate"]), int(row["seed"]))
            found.setdefault(job, []).append(Point(counts, int(row["positive"]), *passes))
    return [Run(job, points) for job, points in found.items()]
