"""What the learning example concludes from its runs, and what it refuses. CI runs the whole example, with --short."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
pytest.importorskip("trl")

from _learn_arms import arms  # noqa: E402
from _learn_report import LEVEL_READING, level_table  # noqa: E402
from _learn_reward import ends_in  # noqa: E402
from _learn_setting import Job, Point, Run  # noqa: E402
from _learn_statistics import Measure, measures, paired_difference, seconds_to, student_quantile  # noqa: E402


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=2e-3)


def test_differences_are_paired_and_judged_by_their_interval() -> None:
    theirs = [0.1, 0.5, 0.3, 0.9, 0.2]
    better = paired_difference([x + d for x, d in zip(theirs, (0.1, 0.12, 0.09, 0.11, 0.08), strict=True)], theirs)
    assert better.mean == pytest.approx(0.1)
    assert better.half_width == pytest.approx(2.776 * math.sqrt(0.00025 / 5), rel=1e-3)
    assert better.verdict == "better"
    assert paired_difference([0.2, 0.4, 0.4, 0.8, 0.25], theirs).verdict == "undecided"
    assert paired_difference([x - 0.1 - x / 50 for x in theirs], theirs).verdict == "worse"
    assert paired_difference([0.5], [0.1]).verdict == "one seed"


def test_measures_of_a_run() -> None:
    points = (
        Point(0, 0.2, 0, {"update": 0.0}),
        Point(10, 0.4, 100, {"update": 1.0, "generation": 1.0}),
        Point(20, 0.5, 400, {"update": 2.0, "generation": 2.0}),
    )
    found = measures(Run(Job("D3S", 1e-4, 0), points), time=3.0, tokens=50)
    assert found[Measure.END] == 0.5
    assert found[Measure.THROUGHOUT] == pytest.approx((0.3 + 0.45) / 2)
    assert found[Measure.AT_EQUAL_TIME] == pytest.approx(0.45)
    assert found[Measure.AT_EQUAL_TOKENS] == pytest.approx(0.3)


def test_time_to_a_level() -> None:
    rewards = (0.2, 0.4, 0.3, 0.5)
    run = Run(Job("D3S", 1e-4, 0), tuple(Point(10 * i, r, 0, {"update": 2.0 * i}) for i, r in enumerate(rewards)))
    assert seconds_to(run, 0.1) == 0
    assert seconds_to(run, 0.3) == pytest.approx(1)
    assert seconds_to(run, 0.4) == pytest.approx(2)  # the first time
    assert seconds_to(run, 0.45) == pytest.approx(5.5)
    assert seconds_to(run, 0.6) is None


def test_the_committed_report_has_the_times_of_its_curves() -> None:
    (path,) = (EXAMPLES / "results").glob("learning-*[0-9].csv")
    runs: dict[Job, list[Point]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            job = Job(row["arm"], float(row["learning_rate"]), int(row["seed"]))
            point = Point(int(row["step"]), float(row["held_out_reward"]), 0, {"all": float(row["seconds"])})
            runs.setdefault(job, []).append(point)
    report = path.with_suffix(".md").read_text(encoding="utf-8")
    assert level_table([Run(job, tuple(points)) for job, points in runs.items()]) in report
    assert LEVEL_READING in report


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("well work 7 8 1 5 = 0 8 5", "= 0 8 5", True),
        ("well guess = 0 8 6", "= 0 8 5", False),
        ("the answer is 85.", "85", True),
        ("the answer is 185", "85", False),
        ("85, or maybe 86", "85", False),
    ],
)
def test_the_reward_is_that_of_the_last_answer(completion: str, answer: str, right: bool) -> None:
    assert ends_in(completion, answer) == right


def test_arms_are_configurations_that_trl_takes(tmp_path: Path) -> None:
    from trl import GRPOConfig

    from d3s_kernels.integrations.trl import D3SConfig

    for arm in arms(16):
        kind = D3SConfig if arm.d3s else GRPOConfig
        config = kind(str(tmp_path), num_generations=16, per_device_train_batch_size=16, use_cpu=True, bf16=False,
                      **arm.options)  # fmt: skip
        assert not arm.d3s or config.loss_denominator == "all"  # the same in all arms
    assert [arm.name for arm in arms(16)] == [
        "GRPO", "PODS", "D3S-I", "D3S", "D3S, no schedule", "GSPO", "GSPO + D3S",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "."], "--model: needs --dataset too"),
        (["--dataset", "x.csv", "--model", "."], "--model: . has no config.json"),
        (["--group", "1"], "--group: got 1; takes a whole number of at least 2"),
        (["--learning-rates", "-1"], "--learning-rates: got -1; takes a number above 0"),
        (["--micro-batch", "7"], "--micro-batch: got 7; takes a divisor of 96"),
        (["--arms", "PPO"], "--arms: invalid choice: 'PPO'"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    script = str(EXAMPLES / "learn_more_with_less.py")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, cwd=EXAMPLES)
    assert done.returncode == 2
    assert message in done.stderr
