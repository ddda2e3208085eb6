"""What is said of rollouts and off-policy tokens of TRL's generation batch. Which are kept: test_trl_sweep.py."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from batches import forwards, generation_batch
from tiny_trl import GROUP, PlainTrainer, generated, trainer

from d3s_kernels import group_advantages, select_tokens
from d3s_kernels.integrations._transformers import without_spread
from d3s_kernels.selection import Selection

FOUR_STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
LITTLE: dict[str, dict[str, Any]] = {
    "_start: got 3, but 4 of 8 rollouts are kept: a group has 8, and .*, 4": {"rollouts": 3, **FOUR_STEPS},
    "_start: got 12, but 16 of 16 rollouts are kept: a group has 8": {"rollouts": 12},
    "_end: got 5, but 8 of 8 rollouts are kept: a group has 8, and ": {"rollouts_end": 5, **FOUR_STEPS},
}


@pytest.mark.parametrize("message", LITTLE)
def test_little_to_drop_is_said(message: str) -> None:
    with pytest.warns(UserWarning, match=f"rollouts{message}"):
        trainer(**LITTLE[message])


def test_enough_to_drop_is_not_remarked_upon(recwarn: pytest.WarningsRecorder) -> None:
    trainer(rollouts_start=4, rollouts_end=8)
    trainer(rollouts_start=1, rollouts_end=1)  # a share of 1 asks for all of them
    assert not [warning for warning in recwarn if "rollouts_" in str(warning.message)]


def test_advantages_of_tokens_are_refused() -> None:
    batch = generation_batch(5)
    batch["advantages"] = batch["advantages"][:, None].expand(-1, 10)
    with pytest.raises(TypeError, match=r"advantages: got shape \[16, 10\]; takes one for each rollout, \[16\]"):
        trainer()._keep_rollouts(batch)


def test_rounding_errors_are_not_normalised() -> None:
    """TRL's advantages of rewards that are equal up to rounding are some 6e-4, and their deviation is as small."""
    a, b, c = torch.tensor([0.1, 0.2, 0.35])
    rewards = torch.stack([a + b + c, c + b + a]).repeat(GROUP // 2)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[None]
    assert advantages.abs().max() > 1e-4
    kept = torch.ones_like(advantages, dtype=torch.bool)
    same = without_spread(rewards[:, None], torch.ones(1), GROUP, separately=False)
    anew = Selection(advantages_from="kept").advantages(advantages, kept, without_spread=same)
    assert not anew.any()


def test_random_rollouts_are_the_same_on_every_process_and_others_each_time() -> None:
    def drawn(seed_of_process: int, step: int = 0) -> list[list[float]]:
        made = trainer(rollout_rule="random")
        made.state.global_step = step
        torch.manual_seed(seed_of_process)
        return [made._keep_rollouts(generation_batch(5))["advantages"].tolist() for _ in range(2)]

    first, second = drawn(1)
    assert first != second  # two generations within a step
    assert drawn(2) == [first, second] != drawn(1, step=1)


# ---- tokens whose probability in the policy is far from the one they were sampled with ------------------------------


def rollouts_of(logprobs: list[float | None]) -> Any:
    """A rollout_func with these log-probabilities of three tokens."""

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        ids = [[5, 6, 7 + place] for place in range(len(prompts))]
        return {"prompt_ids": [[3]] * len(ids), "completion_ids": ids, "logprobs": [logprobs] * len(ids)}

    return rollout


@pytest.mark.parametrize("entropy_from", ["auto", "update"])
def test_an_update_without_a_policy_gradient_is_said_once(saved: str, entropy_from: str) -> None:
    """TRL's correction multiplies the loss of each token by 0."""
    bounds = {f"vllm_importance_sampling_clip_{end}": value for end, value in {"min": 9.0, "max": None}.items()}
    made = trainer(
        policy=saved, entropy_from=entropy_from, vllm_importance_sampling_mode="token_mask", **bounds,
        rollout_func=rollouts_of([-0.01] * 3),
    )  # fmt: skip
    made.use_vllm, made._last_loaded_step, made.accelerator.sync_gradients = True, 0, True
    with forwards(made.model) as passes:
        batch = generated(made)
    assert sum(len(inputs["input_ids"]) for _, inputs in passes) == 2 * GROUP, "one pass has all scores of a rollout"
    with pytest.warns(UserWarning, match=r"d3s/off_policy_share: (\d+) of \1 tokens of an update .* no policy grad"):
        made.compute_loss(made.model, batch)
    assert made._metrics["train"]["d3s/off_policy_share"] == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        made.compute_loss(made.model, batch)


def test_completions_without_log_probabilities_are_refused(saved: str) -> None:
    made = trainer(policy=saved, off_policy_rule="kpop")
    with pytest.raises(ValueError, match="off_policy_rule: got 'kpop', and completions without the log-probabilities"):
        generated(made)


def test_log_probabilities_of_a_rollout_func_are_whole_where_they_are_read(saved: str) -> None:
    """TRL pads them with 0, the probability 1."""
    generated(trainer(policy=saved, rollout_func=rollouts_of([-4.0, -4.0])))
    made = trainer(policy=saved, off_policy_rule="kpop", rollout_func=rollouts_of([-4.0, -4.0]))
    with pytest.raises(ValueError, match=r"rollout_func: got 2 logprobs for 3 completion_ids of rollout 0; takes"):
        generated(made)


def test_sampling_masks_record_with_which_probability_a_token_was_drawn(saved: str) -> None:
    """Nothing is off-policy in the first update."""
    made = trainer(policy=saved, sampling_mask=True, top_k=5, off_policy_rule="sequence_error", off_policy_high=1.001)
    batch = generated(made)
    assert batch["d3s_trusted"].equal(batch["completion_mask"].bool())


# ---- what is TRL's own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0.05, 0.2, 0.5, 0.99])
def test_the_quantile_of_entropies(ratio: float, dtype: torch.dtype) -> None:
    """The masks are equal, also for entropies that tie, for NaN, and for no tokens."""
    plain, mask = trainer(PlainTrainer), torch.rand(7, 90) < 0.8
    for entropy in (torch.rand(7, 90), torch.randint(4, (7, 90)) / 3, torch.full((7, 90), 0.5)):
        for values, present in ((entropy, mask), (entropy, ~mask), (entropy, torch.zeros_like(mask))):
            values = values.to(dtype)
            theirs = plain.get_high_entropy_mask(values, present.int(), 1 - ratio)
            ours = select_tokens(values, None, ratio, rule="entropy_quantile", mask=present)
            assert ours.mask.equal(theirs)
            assert ours.count == theirs.sum()
    entropy[mask] = math.nan
    assert not plain.get_high_entropy_mask(entropy, mask.int(), 1 - ratio).any()
    assert not select_tokens(entropy, None, ratio, rule="entropy_quantile", mask=mask).mask.any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_with_completions_that_no_reward_scored(scale: str) -> None:
    """TRL leaves a reward of None out of mean and deviation, and gives it the advantage 0."""
    rewards = torch.randint(9, (4, GROUP)) / 8
    rewards[torch.rand(4, GROUP) < 0.3] = math.nan
    rewards[0], rewards[1, 1:] = 0.25, math.nan  # a group of equal rewards; a group with one score

    def score(completion_ids: Any, **_: Any) -> list[float | None]:
        return [None if math.isnan(r) else r for r in rewards.flatten().tolist()]

    made = trainer(PlainTrainer, reward_funcs=score, scale_rewards=scale)
    theirs = generated(made, range(2, 6))["advantages"]
    torch.testing.assert_close(group_advantages(rewards, scale=scale).flatten(), theirs, rtol=1e-4, atol=1e-5)
