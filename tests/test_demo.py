"""The parts of the demo, on the tiny model that it makes where it has no other; `make demo` runs it on SmolLM2."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
pytest.importorskip("trl")
pytest.importorskip("rich")

from _demo import models, plain, update  # noqa: E402
from _demo.problems import EXAMPLE, GAINS, LOSSES, Problem, draw, is_right  # noqa: E402
from _demo.rollouts import Recorded, record  # noqa: E402

import d3s_kernels as d3s  # noqa: E402


def test_the_verifier_reads_the_last_answer() -> None:
    for text, right in (
        ("4 + 5 = 9, the answer is 9.", True),
        ("the answer is 8. No, the answer is 9", True),
        ("the answer is 9. No, the answer is 8", False),
        ("4 + 5 = 9.", False),
        ("the answer is 90", False),
        ("", False),
    ):
        assert is_right(text, 9) == right, text


def test_the_solutions_of_problems_are_right() -> None:
    random_ = random.Random(0)
    for problem in [EXAMPLE, *(draw(random_) for _ in range(200))]:
        assert is_right(problem.solution, problem.answer)
        assert 0 < problem.answer <= models.LARGEST
        assert (problem.verb in GAINS) != (problem.verb in LOSSES)
        assert problem.chat[-1] == {"role": "user", "content": problem.question}


def test_each_prompt_gets_its_recorded_rollouts_in_their_order() -> None:
    problems = [Problem("Tom", "eggs", "buys", 2, 1), Problem("Mia", "pens", "sells", 5, 1)]
    recorded = Recorded(problems, [[1], [2]], [[10], [11], [20], [21]], [""] * 4, torch.zeros(2, 2))
    chats = [problems[place].chat for place in (1, 0, 1, 0)]
    found = recorded.generated(chats, trainer=None)
    assert found["prompt_ids"] == [[2], [1], [2], [1]]
    assert found["completion_ids"] == [[20], [10], [21], [11]]


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any, Recorded]:
    """A tiny model after a few steps of training, its tokenizer and its answers."""
    model, tokenizer = models.made_here(0, lambda: None, steps=60)
    random_ = random.Random(1)
    steps = []
    recorded = record(model, tokenizer, [draw(random_) for _ in range(3)], 8, 24, lambda: steps.append(1))
    assert 0 < len(steps) <= 24
    # Whatever the answers are, every problem gets right and wrong ones.
    rewards = (torch.arange(24).view(3, 8) % torch.tensor([2, 3, 4])[:, None] == 0).float()
    answers = [recorded.problems[i // 8].answer if reward else 99 for i, reward in enumerate(rewards.flatten())]
    texts = [f"the answer is {answer}" for answer in answers]
    return model, tokenizer, Recorded(recorded.problems, recorded.prompts, recorded.completions, texts, rewards)


@pytest.mark.slow("that the tests' tiny model gives what `make demo` finds with SmolLM2")
def test_both_trainers_get_the_same_and_keep_the_budget(made: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, recorded = made

    monkeypatch.setattr(update, "reward", lambda completions, **_: recorded.rewards.flatten().tolist())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    everything = update.grpo(model, tokenizer, recorded, lambda: None)
    assert len(everything.batch["completion_ids"]) == 24
    assert everything.costs.seconds.keys() == {update.SCORING, update.UPDATE}
    everything.batch["d3s_kept"] = everything.batch["completion_mask"].bool()
    model.load_state_dict(weights)
    assert plain.relative_difference(everything.gradient, plain.gradient(model, everything.batch)) < 1e-4

    model.load_state_dict(weights)
    ours = update.with_d3s(model, tokenizer, recorded, d3s.Budget(2, 0.1), lambda: None)
    kept = d3s.select_rollouts(d3s.group_advantages(recorded.rewards), 2).flatten()
    assert len(ours.batch["completion_ids"]) == int(kept.sum()) == 6
    lengths = ours.batch["completion_mask"].sum(dim=1).tolist()
    found = [row[:length] for row, length in zip(ours.batch["completion_ids"].tolist(), lengths, strict=True)]
    assert found == [tokens for tokens, keep in zip(recorded.completions, kept.tolist(), strict=True) if keep]
    assert int(ours.batch["d3s_kept"].sum()) == -(-sum(lengths) // 10)
    model.load_state_dict(weights)
    assert plain.relative_difference(ours.gradient, plain.gradient(model, ours.batch)) < 1e-4
    ours.batch["d3s_kept"] = ours.batch["d3s_kept"].roll(1, dims=0)  # other tokens have another gradient
    assert plain.relative_difference(ours.gradient, plain.gradient(model, ours.batch)) > 0.1


def demo(folder: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, EXAMPLES / "demo.py", *options], capture_output=True, text=True, cwd=folder)


@pytest.mark.slow("the whole demo without SmolLM2")
def test_the_demo_without_a_model_says_so_and_runs(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The model is a stand-in" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    row = next(line for line in done.stdout.splitlines() if "answers trained on" in line)
    assert row.split()[-5:] == ["16", "16", "4", "10", "16"]
    page = (tmp_path / "demo" / "selection.html").read_text(encoding="utf-8")
    tokens = next(line for line in done.stdout.splitlines() if "tokens with a gradient" in line)
    assert page.count("<mark class=s") == int(tokens.split()[-2])
    assert not re.search("[<]script", page)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = demo(tmp_path, "--model", tmp_path)
    assert done.returncode == 2
    assert "has no config.json; takes the folder of a saved model" in done.stderr
