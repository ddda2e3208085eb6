"""Compares an installed trainer with what its hooks assume: ``python -m d3s_kernels.integrations.check slime``.

It prints a line for each assumption. The exit status is 0 if all hold, 1 if something differs, and 2 if the trainer is
not installed. A new trainer is one more table in :data:`TABLES`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ._assumptions import Assumption, difference, is_installed
from .nemo_rl.table import NEMO_RL
from .openrlhf import TABLE as OPENRLHF
from .prime_rl import TABLE as PRIME_RL
from .slime.table import MILES, SLIME

TABLES = {table.package: table for table in (SLIME, MILES, NEMO_RL, OPENRLHF, PRIME_RL)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m d3s_kernels.integrations.check", description=__doc__)
    parser.add_argument("trainer", choices=TABLES)
    table = TABLES[parser.parse_args(arguments).trainer]
    read_at = f"read in {table.repository} at {table.commit}, {table.date}"
    if not is_installed(table.package):
        print(f"{table.package} is not installed. These would be checked, as {read_at}:")
        print(*(f"- {assumption}: {assumption.why}" for assumption in table.assumptions), sep="\n")
        return 2
    print(f"{table.package}: {len(table.assumptions)} assumptions, {read_at}")
    results = [line_of(assumption) for assumption in table.assumptions]
    print(*(line for line, _ in results), sep="\n")
    return int(any(differs for _, differs in results))


def line_of(assumption: Assumption) -> tuple[str, bool]:
    """The line to print, and whether the trainer differs."""
    if not is_installed(assumption.place):
        return f"unknown: {assumption}: {assumption.place.split('.')[0]} is not installed", False
    found = difference(assumption)
    if found is None:
        return f"holds: {assumption}", False
    return f"differs: {assumption}: found {found}; it is for {assumption.why}", True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
