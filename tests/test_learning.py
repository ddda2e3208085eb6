"""The learning experiment: its task, its update, and the reports of its kept runs. CI runs all stages, with --short."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.learning import comparison, policy, problems, report, stages  # noqa: E402
from experiments.learning.arms import arms  # noqa: E402
from experiments.learning.generate import Rollouts, generate, sample  # noqa: E402
from experiments.learning.ledger import Counts  # noqa: E402
from experiments.learning.rewards import ends_in  # noqa: E402
from experiments.learning.setting import load as load_setting  # noqa: E402
from experiments.learning.update import add_gradient  # noqa: E402

PROBLEM = problems.of_chains()
ARMS = arms(8, 4)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = policy.new_model(PROBLEM.tokenizer)
    with torch.no_grad():  # spreads the logits, so that entropies differ
        made.get_output_embeddings().weight.mul_(2)
    return made


def batch(model: torch.nn.Module, count: int = 8) -> tuple[Rollouts, torch.Tensor]:
    """Rollouts of three prompts, and rewards at random."""
    numbers = torch.Generator().manual_seed(0)
    made = sample(model, PROBLEM.tokenizer, PROBLEM.train[:3], count, 12, numbers)
    return made, torch.rand(3, count, generator=numbers).round()


# ---- the task --------------------------------------------------------------------------------------------------------


def test_held_out_prompts_are_not_trained_on() -> None:
    train, held_out, longer = ({task.prompt for task in part} for part in PROBLEM[1:4])
    assert (len(train), len(held_out), len(longer)) == (80, 128, 64)
    assert not train & held_out
    assert min(map(len, longer)) > max(map(len, train))


def test_the_reward_is_that_of_the_last_answer() -> None:
    for completion, answer, right in (
        ("3 + 4 = 7 ; 7 * 2 = 4", "4", True),
        ("3 + 4 = 7 ; 7 * 2 = 5", "4", False),
        ("the answer is 1,085.", "1085", True),
        ("the answer is 185", "85", False),
        ("85, or maybe 86", "85", False),
        ("It is Paris.", "paris", True),
    ):
        assert ends_in(completion, answer) == right, completion


# ---- generation ------------------------------------------------------------------------------------------------------


def test_generation_with_a_cache_is_generation_without(model: torch.nn.Module) -> None:
    """Rows that end leave the cache. With a sure model, sampling is the choice of the largest logit."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
    texts = [task.prompt for task in PROBLEM.train[:6]]
    prompts = PROBLEM.tokenizer(texts, padding=True, return_tensors="pt")
    attended, numbers = prompts.attention_mask.bool(), torch.Generator().manual_seed(0)
    found = generate(model, prompts.input_ids, attended, 10, PROBLEM.tokenizer, numbers)
    for row, text in enumerate(texts):
        tokens = PROBLEM.tokenizer(text, return_tensors="pt").input_ids
        expected = []
        while len(expected) < 10 and PROBLEM.tokenizer.eos_token_id not in expected:
            expected.append(int(model(tokens).logits[0, -1].argmax()))
            tokens = torch.cat([tokens, torch.tensor([[expected[-1]]])], 1)
        assert found.completion[row][found.completion_mask[row]].tolist() == expected


# ---- the update ------------------------------------------------------------------------------------------------------


def by_hand(model: torch.nn.Module, made: Rollouts, advantages: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the mean of -A log p over the tokens of the mask, from all logits, row by row."""
    total = torch.zeros(())
    for row in range(len(made.prompt)):
        prompt = made.prompt[row][made.prompt_mask[row]]
        completion = made.completion[row][made.completion_mask[row]]
        logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        logprob = logits.log_softmax(-1).gather(1, completion.unsqueeze(1)).squeeze(1)
        total = total - (logprob * advantages[row])[mask[row][made.completion_mask[row]]].sum()
    return list(torch.autograd.grad(total / mask.sum(), list(model.parameters())))


def assert_gradient(model: torch.nn.Module, expected: list[torch.Tensor]) -> None:
    """Within a ten-thousandth of its largest element: one token more or less changes it by a hundredth."""
    largest = max(float(part.abs().max()) for part in expected)
    for parameter, part in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, part, rtol=0, atol=1e-4 * largest)


def grpo_advantages(found: torch.Tensor) -> torch.Tensor:
    return (found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-4)


def test_grpo_trains_on_all_tokens(model: torch.nn.Module) -> None:
    made, found = batch(model)
    arm = ARMS["GRPO-8"]
    update = add_gradient(model, made, found, arm, arm.schedule(0.3), torch.Generator())
    expected = by_hand(model, made, grpo_advantages(found).flatten(), made.completion_mask)
    assert_gradient(model, expected)
    tokens = int(made.completion_mask.sum())
    assert update.counts == Counts(updated=int(made.lengths().sum()), kept=tokens, steps=1)
    assert update.positive == int((made.completion_mask & (grpo_advantages(found) > 0).view(-1, 1)).sum())


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_d3s_trains_on_the_tokens_of_the_largest_score(model: torch.nn.Module, micro_batch: int | None) -> None:
    """In a micro-batch of its own, each keeps its share."""
    made, found = batch(model)
    arm = ARMS["D3S"]
    budget = arm.schedule(1.0)  # all rollouts, a fifth of their tokens
    update = add_gradient(model, made, found, arm, budget, torch.Generator(), micro_batch)
    advantages = grpo_advantages(found).flatten()
    tokens = torch.cat([made.prompt, made.completion], 1)
    mask = torch.cat([made.prompt_mask, made.completion_mask], 1)
    logits = model(tokens, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    entropy = torch.distributions.Categorical(logits=logits[:, made.prompt.shape[1] - 1 : -1]).entropy()
    score = (advantages.abs().unsqueeze(1) * entropy).masked_fill(~made.completion_mask, -1).detach()
    expected = torch.zeros_like(made.completion_mask)
    for rows in made.lengths().argsort(stable=True).split(micro_batch or 24):
        count = math.ceil(0.2 * int(made.completion_mask[rows].sum()))
        expected[rows] = score[rows] >= score[rows].flatten().sort(descending=True).values[count - 1]
    assert_gradient(model, by_hand(model, made, advantages, expected))
    assert update.counts.kept == int(expected.sum())
    assert update.counts.scored == int(made.completion_mask.sum())


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model after large updates: for many tokens, the ratio to its samples is far from 1."""
    later, numbers = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(1 + torch.randn(parameter.shape, generator=numbers))
    return later


def log_ratio(model: torch.nn.Module, made: Rollouts) -> torch.Tensor:
    """Of the tokens' probabilities to those that they were sampled with, by all logits, with a gradient."""
    mask = torch.cat([made.prompt_mask, made.completion_mask], 1)
    tokens, positions = torch.cat([made.prompt, made.completion], 1), (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=mask.long(), position_ids=positions).logits[:, made.prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, made.completion.unsqueeze(2)).squeeze(2) - made.logprob


def test_old_samples_have_the_clipped_ratio_of_ppo(model: torch.nn.Module) -> None:
    made, found = batch(model)
    later, arm = moved(model), ARMS["GRPO-8, 3 old"]
    add_gradient(later, made, found, arm, arm.schedule(0.0), torch.Generator())
    ratio, advantages = log_ratio(later, made).exp(), grpo_advantages(found).view(-1, 1)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    assert (surrogate != ratio * advantages)[made.completion_mask].float().mean() > 0.1  # some are clipped
    loss = -surrogate[made.completion_mask].mean()
    assert_gradient(later, list(torch.autograd.grad(loss, list(later.parameters()))))


# ---- what is concluded -----------------------------------------------------------------------------------------------

RESULTS = sorted(path.parent for path in (ROOT / "experiments/learning/results").rglob("learning.md"))


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_kept_runs_are_compared_by_the_prices_that_timed_them_in_the_kept_report(folder: Path) -> None:
    setting = load_setting(folder)
    found, steps = comparison.load(setting), stages.prices_file(setting)["steps"]
    prices, horizon = stages.known_prices(setting)
    assert found.horizon == horizon
    for arm, runs in found.runs.items():
        counts = runs[0].points[-1].counts
        assert found.own_clocks[arm](counts) == prices.of(counts) >= horizon
        of_step = Counts(**steps[arm]["counts"])
        whole = steps[arm]["measured"] * of_step.steps
        assert found.clocks[comparison.WHOLE_STEPS][arm](of_step) == pytest.approx(whole)
    assert (folder / "learning.md").read_text(encoding="utf-8") == report.report(setting)
