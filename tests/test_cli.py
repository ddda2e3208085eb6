"""The commands of d3s, and python -m d3s_kernels. tests/test_backends.py has the doctor's report, and
tests/test_savings.py what d3s savings counts.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import d3s_kernels as d3s
from d3s_kernels import __main__ as commands
from d3s_kernels._dispatch import backends
from d3s_kernels.check import doctor
from d3s_kernels.check.compare import Difference
from d3s_kernels.planning.profile import __main__ as profiling

ROOT = Path(__file__).parents[1]
WORST = {
    "entropy": Difference("cpu", "entropy", (3,), 1e-6, 1e-5),
    "topk_mask": Difference("cpu", "mask", None, 0.0, 0.0),
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the checks of a back-end find: differences of ops, or an error. The real checks take seconds."""
    of_backend: dict[str, Any] = {"cpu": WORST, "torch": WORST}

    def checks(device: torch.device, backend: str) -> Iterator[tuple[str, Difference]]:
        if isinstance(of_backend[backend], Exception):
            raise of_backend[backend]
        yield from of_backend[backend].items()

    monkeypatch.setattr(doctor, "checks", checks)
    monkeypatch.setattr(doctor, "devices", lambda: iter([(torch.device("cpu"), "2 threads")]))
    monkeypatch.setattr(backends, "serving", lambda device: {"cpu"})
    monkeypatch.setattr(backends, "runnable", lambda device: ("cpu", "torch"))
    return of_backend


def as_json(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    assert commands.main(["doctor", "--json"]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN, Infinity
    return report


def test_the_report_as_json(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, 0)
    assert (report["schema"], report["good"], report["torch"]) == (1, True, torch.__version__)
    assert report["build"] == d3s.build_info()
    assert report["why_not"] == {name: backends.why_not(name) for name in backends.BACKENDS}
    (device,) = report["devices"]
    assert (device["device"], device["description"]) == ("cpu", "2 threads")
    assert [(run["backend"], run["serves"]) for run in device["backends"]] == [("cpu", True), ("torch", False)]
    assert device["backends"][0]["ops"] == {
        "entropy": {"output": "entropy", "error": 1e-6, "allowed": 1e-5, "agrees": True},
        "topk_mask": {"output": "mask", "error": 0.0, "allowed": 0.0, "agrees": True},
    }


def test_what_is_wrong_or_does_not_run_as_json(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """An infinite error is no number of JSON's. What does not run matters only where the back-end serves."""
    found["torch"] = WORST | {"entropy": Difference("cpu", "entropy", (0,), math.inf, 1e-5)}
    report = as_json(capsys, 1)
    assert not report["good"]
    entropy = report["devices"][0]["backends"][1]["ops"]["entropy"]
    assert entropy == {"output": "entropy", "error": None, "allowed": 1e-5, "agrees": False}
    for place, backend, status in ((1, "torch", 0), (0, "cpu", 1)):
        found |= {"cpu": WORST, "torch": WORST, backend: OSError("no C compiler")}
        run = as_json(capsys, status)["devices"][0]["backends"][place]
        assert (run["backend"], run["error"], run["ops"]) == (backend, "OSError: no C compiler", {})


def test_the_report_finds_the_gpus_first(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the CUDA library has code for them is known only then."""

    def devices() -> Iterator[tuple[torch.device, str]]:
        monkeypatch.setattr(backends, "why_not", lambda backend: f"{backend} has no code")
        yield torch.device("cpu"), "2 threads"

    monkeypatch.setattr(doctor, "devices", devices)
    assert as_json(capsys, 0)["why_not"] == {name: f"{name} has no code" for name in backends.BACKENDS}
    commands.main(["doctor"])
    assert "\ncuda: cuda has no code\n" in capsys.readouterr().out


def test_the_report_as_text_is_the_same_by_every_command(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["d3s", "doctor"])
    assert [commands.main(), commands.main(["doctor"]), commands.console()] == [0, 0, 0]
    first, second, third = re.split(r"^(?=torch \d)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert first == second == third
    *_, entropy, topk_mask = map(str.split, first.splitlines())
    assert (entropy, topk_mask) == (["entropy", "0.10", "0.10"], ["topk_mask", "equal", "equal"])


def test_errors_name_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([], "d3s: error: the following arguments are required: command"),
        (["docter"], "d3s: error: argument command: invalid choice: 'docter'"),
        (["--jsn"], "d3s: error: the following arguments are required: command"),
        (["doctor", "--jsn"], "d3s doctor: error: unrecognized arguments: --jsn"),
        (["profile", "--model", "x"], "d3s profile: error: the following arguments are required: --dataset, --reward"),
        (["savings"], "d3s savings: error: the following arguments are required: --prompt-length, --lengths"),
        (["profile", "--samples", "few"], "d3s profile: error: argument --samples: invalid int value: 'few'"),
    ):
        with pytest.raises(SystemExit) as end:
            commands.main(arguments)
        assert end.value.code == 2, arguments
        assert said in capsys.readouterr().err


def test_the_commands_are_the_same_as_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(profiling, "main", lambda *passed, **named: given.append((passed, named)) or 3)
    assert commands.main(["profile", "--model", "x", "--help"]) == 3
    assert given == [((["--model", "x", "--help"],), {"prog": "d3s profile"})]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ((module, name),) = re.findall(r'^\[project\.scripts\]\nd3s = "(.+):(.+)"$', text, re.MULTILINE)
    assert getattr(importlib.import_module(module), name) is commands.console


def test_it_is_started_as_a_module_and_says_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "d3s_kernels", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"d3s_kernels {d3s.__version__}\n"), done.stderr
