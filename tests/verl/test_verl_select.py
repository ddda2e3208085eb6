"""``select`` on verl's own ``DataProto``."""

import math
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from kept_rows import choose_rows
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl.protocol import DataProto

from d3s_kernels.integrations.verl import select
from d3s_kernels.integrations.verl.rows import rollout_advantages

UIDS = [str(uuid.uuid4()) for _ in range(3)]


def make_batch(**tensors: Tensor) -> Any:
    """Twelve rollouts of groups of 3, 4 and 5, shuffled."""
    uids = np.array([UIDS[i] for i in (2, 1, 0, 1, 2, 2, 0, 1, 2, 0, 1, 2)], dtype=object)
    tensors = {"row": torch.arange(12)[:, None], **tensors}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def per_token(rewards: Tensor, length: int = 5) -> Tensor:
    """Outcome rewards as in verl: at one token, with zeros elsewhere."""
    scores = torch.zeros(len(rewards), length)
    scores[:, -1] = rewards
    return scores


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("name", ["token_level_rewards", "token_level_scores"])
def test_by_rewards(scope: Any, name: str) -> None:
    rewards = torch.randn(12)
    batch = make_batch(**{name: per_token(rewards)})
    uids = batch.non_tensor_batch["uid"]
    rows = select(batch, 2, scope=scope)
    assert rows.tolist() == choose_rows(rollout_advantages(rewards, uids), uids, 2, scope=scope).tolist()
    kept = batch.select_idxs(rows)
    assert kept.batch["row"].flatten().tolist() == rows.tolist()
    assert kept.non_tensor_batch["uid"].tolist() == [uids[row] for row in rows]
    if scope == "group":
        assert all((kept.non_tensor_batch["uid"] == uid).sum() == 2 for uid in UIDS)


def test_rewards_count_before_scores_and_advantages_before_both() -> None:
    """Rewards include the KL penalty; scores do not."""
    scores, rewards, advantages = torch.randn(3, 12)
    mask = torch.ones(12, 5)
    uids = make_batch().non_tensor_batch["uid"]
    both = {"token_level_scores": per_token(scores), "token_level_rewards": per_token(rewards)}
    of = lambda values: choose_rows(values, uids, 1).tolist()  # noqa: E731
    by_scores = of(rollout_advantages(scores, uids))
    by_rewards = of(rollout_advantages(rewards, uids))
    assert select(make_batch(**both), 1).tolist() == by_rewards
    assert select(make_batch(token_level_scores=per_token(scores)), 1).tolist() == by_scores
    both |= {"advantages": advantages[:, None] * mask, "response_mask": mask}
    assert select(make_batch(**both), 1).tolist() == of(advantages)


def test_advantages_in_the_batch_travel_with_the_rows() -> None:
    """Equal advantages tie for responses of any length, because the mean over the mask does not round."""
    lengths = torch.randint(1, 50, (12,))
    mask = torch.arange(50) < lengths[:, None]
    advantages = torch.tensor([0.1, -0.1]).repeat(6)
    beyond = torch.where(mask, 0.0, math.nan)  # values outside the mask are not read
    batch = make_batch(advantages=advantages[:, None] + beyond, response_mask=mask.long())
    rows = select(batch, 2)
    assert rows.tolist() == choose_rows(advantages, batch.non_tensor_batch["uid"], 2).tolist()
    kept = batch.select_idxs(rows)
    for row, mask_of, values in zip(rows, kept.batch["response_mask"], kept.batch["advantages"], strict=True):
        assert (values[mask_of.bool()] == advantages[row]).all()


def test_rounded_up_to_a_multiple() -> None:
    batch = make_batch(token_level_scores=per_token(torch.randn(12)))
    assert [len(select(batch, 1, multiple_of=multiple)) for multiple in (1, 2, 4, 12)] == [3, 4, 4, 12]
    with pytest.raises(ValueError, match="multiple_of: got 16"):
        select(batch, 1, multiple_of=16)


def test_scale_none_is_dr_grpo() -> None:
    """Without scaling, the group with the wide rewards takes the places of the other groups."""
    rewards = torch.tensor([0.0, 1.0, 0.2, 0.0, 0.0, 0.0, 0.3, 0.0, 9.0, -0.2, 0.0, 0.0])
    batch = make_batch(token_level_scores=per_token(rewards))
    uids = batch.non_tensor_batch["uid"]
    raw = select(batch, 1, scale="none").tolist()
    assert raw == choose_rows(rollout_advantages(rewards, uids, scale="none"), uids, 1).tolist()
    assert raw != select(batch, 1).tolist()


def test_what_a_batch_has_to_have() -> None:
    with pytest.raises(ValueError, match="batch: has 'row'; takes 'advantages' and 'response_mask', 'token_level_rew"):
        select(make_batch(), 1)
    with pytest.raises(ValueError, match="batch: has 'advantages', 'row'; takes"):
        select(make_batch(advantages=torch.zeros(12, 5)), 1)
    with pytest.raises(ValueError, match="batch: has nothing; takes a non_tensor_batch with 'uid'"):
        select(DataProto.from_dict(tensors={"token_level_scores": torch.zeros(2, 3)}), 1)
