"""The CSV files: one row for each evaluation of each run."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from _learn_setting import Run


def save_curves(path: Path, runs: Iterable[Run]) -> None:
    with path.open("w", newline="") as file:
        writer = None
        for run in runs:
            for point in run.points:
                row = {
                    "arm": run.job.arm,
                    "learning_rate": run.job.learning_rate,
                    "seed": run.job.seed,
                    "step": point.step,
                    "held_out_reward": round(point.reward, 6),
                    "tokens_in_loss": point.tokens,
                    "seconds": round(point.total, 4),
                    **{f"seconds_{phase.replace(' ', '_')}": round(t, 4) for phase, t in point.seconds.items()},
                }
                if writer is None:
                    writer = csv.DictWriter(file, row)
                    writer.writeheader()
                writer.writerow(row)
