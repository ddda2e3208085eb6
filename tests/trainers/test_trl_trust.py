"""Tokens whose probability in the policy is far from the one they were sampled with cost TRL's update nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import assert_same_gradient, forwards, loss_and_gradients
from tiny_trl import PlainTrainer, generated, trainer

from d3s_kernels import trusted_tokens
from d3s_kernels.integrations.trl import D3STrainer

OLD, SAMPLED, RATIO = "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"
ALL = {"rollouts": 1.0, "tokens": 1.0}


class LikeVLLM:
    """Completions are transformers', but TRL treats them as vLLM's, with an engine's log-probabilities."""

    strange = 0.6  # how far an engine's log-probability may be from the trainer's

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        self.use_vllm = False
        completions, _ = super()._generate_single_turn(*arguments, **options)
        self.use_vllm = True
        prompts = options.get("prompt_ids", arguments[0] if arguments else None)
        logprobs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
            own = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            shift = torch.cos(ids[0, len(prompt) :] * 37.0 + torch.arange(len(completion)))
            logprobs.append((own + self.strange * shift).tolist())
        return completions, logprobs


TheirsLikeVLLM = type("TheirsLikeVLLM", (LikeVLLM, PlainTrainer), {})
OursLikeVLLM = type("OursLikeVLLM", (LikeVLLM, D3STrainer), {})


def made_of(kind: type, policy: Any, **options: Any) -> Any:
    made = trainer(kind, policy=policy, **options)
    made.use_vllm = True
    return made


def seeded(made: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    return generated(made)


def labels_of(made: Any, batch: dict[str, Any]) -> tuple[int, float, Tensor]:
    """The tokens that the head computes in an update, and its loss and gradient."""
    with forwards(made.model) as seen:
        loss, gradient = loss_and_gradients(made, batch)
    return sum(int((inputs["labels"] != -100).sum()) for with_grad, inputs in seen if with_grad), loss, gradient


def batches_of(policy: Any, **options: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """TRL's trainer and ours with all rollouts and tokens kept, and the batch that each has of the same completions."""
    theirs, ours = made_of(TheirsLikeVLLM, policy, **options), made_of(OursLikeVLLM, policy, **options, **ALL)
    return theirs, ours, seeded(theirs), seeded(ours)


@pytest.mark.parametrize(
    ("loss", "mode", "low", "high"),
    [("dapo", "token_mask", 0.7, 1.4), ("grpo", "sequence_mask", None, 1.2), ("cispo", "token_truncate", 0.7, 1.4)],
)
def test_what_trl_multiplies_by_0_is_not_computed(saved: str, loss: str, mode: str, low: Any, high: Any) -> None:
    options = {
        "loss_type": loss, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }  # fmt: skip
    theirs, ours, batch, own = batches_of(saved, **options)
    ratio = own[RATIO].expand_as(own["completion_mask"])
    torch.testing.assert_close(own[RATIO], batch[RATIO])
    mask = own["completion_mask"].bool()
    trusted = mask & (ratio != 0)
    assert (0 < trusted.sum() < mask.sum()) == mode.endswith("_mask")
    computed, value, gradient = labels_of(ours, own)
    _, expected_value, expected = labels_of(theirs, batch)
    assert computed == trusted.sum()
    assert_same_gradient(gradient, expected)
    assert value == pytest.approx(expected_value, rel=1e-4, abs=1e-6)
    assert own["d3s_trusted"].equal(trusted)
    share = 1 - float(trusted.sum() / mask.sum())
    assert float(ours._metrics["train"]["d3s/off_policy_share"][0]) == pytest.approx(share)
    # The ratios are those of the library's rule.
    found = trusted_tokens(own[OLD], own[SAMPLED], mode, low=low or 0.0, high=high, mask=mask)
    torch.testing.assert_close(found.weight, torch.where(mask, ratio, 0.0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"beta": 0.1}, {"importance_sampling_level": "sequence", "loss_type": "grpo"}], ids=str
)  # fmt: skip
def test_where_such_a_token_has_a_gradient_it_is_computed(saved: str, options: dict[str, Any]) -> None:
    """A KL term, an entropy bonus, or a mean over the sequence reads it."""
    given = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2, **options}
    theirs, ours, batch, own = batches_of(saved, **given)
    mask = own["completion_mask"].bool()
    assert own["d3s_trusted"].equal(mask)
    computed, _, gradient = labels_of(ours, own)
    assert computed == mask.sum() > (own[RATIO] != 0).sum()
    assert_same_gradient(gradient, labels_of(theirs, batch)[2])
    share = float((mask & (own[RATIO] == 0)).sum() / mask.sum())
    assert float(ours._metrics["train"]["d3s/off_policy_share"][0]) == pytest.approx(share)


@pytest.mark.parametrize("options", [{}, {"entropy_from": "update"}], ids=str)
def test_an_update_without_a_policy_gradient_is_said_once(saved: str, options: dict[str, Any]) -> None:
    given = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 9.0, **options}
    made = made_of(OursLikeVLLM, saved, vllm_importance_sampling_clip_max=None, **given)
    batch = seeded(made)
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


def rollouts_of(logprobs: list[float | None]) -> Any:
    """A rollout_func with these log-probabilities of three tokens."""

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        ids = [[5, 6, 7 + place] for place in range(len(prompts))]
        return {"prompt_ids": [[3]] * len(ids), "completion_ids": ids, "logprobs": [logprobs] * len(ids)}

    return rollout


def test_log_probabilities_of_a_rollout_func_are_whole_where_they_are_read(saved: str) -> None:
    """TRL pads them with 0, the probability 1."""
    generated(trainer(policy=saved, rollout_func=rollouts_of([-4.0, -4.0])))
    made = trainer(policy=saved, off_policy_rule="kpop", rollout_func=rollouts_of([-4.0, -4.0]))
    with pytest.raises(ValueError, match=r"rollout_func: got 2 logprobs for 3 completion_ids of rollout 0; takes"):
        generated(made)
    options = {"off_policy_rule": "token_mask", "off_policy_low": 0.0, "off_policy_high": 1e9}
    batch = generated(trainer(policy=saved, rollout_func=rollouts_of([-4.0, None, -4.0]), **options))
    assert batch["d3s_trusted"].tolist() == [[True, False, True]] * len(batch["advantages"])


def test_over_sampled_sets(saved: str) -> None:
    """sampling_mask records with which probability a token was drawn: nothing is off-policy in the first update."""
    made = trainer(policy=saved, sampling_mask=True, top_k=5, off_policy_rule="sequence_error", off_policy_high=1.001)
    batch = generated(made)
    assert batch["d3s_trusted"].equal(batch["completion_mask"].bool())
    assert (batch[OLD] - batch[SAMPLED])[batch["d3s_trusted"]].abs().max() < 1e-4
