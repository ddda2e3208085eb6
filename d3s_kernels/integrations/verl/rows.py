"""Finds the rows of each rollout in verl's batch, and computes how many rows form an update. Does not import verl."""

from __future__ import annotations

from collections.abc import Sequence


def sessions(keys: Sequence[str]) -> list[list[int]]:
    """Returns, for each rollout, the rows of its outputs, in the order of the outputs. verl's keys have the form
    ``{uid}_{session}_{output}``; each session of a uid is a rollout.

    Example:
        >>> from d3s_kernels.integrations.verl.rows import sessions
        >>> sessions(["a_0_1", "a_1_0", "a_0_0"])
        [[1], [2, 0]]
    """
    names = [key.rsplit("_", 1) for key in keys]
    rows: dict[str, list[int]] = {}
    for row in sorted(range(len(keys)), key=lambda row: int(names[row][1])):
        rows.setdefault(names[row][0], []).append(row)
    return list(rows.values())


def rows_of_an_update(kept: int, rows: int, before: int, unit: int) -> int:
    """Returns the number of rows of one update. With this number, a step makes as many updates as without the
    selection.

    Args:
        kept: the number of rows after the selection.
        rows: the number of rows before the selection.
        before: the number of rows of one update without the selection: verl's ``ppo_mini_batch_size * rollout.n``.
        unit: the result is a multiple of this number: the number of data-parallel ranks times the number of rows of a
            micro-batch.

    Example:
        >>> from d3s_kernels.integrations.verl.rows import rows_of_an_update
        >>> rows_of_an_update(kept=512, rows=2048, before=1024, unit=8)  # 2 updates, as before
        256
    """
    updates = -(-rows // before)
    return -(-kept // (updates * unit)) * unit
