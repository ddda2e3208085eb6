"""How entropies reach a policy loss: from verl's storage or the model's output, through verl's own ``ppo_loss``."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

import transfer_queue as tq
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss
from verl_world import a_step, draw_rewards, rows_of

from d3s_kernels import topk_mask

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
TARGET = f"{POLICY_LOSS}._target_=d3s_kernels.integrations.verl"
ESPO = (f"{TARGET}.loss.D3SPolicyLossConfig", f"{POLICY_LOSS}.loss_mode=espo", f"+{POLICY_LOSS}.vocab_size=1000")
WITH_D3S = (
    f"{POLICY_LOSS}.loss_mode=d3s", f"+{POLICY_LOSS}.base_loss=espo", f"+{POLICY_LOSS}.token_ratio=0.3",
    f"+{POLICY_LOSS}.token_scope=sequence",
)  # fmt: skip
SYNC = "trainer.v1.trainer_mode=sync"  # verl's own
UPDATE = (f"+{POLICY_LOSS}.entropy_source=update", "actor_rollout_ref.actor.calculate_entropy=true")


def data_of(batch: Any, **options: Any) -> Any:
    """The rows of a step, as verl hands them to a worker."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=24, **options)
    return data


def loss_of(workers: Any, keys: list[str], data: Any) -> Any:
    output = {"log_probs": workers._of_whole_sequences(workers.log_probs, keys, data)}
    return ppo_loss(workers.config, output, data)[0]


def expected_gradient(entropies: Tensor, advantage: float) -> Tensor:
    """Eq. 5 before the policy moves, in an update of 12 rows. The model did not produce the first token."""
    mask = torch.arange(len(entropies)) > 0
    high = topk_mask(entropies, 0.2, mask=mask)
    groups = [group for group in (high, mask & ~high) if group.any()]
    return sum(-advantage / (len(groups) * int(group.sum())) / 12 * group for group in groups)


@pytest.mark.parametrize("more", [(), UPDATE, WITH_D3S], ids=["old", "update", "with d3s"])
def test_groups_and_epsilon_by_the_entropy_of_the_policy(queue: None, more: tuple[str, ...]) -> None:
    """For the tokens that D3S keeps, the gradient is the same as without D3S."""
    trainer, batch, _ = a_step(draw_rewards(), SYNC, *ESPO, *more)
    workers = trainer.actor_rollout_wg
    entropies = workers.entropies_of_update if more is UPDATE else workers.entropies
    for key, row in rows_of(batch, "advantages").items():
        expected = expected_gradient(entropies[key], float(row["advantages"][1]))
        if more is WITH_D3S:
            log_probs = workers.log_probs[key].detach()
            expected *= topk_mask(-log_probs, 0.3, mask=torch.arange(len(log_probs)) > 0)
        torch.testing.assert_close(workers.log_probs[key].grad, expected, rtol=1e-5, atol=1e-7)
    found = [metrics["actor/espo_epsilon"].aggregate() for metrics in workers.metrics]
    parts = [keys[first : first + 6] for keys in workers.updates for first in (0, 6)]  # on two ranks
    for epsilon, keys in zip(found, parts, strict=True):
        mean = torch.cat([entropies[key][1:] for key in keys]).mean()  # groups' means, weighted by their tokens
        assert epsilon == pytest.approx(0.02 / math.log(1000) * float(mean), rel=1e-5)


def test_in_the_trainer_mode_of_d3s(queue: None) -> None:
    """The masks are unchanged, so groups and ratios are of all tokens; only the kept ones have a gradient."""
    trainer, batch, _ = a_step(
        draw_rewards(), *ESPO, "+trainer.v1.d3s_sync.loss_denominator=all",
        "+trainer.v1.d3s_sync.token_ratio_start=0.3", "+trainer.v1.d3s_sync.rollouts_start=1",
    )  # fmt: skip
    workers = trainer.actor_rollout_wg
    kept = []
    for key, row in rows_of(batch, "advantages").items():
        advantages = row["advantages"]
        expected = expected_gradient(workers.entropies[key], 1.0) * advantages
        torch.testing.assert_close(workers.log_probs[key].grad, expected, rtol=1e-5, atol=1e-7)
        kept.append(advantages[1:] != 0)
    assert float(torch.cat(kept).float().mean()) == pytest.approx(0.3, abs=0.03)


def test_entropies_of_the_old_policy_that_are_refused(queue: None) -> None:
    """None with verl's older ray trainer, which drops it, and in bypass mode, which computes none. The workers first
    store entropies of whole sequences; verl's trainer then cuts off the prompts."""
    with pytest.raises(ValueError, match=r"'update', which takes actor_rollout_ref\.actor\.calculate_entropy=true"):
        a_step(draw_rewards(), SYNC, *ESPO, UPDATE[0])
    tq.kv_clear(keys=list(tq.kv_list()["train"]), partition_id="train")
    trainer, batch, _ = a_step(draw_rewards(), SYNC, *ESPO)
    workers, data = trainer.actor_rollout_wg, data_of(batch)
    data["entropy"] = workers._of_whole_sequences(workers.entropies, batch.keys, data)
    with pytest.raises(ValueError, match="entropy: got shape"):
        loss_of(workers, batch.keys, data)
    del data["entropy"]
    with pytest.raises(ValueError, match="entropy_source: got 'old', and rows without it; takes 'update' or 'surpr"):
        loss_of(workers, batch.keys, data)
