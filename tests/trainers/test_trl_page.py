"""The pages that `selection_page_steps` writes show what was trained on. With several processes:
test_trl_processes.py.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from tiny_trl import GROUP, share_of_even, trainer

from d3s_kernels.integrations.trl.page import SHOWN


def pages(folder: Path) -> dict[int, str]:
    """The pages by step."""
    found = sorted((folder / "selection").glob("*"))
    return {int(re.fullmatch(r"step-(\d{6})\.html", path.name)[1]): path.read_text("utf-8") for path in found}


def marked(page: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<mark class=s[^>]*>([^<]*)</mark>", page)]


def run(folder: Path, **options: Any) -> tuple[list[list[str]], Any]:
    """Trains; returns the texts of the kept tokens of each micro-batch, and the trainer."""
    made = trainer(output_dir=str(folder), **options)
    seen: list[list[str]] = []
    log = made._log_tokens

    def spy(kept: torch.Tensor, mask: torch.Tensor, entropy: torch.Tensor) -> Any:
        tokens = made._loss_inputs["completion_ids"]
        texts = [made._tokenizer.decode([token]) for token in tokens[kept].tolist()]
        seen.append(texts)
        return log(kept, mask, entropy)

    made._log_tokens = spy
    made.train()
    return seen, made


@pytest.mark.parametrize("entropy_from", ["update", "rollout"])
def test_every_second_step_the_tokens_that_were_kept(tmp_path: Path, entropy_from: str) -> None:
    seen, made = run(tmp_path, max_steps=4, selection_page_steps=2, entropy_from=entropy_from)
    found = pages(tmp_path)
    assert list(found) == [0, 2]
    for step, page in found.items():
        of_step = [text for texts in seen[2 * step : 2 * step + 2] for text in texts]
        assert sorted(text.strip() for text in marked(page)) == sorted(text.strip() for text in of_step)
        logged = made.state.log_history[step]
        assert page.count("<article>") == logged["d3s/rollouts_kept"]
        assert page.count("<article>") + page.count("<details>") == 2 * GROUP
        assert f"<title>Step {step}: " in page


def test_rewards_and_advantages_are_those_of_each_rollout(tmp_path: Path) -> None:
    rewarded: dict[str, float] = {}

    def reward(completion_ids: list[list[int]], completions: list[str], **_: Any) -> list[float]:
        values = share_of_even(completion_ids)
        rewarded.update(
            {f"w{' w'.join(map(str, ids))}": value for ids, value in zip(completion_ids, values, strict=True)}
        )
        return values

    run(tmp_path, max_steps=1, selection_page_steps=1, reward_funcs=reward)
    (page,) = pages(tmp_path).values()
    rollouts = re.findall(
        r"reward ([\d.]+), advantage <b[^>]*>([-+.\d]+)</b>.*?<div class=\"text\"[^>]*>(.*?)</div>", page, re.S
    )
    assert len(rollouts) == 2 * GROUP
    for value, _, text in rollouts:
        words = html.unescape(re.sub("<[^>]*>", "", text)).replace("<eos>", "w1").replace("<pad>", "w0").split()
        assert float(value) == pytest.approx(rewarded[" ".join(words)], abs=5e-3)
    for start in (0, GROUP):
        group = torch.tensor([float(value) for value, _, _ in rollouts[start : start + GROUP]])
        shown = torch.tensor([float(advantage) for _, advantage, _ in rollouts[start : start + GROUP]])
        torch.testing.assert_close(shown, (group - group.mean()) / (group.std() + 1e-4), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, []),
        ({"selection_page_steps": 3}, [0, 3]),
        # Each generation lasts for two steps, so the page of step 1 is that of step 2.
        ({"selection_page_steps": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 2}, [0, 2]),
        ({"selection_page_steps": 1, "num_iterations": 2}, [0, 2]),
    ],
)
def test_when(tmp_path: Path, options: dict[str, Any], steps: list[int]) -> None:
    _, made = run(tmp_path, max_steps=4, **options)
    assert list(pages(tmp_path)) == steps
    assert made.state.global_step == 4


def test_at_most_so_many_rollouts_in_whole_groups(tmp_path: Path) -> None:
    run(tmp_path, max_steps=1, selection_page_steps=1, per_device_train_batch_size=3 * GROUP, num_generations=24,
        gradient_accumulation_steps=4)  # fmt: skip
    (page,) = pages(tmp_path).values()
    assert page.count("<article>") + page.count("<details>") == SHOWN // 24 * 24
    assert page.count("<h2>") == SHOWN // 24


def test_what_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "selection").write_text("in the way")
    with pytest.warns(UserWarning, match=r"selection_page_steps: the page .*step-000000.html could not be written"):
        _, made = run(tmp_path, max_steps=2, selection_page_steps=1)
    assert made.state.global_step == 2


@pytest.mark.parametrize("value", [-1, 0.5, True, None])
def test_bad_values(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=f"selection_page_steps: got {value}; takes a whole number of at least 0"):
        trainer(output_dir=str(tmp_path), selection_page_steps=value)
