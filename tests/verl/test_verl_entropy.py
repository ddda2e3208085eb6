"""How entropies reach a policy loss: from verl's storage or the model's output, through verl's own ``ppo_loss``."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

import transfer_queue as tq
from verl.trainer.distillation.losses import ppo_loss as ppo_loss_of_distillation
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils import losses
from verl.workers.utils.losses import ppo_loss
from verl_world import make_trainer, put_rollouts, rows_of, run_step

from d3s_kernels import topk_mask
from d3s_kernels.integrations.verl import entropy, plugin

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
TARGET = f"{POLICY_LOSS}._target_=d3s_kernels.integrations.verl"
ESPO = (f"{TARGET}.loss.D3SPolicyLossConfig", f"{POLICY_LOSS}.loss_mode=espo", f"+{POLICY_LOSS}.vocab_size=1000")
ESPO_WITH_D3S = (
    f"{TARGET}.loss.D3SPolicyLossConfig", f"{POLICY_LOSS}.loss_mode=d3s", f"+{POLICY_LOSS}.base_loss=espo",
    f"+{POLICY_LOSS}.vocab_size=1000",
)  # fmt: skip
UPDATE = (f"+{POLICY_LOSS}.entropy_source=update", "actor_rollout_ref.actor.calculate_entropy=true")


def a_step(*overrides: str, mode: str = "sync") -> tuple[Any, Any]:
    """Runs a step of verl's synchronous trainer, or of another mode, on 6 groups of 4 rows."""
    put_rollouts({f"u{group}": torch.rand(4).tolist() for group in range(6)})
    trainer = make_trainer(f"trainer.v1.trainer_mode={mode}", *overrides)
    batch, _ = run_step(trainer, 6)
    return trainer, batch


def expected_gradient(entropies: Tensor, advantage: float) -> Tensor:
    """Eq. 5 before the policy moves, in an update of 12 rows. The model did not produce the first token."""
    mask = torch.arange(len(entropies)) > 0
    high = topk_mask(entropies, 0.2, mask=mask)
    groups = [group for group in (high, mask & ~high) if group.any()]
    return sum(-advantage / (len(groups) * int(group.sum())) / 12 * group for group in groups)


@pytest.mark.parametrize("source", ["old", "update"])
def test_groups_by_the_entropy_of_the_policy(queue: None, source: str) -> None:
    trainer, batch = a_step(*ESPO, *(UPDATE if source == "update" else ()))
    workers = trainer.actor_rollout_wg
    tables = {"old": workers.entropies, "update": workers.entropies_of_update}
    for key, row in rows_of(batch, "advantages").items():
        expected = expected_gradient(tables[source][key], float(row["advantages"][1]))
        torch.testing.assert_close(workers.log_probs[key].grad, expected, rtol=1e-5, atol=1e-7)


def test_epsilon_by_the_entropy_of_the_policy(queue: None) -> None:
    trainer, _ = a_step(*ESPO)
    workers = trainer.actor_rollout_wg
    found = [metrics["actor/espo_epsilon"].aggregate() for metrics in workers.metrics]
    parts = [keys[first : first + 6] for keys in workers.updates for first in (0, 6)]  # on two ranks
    for epsilon, keys in zip(found, parts, strict=True):
        mean = torch.cat([workers.entropies[key][1:] for key in keys]).mean()  # groups' means, weighted by their tokens
        assert epsilon == pytest.approx(0.02 / math.log(1000) * float(mean), rel=1e-5)


def test_espo_with_d3s(queue: None) -> None:
    """For the tokens that D3S keeps, the gradient is the same as without D3S."""
    trainer, batch = a_step(*ESPO_WITH_D3S, f"+{POLICY_LOSS}.token_ratio=0.3", f"+{POLICY_LOSS}.token_scope=sequence")
    workers = trainer.actor_rollout_wg
    for key, row in rows_of(batch, "advantages").items():
        log_probs = workers.log_probs[key].detach()
        kept = topk_mask(-log_probs, 0.3, mask=torch.arange(len(log_probs)) > 0)
        expected = expected_gradient(workers.entropies[key], float(row["advantages"][1])) * kept
        torch.testing.assert_close(workers.log_probs[key].grad, expected, rtol=1e-5, atol=1e-7)


def test_in_the_trainer_mode_of_d3s(queue: None) -> None:
    """The masks are unchanged, so groups and ratios are of all tokens; only the kept ones have a gradient."""
    trainer, batch = a_step(
        *ESPO, "+trainer.v1.d3s_sync.loss_denominator=all", "+trainer.v1.d3s_sync.token_ratio_start=0.3",
        "+trainer.v1.d3s_sync.rollouts_start=1", mode="d3s_sync",
    )  # fmt: skip
    workers = trainer.actor_rollout_wg
    kept = []
    for key, row in rows_of(batch, "advantages").items():
        advantages = row["advantages"]
        expected = expected_gradient(workers.entropies[key], 1.0) * advantages
        torch.testing.assert_close(workers.log_probs[key].grad, expected, rtol=1e-5, atol=1e-7)
        kept.append(advantages[1:] != 0)
    assert float(torch.cat(kept).float().mean()) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    "sizes",
    [
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 8},
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40},
    ],
)
def test_micro_batches(queue: None, sizes: dict[str, Any]) -> None:
    """With verl's own division into micro-batches, entropies stay with their rows, and the gradients add up."""
    trainer, batch = a_step(*ESPO)
    workers = trainer.actor_rollout_wg
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=24, **sizes)
    parts, rows = prepare_micro_batches(data)
    assert len(parts) > 2
    rows = rows or torch.arange(24).split(8)
    gradients = []
    for division in ([(data, range(24))], zip(parts, rows, strict=True)):
        for key in batch.keys:
            workers.log_probs[key].grad = None
        for part, of_rows in division:
            keys = [batch.keys[row] for row in of_rows]
            output = {"log_probs": workers._of_whole_sequences(workers.log_probs, keys, part["prompts"])}
            ppo_loss(workers.config, output, part)[0].backward()
        gradients.append(torch.cat([workers.log_probs[key].grad for key in batch.keys]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-8)
    assert gradients[0].any()


def test_no_entropy_of_the_old_policy(queue: None) -> None:
    """There is none with verl's older ray trainer, which drops it, and in bypass mode, which computes none."""
    trainer, batch = a_step(*ESPO)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=24)
    del data["entropy"]
    workers = trainer.actor_rollout_wg
    output = {"log_probs": workers._of_whole_sequences(workers.log_probs, batch.keys, data["prompts"])}
    with pytest.raises(ValueError, match="entropy_source: got 'old', and rows without it; takes 'update' or 'surpr"):
        ppo_loss(workers.config, output, data)


def test_no_entropy_of_the_update(queue: None) -> None:
    with pytest.raises(ValueError, match=r"'update', which takes actor_rollout_ref\.actor\.calculate_entropy=true"):
        a_step(*ESPO, UPDATE[0])


def test_entropies_of_whole_sequences_are_refused(queue: None) -> None:
    """The workers first store entropies of whole sequences; verl's trainer then cuts off the prompts."""
    trainer, batch = a_step(*ESPO)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=24)
    workers = trainer.actor_rollout_wg
    data["entropy"] = workers._of_whole_sequences(workers.entropies, batch.keys, data["prompts"])
    output = {"log_probs": workers._of_whole_sequences(workers.log_probs, batch.keys, data["prompts"])}
    with pytest.raises(ValueError, match="entropy: got shape"):
        ppo_loss(workers.config, output, data)


def test_all_who_call_it_have_the_wrapper() -> None:
    from verl.workers import engine_workers

    assert engine_workers.ppo_loss is ppo_loss_of_distillation is ppo_loss
    assert ppo_loss.__module__ == losses.__name__
    assert ppo_loss.__wrapped__.__code__.co_filename == losses.__file__


def test_another_ppo_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ppo_loss", lambda data, model_output: None)
    with pytest.raises(RuntimeError, match=r"ppo_loss takes \['data', 'model_output'\]; expected"):
        plugin._replace(entropy.REPLACED[0])
