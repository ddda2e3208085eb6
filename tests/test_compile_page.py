"""The snippets of docs/compile.md run, one after the other. What they do is compared with eager mode in
tests/test_compiled_losses.py, test_checkpoint.py, test_modes.py and test_export.py.
"""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import random_labels, random_logits

import d3s_kernels as d3s

PAGE = (Path(__file__).parents[1] / "docs" / "compile.md").read_text(encoding="utf-8")
SECTIONS = {
    title: blocks
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    if (blocks := re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_snippets_of_a_section_run(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    names = {
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
    for block in SECTIONS[section]:
        exec(compile(block, f"docs/compile.md, {section}", "exec"), names)
    for result in names.get("loss"), names.get("logprob"):
        if result is not None:
            assert result.isfinite().all()
            # It may be 0: the few tokens that are kept may all have a clipped ratio.
            assert torch.autograd.grad(result.sum(), names["hidden"])[0].isfinite().all()
