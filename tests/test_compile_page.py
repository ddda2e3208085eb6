"""The snippets of docs/compile.md run, one after the other, and do what the page says."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, random_labels, random_logits, slow

import d3s_kernels as d3s

PAGE = (Path(__file__).parents[1] / "docs" / "compile.md").read_text(encoding="utf-8")
SECTIONS = {
    title: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """The names that the page uses."""
    labels = random_labels(16, 9, vocabulary=50)
    return {
        "torch": torch,
        "d3s": d3s,
        "hidden": torch.randn(16, 9, 32, requires_grad=True),
        "weight": torch.randn(50, 32, requires_grad=True),
        "layer": torch.nn.Linear(32, 32),
        "logits": random_logits(16, 9, 50),
        "labels": labels,
        "old_logprob": -4 * torch.rand(16, 9),
        "rewards": torch.rand(1, 16),
        "progress": 0.0,
        "path": tmp_path / "scores.pt2",
    }


def run(section: str, names: dict[str, Any]) -> None:
    for block in SECTIONS[section]:
        exec(compile(block, f"docs/compile.md, {section}", "exec"), names)


def test_every_snippet_is_run_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert {title for title, blocks in SECTIONS.items() if blocks} == set(
        re.findall(r'    run\("(.+)", names\)', source)
    )


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor", shows="that Inductor's code is right, too")])
def test_the_loss(names: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    run("torch.compile", names)
    actual = torch.autograd.grad(names["loss"], (names["hidden"], names["weight"]))
    with torch.compiler.set_stance("force_eager"):
        run("torch.compile", names)
    expected = torch.autograd.grad(names["loss"], (names["hidden"], names["weight"]))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_policy(names: dict[str, Any]) -> None:
    run("Checkpoints", names)
    leaves = names["hidden"], names["weight"]
    results = []
    for logprob, entropy in ((names["logprob"], names["entropy"]), names["last_layers"](*leaves, names["labels"])):
        results.append((logprob, entropy, *torch.autograd.grad((logprob + entropy).sum(), leaves)))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one.detach(), other.detach())


def test_autocast(names: dict[str, Any]) -> None:
    run("Autocast", names)
    assert names["states"].dtype == torch.bfloat16
    as_they_are = d3s.linear_logprob_entropy(names["states"], names["weight"], names["labels"])
    in_float32 = d3s.linear_logprob_entropy(names["states"].float(), names["weight"], names["labels"])
    for one, other in zip(as_they_are, in_float32, strict=True):
        assert_same_bits(one, other)


def test_the_program(names: dict[str, Any]) -> None:
    run("Export", names)
    given = names["logits"][3:5, :4], names["labels"][3:5, :4]
    for one, other in zip(names["program"].module()(*given), names["Scores"]()(*given), strict=True):
        assert_same_bits(one, other)
