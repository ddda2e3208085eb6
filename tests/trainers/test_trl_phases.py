"""sGPO's phases in TRL as in the documentation: one run for each phase, with its queries and its group size."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
import trl
from datasets import Dataset
from tiny_trl import PlainTrainer, arguments, model, tokenizer
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from d3s_kernels import plan_rollouts

SUCCESSES = [2, 3, 4, 0, 1, 8, 2, 5, 1, 6]  # 4 queries of size 2, 2 of 4, 2 of 8: each size fills a batch of 8 rows


def snippet() -> str:
    """The loop over phases."""
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if "GRPOTrainer(" in block and "plan.phase_sizes" in block]
    return found


def test_a_run_for_each_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = [f"w{10 + index}" for index in range(len(SUCCESSES))]
    model().save_pretrained("initial")

    trainers, groups = [], []

    class Watched(PlainTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, processing_class=tokenizer())
            before = AutoModelForCausalLM.from_pretrained(options["model"])
            assert all(map(torch.equal, before.parameters(), self.model.cpu().parameters()))
            trainers.append(self)
            groups.append([])

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        groups[-1].append(prompts)
        return [float(ids[0] % 2) for ids in completion_ids]

    monkeypatch.setattr(trl, "GRPOTrainer", Watched)
    config = partial(arguments, GRPOConfig, gradient_accumulation_steps=1, max_steps=2)
    monkeypatch.setattr(trl, "GRPOConfig", lambda output_dir, **given: config(output_dir=output_dir, **given))
    source, replaced = re.subn(r'^model = ".*"$', 'model = "initial"', snippet(), flags=re.MULTILINE)
    assert replaced == 1
    plan = plan_rollouts(torch.tensor(SUCCESSES), 8)
    exec(source, {"reward": reward, "plan": plan, "prompts": Dataset.from_dict({"prompt": prompts})})

    assert [trainer.num_generations for trainer in trainers] == list(plan.phase_sizes) == [2, 4, 8]
    for phase, (size, calls) in enumerate(zip(plan.phase_sizes, groups, strict=True)):
        assert len(calls) == 2
        for batch in calls:
            assert batch == [prompt for prompt in batch[::size] for _ in range(size)]
            assert set(batch) <= {prompts[query] for query in plan.queries(phase)}
