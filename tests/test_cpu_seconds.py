"""tools/cpu_seconds.py: CPU-seconds of a command and its children are counted, converted, and held to a bound."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import cpu_seconds
from cpu_seconds import PIECE, SLACK, main, verdict

BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def test_seconds_of_children_count(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_seconds, "median_piece", lambda: PIECE)  # a machine as fast as that of the bounds

    def run(bound: str, code: str) -> int:
        return main([bound, sys.executable, "-S", "-c", code])

    in_a_child = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {BUSY!r}])"
    assert run("0.25", in_a_child) == 1
    assert capfd.readouterr().err.endswith("takes too many CPU-seconds.\n")
    assert run("2", in_a_child) == 0
    assert run("60", "raise SystemExit(7)") == 7


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_a_slower_machine_may_take_longer(slower: float) -> None:
    limit = SLACK * 100 * slower
    assert verdict("x", 0.99 * limit, slower * PIECE, 100)[0]
    assert not verdict("x", 1.01 * limit, slower * PIECE, 100)[0]
