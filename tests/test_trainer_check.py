"""What the check of a trainer prints, and that every change of what is assumed about it is found."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trainer_stand_ins

from d3s_kernels.integrations import check, miles, slime
from d3s_kernels.integrations._assumptions import Assumption
from d3s_kernels.integrations.check import TABLES

HOOKS = {"slime": slime, "miles": miles}


def test_every_table_can_be_checked() -> None:
    sources = Path(check.__file__).parent.rglob("*.py")
    assert sum(source.read_text(encoding="utf-8").count(" = Table(\n") for source in sources) == len(TABLES)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_the_check_of_a_stand_in_holds(
    name: str, moved: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer_stand_ins.installed(tmp_path, TABLES[name].assumptions, moved):
        assert check.main([name]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert TABLES[name].commit in first
    assert lines == [f"holds: {row}" for row in TABLES[name].assumptions]


def changed(row: Assumption) -> Assumption:
    """The row of a trainer that has another parameter or argument, or lacks a name."""
    if row.kind == "takes":
        new = row.expected.replace(", logits", ", extra")
        if new == row.expected:
            new = new.replace("(", "(extra, ", 1)
    elif row.kind == "calls":
        new = row.expected.replace("(", "(extra, ", 1)
    else:
        new = row.expected.rpartition(" ")[0] or "other"
    assert new != row.expected
    return row._replace(expected=new)


@pytest.mark.parametrize("name", TABLES)
def test_every_change_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = TABLES[name].assumptions
    for number, row in enumerate(rows):
        others = [changed(other) if other == row else other for other in rows]
        with trainer_stand_ins.installed(tmp_path / str(number), others):
            assert check.main([name]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("holds: ", name))]
        assert line.startswith(f"differs: {row}: found ")


def test_a_trainer_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["slime"]) == 2
    first, *lines = capsys.readouterr().out.splitlines()
    assert "is not installed" in first
    assert len(lines) == len(TABLES["slime"].assumptions)


def test_what_only_a_gpu_machine_has_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in TABLES["slime"].assumptions if not row.place.startswith("megatron")]
    with trainer_stand_ins.installed(tmp_path, rows):
        assert check.main(["slime"]) == 0
    assert "unknown: megatron.core.parallel_state" in capsys.readouterr().out


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_refuse_a_trainer_that_differs(name: str, tmp_path: Path) -> None:
    rows = TABLES[name].assumptions
    other = [changed(row) if "policy_loss_function" in row.place and row.kind == "takes" else row for row in rows]
    with trainer_stand_ins.installed(tmp_path, other):
        with pytest.raises(RuntimeError, match=r"policy_loss_function takes .*found it takes \(args, batch, extra"):
            HOOKS[name].token_loss(Namespace(), {}, torch.zeros(1, 1, 1), sum)
        with pytest.raises(ValueError, match="sample 7 has no advantage"):  # what this hook relies on is there
            HOOKS[name].post_process_rewards(Namespace(), [SimpleNamespace(metadata={}, index=7)])
