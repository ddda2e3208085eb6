"""The table of faults matches the sources. tools/mutations.py shows which faults the tests detect."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from mutations import MUTANTS, mutants_in, problem_of


def test_a_fault_is_one_change_of_a_file_with_tests_that_are_there() -> None:
    assert [f"{mutant.name}: {problem}" for mutant in MUTANTS if (problem := problem_of(mutant))] == []
    assert all(mutant.new != mutant.old for mutant in MUTANTS)
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS}) >= 104


def test_a_change_that_does_not_fit_is_said() -> None:
    mutant = MUTANTS[0]
    assert problem_of(mutant._replace(old="no such text")) == f"{mutant.file}: has the old text 0 times; takes once"
    assert problem_of(mutant._replace(old=" ")) != problem_of(mutant)
    assert problem_of(mutant._replace(tests="tests/none.py -k 'any or other'")) == "tests: there is no tests/none.py"


def test_lines_and_what_is_left_out_are_read() -> None:
    table = "# x\n== a.h: tests/b.py -k c\none: two\n-   old\n-\n+ new\n\nthree\n- old\nall: tests/d.py\n"
    first, second = mutants_in(table)
    assert first == ("one: two", "a.h", "tests/b.py -k c", "  old\n", "new", "", "")
    assert second == ("three", "a.h", "tests/b.py -k c", "old", "", "tests/d.py", "")
