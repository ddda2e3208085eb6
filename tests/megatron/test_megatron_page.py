"""The lines of docs/megatron.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
from ranks import Ranks, on_ranks
from tiny_megatron import arrange, gathered, logprobs_of, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"


@on_ranks(2)
def the_forward_step(ranks: Ranks) -> None:
    arrange(2)
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    model = tiny_model(sequence_parallel=True)
    tokens, mask, advantages = torch.arange(20).view(2, 10), torch.arange(20).view(2, 10) % 3 == 0, torch.randn(2, 1)
    labels = tokens.roll(-1, 1)
    given: dict[str, Any] = {"model": model}
    exec(lines, given)
    batch = {"tokens": tokens, "position_ids": None, "labels": labels, "mask": mask, "advantages": advantages}
    output, loss = given["forward_step"](iter([batch]), model)
    value, metrics = loss(output)
    value.backward()
    logprob, entropy = logprobs_of(gathered(model(tokens, None, None), -1), labels, 0.7)
    torch.testing.assert_close(value.detach(), -(advantages * logprob * mask).sum().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics["entropy"], (entropy * mask).sum().detach(), rtol=1e-5, atol=1e-5)
    assert model.output_layer.weight.grad.any()


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 800
