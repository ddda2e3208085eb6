"""The scripts of examples/ that run on a CPU run unchanged. (For verl: tests/verl/test_verl_example.py.)"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed_by(script: str, folder: Path, *options: str) -> list[str]:
    """The lines that the script prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        for name in ("OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE", "TRANSFORMERS_VERBOSITY"):
            patch.setenv(name, "")  # so that what a script sets ends with the script
            patch.delenv(name)
        patch.syspath_prepend(EXAMPLES)  # as Python does for a script
        patch.setattr(sys, "argv", [script, *options])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue().splitlines()


def rows_of(script: str, folder: Path, *options: str) -> list[list[str]]:
    """The rows below the head of the table that the script prints."""
    lines = printed_by(script, folder, *options)
    head = next(place for place, line in enumerate(lines) if line.split()[:2] == ["step", "reward"])
    return [line.split() for line in lines[head + 1 :]]


def test_a_loop_of_ones_own_learns(tmp_path: Path) -> None:
    first, *_, last = rows_of("own_loop.py", tmp_path, "--steps", "24")
    assert float(first[1]) < 0.2
    assert float(last[1]) > 0.25
    assert (first[2:], last[2], last[4]) == (["4/16", "100%", "20%"], "12/16", "50%")
    assert "100%" != last[3] != "0%"  # the engine has older weights


def test_a_student_learns_as_much_from_the_largest_as_from_all(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    *_, before, after = printed_by("distill.py", tmp_path, "--steps", "4")
    (all_before, largest_before), (all_after, largest_after) = (map(float, row.split()[-2:]) for row in (before, after))
    assert all_before == largest_before  # the same weights
    assert all_after < 0.6 * all_before
    assert largest_after < 1.3 * all_after


def test_trls_example_follows_its_schedule(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL")
    steps = rows_of("trl_d3s.py", tmp_path, "--steps", "5")
    assert [row[0] for row in steps] == ["1", "2", "3", "4", "5"]
    kept, shares = ([float(row[place]) for row in steps] for place in (2, 3))
    assert kept == sorted(kept)
    assert shares == sorted(shares)
    assert kept[0] == 4 * 4  # of four prompts


@pytest.mark.slow("the thread that generates, beside the one that trains")
def test_asynchronous_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16", reason="TRL has prefix trees from 1.16 on")
    *steps, generated, waited = rows_of("async_trl_d3s.py", tmp_path, "--steps", "40")
    assert [row[0] for row in steps] == ["8", "16", "24", "32", "40"]
    assert all(row[2] == "25%" for row in steps)
    assert float(steps[-1][1]) > float(steps[0][1])
    assert int(generated[1]) >= 4 * int(generated[5]) == 4 * 40 * 32
    assert all(float(seconds) >= 0 for seconds in (waited[1], waited[6], waited[12]))
