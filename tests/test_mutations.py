"""The table of faults matches the sources. tools/mutations.py shows which faults the tests detect."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from mutations import MUTANTS, problem_of


def test_a_fault_is_one_change_of_a_file_with_tests_that_are_there() -> None:
    assert [f"{mutant.name}: {problem}" for mutant in MUTANTS if (problem := problem_of(mutant))] == []
    assert all(mutant.new != mutant.old for mutant in MUTANTS)
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS}) >= 104
