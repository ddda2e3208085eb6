"""The table of faults matches the sources. tools/mutations.py shows which faults the tests detect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
sys.path.insert(0, str(TOOLS))

from mutants import MUTANTS, Mutant  # noqa: E402
from mutations import problem_of  # noqa: E402


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_one_change_of_a_file_with_tests_that_are_there(mutant: Mutant) -> None:
    assert problem_of(mutant) is None
    assert mutant.new != mutant.old


def test_there_are_forty_or_more_each_with_a_name() -> None:
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS}) >= 40


def test_a_change_that_does_not_fit_is_said() -> None:
    mutant = MUTANTS[0]
    assert problem_of(mutant._replace(old="no such text")) == f"{mutant.file}: has the old text 0 times; takes once"
    assert problem_of(mutant._replace(old=" ")) != problem_of(mutant)
    assert problem_of(mutant._replace(tests="tests/none.py -k 'any or other'")) == "tests: there is no tests/none.py"
