"""The snippets of docs/compile.md run, one after the other. What those after the loss do is compared with eager mode in
tests/test_checkpoint.py, test_modes.py and test_export.py.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_labels, random_logits, slow

import d3s_kernels as d3s

PAGE = (Path(__file__).parents[1] / "docs" / "compile.md").read_text(encoding="utf-8")
SECTIONS = {
    title: blocks
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if (blocks := re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
}


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    """The names that the page uses."""
    return {
        "torch": torch,
        "d3s": d3s,
        "hidden": torch.randn(16, 9, 32, requires_grad=True),
        "weight": torch.randn(50, 32, requires_grad=True),
        "layer": torch.nn.Linear(32, 32),
        "logits": random_logits(16, 9, 50),
        "labels": random_labels(16, 9, vocabulary=50),
        "old_logprob": -4 * torch.rand(16, 9),
        "rewards": torch.rand(1, 16),
        "progress": 0.0,
        "path": tmp_path / "scores.pt2",
    }


def run(section: str, names: dict[str, Any]) -> None:
    for block in SECTIONS[section]:
        exec(compile(block, f"docs/compile.md, {section}", "exec"), names)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor", shows="that Inductor's code is right, too")])
def test_the_loss_has_the_gradient_of_eager_mode(
    names: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    gradients = []
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            run("torch.compile", names)
        gradients.append(torch.autograd.grad(names["loss"], (names["hidden"], names["weight"])))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("section", sorted(SECTIONS.keys() - {"torch.compile"}))
def test_the_snippets_of_a_section_run(section: str, names: dict[str, Any]) -> None:
    run(section, names)
    if "logprob" in names:
        assert names["logprob"].isfinite().all()
        assert torch.autograd.grad(names["logprob"].sum(), names["hidden"])[0].any()
