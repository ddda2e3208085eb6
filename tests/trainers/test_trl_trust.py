"""What TRL's update says of tokens whose probability in the policy is far from the one they were sampled with. Which of
them it computes: test_trl_sweep.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("trl")
from tiny_trl import generated, trainer


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
    batch = generated(made)
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
