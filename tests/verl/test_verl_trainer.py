"""The trainer mode ``d3s_sync``: verl's own step on rows in verl's own storage.

``verl_world.py`` says what is real and what is not.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl_world import Rewards, a_step, draw_rewards, make_trainer, put_rollouts, rows_of, run_step

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels.selection import choose_rollouts
from d3s_kernels.selection.metrics import NAMES

D3S = "+trainer.v1.d3s_sync"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
FLOPS = "d3s/flops_saved"


def flat(rewards: Rewards) -> tuple[Tensor, list[str], list[str]]:
    """The rewards, uids and keys of all rollouts."""
    uids = [uid for uid, group in rewards.items() for _ in group]
    keys = [f"{uid}_{session}_0" for uid, group in rewards.items() for session in range(len(group))]
    return torch.tensor([reward for group in rewards.values() for reward in group]), uids, keys


def rollout_advantages(rewards: Tensor, uids: list[str], scale: Any = "group") -> Tensor:
    """GRPO's advantages with verl's eps, of groups that are sorted before."""
    names = list(dict.fromkeys(uids))
    label = torch.tensor([names.index(uid) for uid in uids])
    order, offsets = label.argsort(stable=True), torch.tensor([0, *label.bincount().tolist()]).cumsum(0)
    advantages = torch.empty(len(rewards))
    advantages[order] = d3s.group_advantages(rewards[order], offsets=offsets, scale=scale, eps=1e-6)
    return advantages.masked_fill(rewards.isnan(), torch.nan)


def expected_keys(rewards: Rewards, keep: int, scope: Any = "batch", scale: Any = "group") -> list[str]:
    values, uids, keys = flat(rewards)
    kept = choose_rollouts(rollout_advantages(values, uids, scale), keep, groups=uids, scope=scope)
    return [key for key, is_kept in zip(keys, kept.tolist(), strict=True) if is_kept]


def verls_advantages(rewards: Rewards, keys: list[str], scaled: bool = True) -> dict[str, float]:
    """The advantages that verl computes for these rollouts."""
    values, uids, all_keys = flat(rewards)
    rows = [all_keys.index(key) for key in keys]
    index: Any = [uids[row] for row in rows]
    result, _ = compute_grpo_outcome_advantage(
        values[rows][:, None].clone(), torch.ones(len(rows), 1), index, norm_adv_by_std_in_grpo=scaled
    )
    return dict(zip(keys, result.flatten().tolist(), strict=True))


def advantages_in(rows: dict[str, Any]) -> dict[str, float]:
    """The advantage of each row. Checks that it is the same at all of the model's tokens and 0 at a tool's token."""
    found = {}
    for key, row in rows.items():
        assert row["advantages"][0] == 0, "the token of a tool"
        assert torch.equal(row["returns"], row["advantages"])
        (found[key],) = row["advantages"][1:].unique().tolist()
    return found


def top_tokens(trainer: Any, advantages: dict[str, float], ratio: float) -> dict[str, Tensor]:
    """The tokens of the step with the highest |A| * entropy; not the first of a row, which is a tool's."""
    entropies = [trainer.actor_rollout_wg.entropies[key] for key in advantages]
    sizes = [len(entropy) for entropy in entropies]
    weights = torch.tensor([*advantages.values()]).repeat_interleave(torch.tensor(sizes))
    valid = torch.cat([torch.arange(size) > 0 for size in sizes])
    mask = reference.select_tokens(torch.cat(entropies), weights, ratio, mask=valid).mask
    return dict(zip(advantages, mask.split(sizes), strict=True))


def tokens_in_loss(keys: list[str]) -> dict[str, int]:
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["response_mask"])
    return {key: int(mask.sum()) for key, mask in zip(keys, data["response_mask"].unbind(), strict=True)}


def assert_gradient_on(trainer: Any, masks: dict[str, Tensor]) -> None:
    for key, mask in masks.items():
        assert torch.equal(trainer.actor_rollout_wg.tokens_with_gradient(key), mask)


def test_verl_is_told_sync_where_it_looks_for_that_word() -> None:
    trainer = make_trainer()
    assert trainer.trainer_mode == "sync"
    assert type(trainer.replay_buffer).__name__ == "ReplayBuffer"
    assert trainer.replay_buffer.trainer_mode == "sync"
    assert trainer.config.trainer.v1.trainer_mode == "d3s_sync", "what is logged is what was asked for"


@pytest.mark.parametrize(("scope", "loss"), [("batch", "vanilla"), ("group", "gspo")])
def test_a_step_updates_on_the_chosen_rollouts_and_tokens(queue: None, scope: str, loss: str) -> None:
    rewards = draw_rewards()
    everything = put_rollouts(rewards)
    lengths = tokens_in_loss(everything)
    trainer = make_trainer(
        f"{D3S}.rollouts_start=0.5", f"{D3S}.rollout_scope={scope}", f"{D3S}.token_ratio_start=0.3", f"{LOSS}={loss}"
    )
    batch, metrics = run_step(trainer, 6)

    kept = expected_keys(rewards, 2, scope)
    assert sorted(batch.keys) == sorted(kept)
    assert sorted(trainer.actor_rollout_wg.old_log_probs_asked_for) == sorted(kept), "dropped rollouts cost a forward"
    assert sorted(tq.kv_list()["train"]) == sorted(kept), "verl clears the rows of the batch at the end, no others"

    rows = rows_of(batch, "advantages", "returns", "response_mask", "loss_mask", "rm_scores")
    of_all = verls_advantages(rewards, everything)
    found = advantages_in(rows)
    assert found == pytest.approx({key: of_all[key] for key in kept}, abs=1e-5)

    masks = top_tokens(trainer, found, 0.3)
    for key, mask in masks.items():
        assert torch.equal(rows[key]["response_mask"], mask.long())
        assert torch.equal(rows[key]["loss_mask"], mask.long())
    assert_gradient_on(trainer, masks)
    # The mean over tokens is divided by the number of kept tokens.
    workers = trainer.actor_rollout_wg
    assert workers.denominators == [int(sum(masks[key].sum() for key in keys)) for keys in workers.updates]

    assert {name for name in metrics if name.startswith("d3s/")} == {*NAMES, "d3s/score_of_all/mean"} - {FLOPS}
    assert all(type(value) is float for name, value in metrics.items() if name.startswith("d3s/"))
    assert metrics["d3s/rollout_share"] == metrics["d3s/rollout_share_asked"] == 0.5
    assert metrics["d3s/rollouts_kept"] == len(kept) == 12
    tokens, of_kept = sum(int(mask.sum()) for mask in masks.values()), sum(lengths[key] for key in kept)
    assert metrics["d3s/tokens_kept"] == tokens
    assert metrics["d3s/head_rows_not_computed"] == of_kept - tokens
    assert metrics["d3s/tokens_not_forwarded"] == sum(lengths[key] for key in set(everything) - set(kept))
    assert metrics["d3s/token_share"] == tokens / of_kept >= metrics["d3s/token_share_asked"] == 0.3
    assert metrics["d3s/score_of_all/mean"] == pytest.approx(float(flat(rewards)[0].mean()))
    scores = torch.cat([abs(found[key]) * workers.entropies[key][masks[key]] for key in masks])
    assert metrics["d3s/threshold"] == pytest.approx(float(scores.min()), abs=1e-5)


@pytest.mark.parametrize(("rollout_rule", "token_rule"), [("highest", "entropy_quantile"), ("random", "random")])
def test_every_rule_from_a_line(queue: None, rollout_rule: Any, token_rule: Any) -> None:
    """A step keeps what the library's functions keep of the same numbers; "random" has a seed for each step."""
    rewards, step, seed = draw_rewards(), 3, 41
    trainer, batch, _ = a_step(
        rewards, f"{D3S}.rollouts_start=2", f"{D3S}.rollouts_end=2", f"{D3S}.rollout_rule={rollout_rule}",
        f"{D3S}.token_ratio_start=0.3", f"{D3S}.token_ratio_end=0.3", f"{D3S}.token_rule={token_rule}",
        f"data.seed={seed}", step=step, steps=9,
    )  # fmt: skip
    values, uids, keys = flat(rewards)

    def draws(rule: str, of_tokens: int) -> torch.Generator | None:
        of_step = 2 * (1_000_003 * seed + step) + of_tokens
        return torch.Generator().manual_seed(of_step) if rule == "random" else None

    advantages = rollout_advantages(values, uids).view(6, 4)
    kept = d3s.select_rollouts(advantages, 2, rule=rollout_rule, generator=draws(rollout_rule, 0)).flatten()
    assert sorted(batch.keys) == sorted(key for key, is_kept in zip(keys, kept.tolist(), strict=True) if is_kept)

    rows = rows_of(batch, "advantages", "response_mask")
    entropies = trainer.actor_rollout_wg.entropies
    entropy, weights = (
        torch.cat(parts) for parts in ([entropies[key] for key in rows], [row["advantages"] for row in rows.values()])
    )
    valid = torch.cat([torch.arange(len(entropies[key])) > 0 for key in rows])  # the first token is a tool's
    expected = d3s.select_tokens(
        entropy, weights, 0.3, rule=token_rule, mask=valid, generator=draws(token_rule, 1)
    ).mask
    assert torch.cat([row["response_mask"] for row in rows.values()]).bool().equal(expected)


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_all_tokens_in_the_denominator(queue: None, loss: str) -> None:
    """The masks stay as they were. Tokens that are not kept get an advantage of 0, and so no gradient."""
    rewards = draw_rewards()
    overrides = f"{D3S}.rollouts_start=2", f"{D3S}.loss_denominator=all", f"{D3S}.token_ratio_start=0.3"
    trainer, batch, _ = a_step(rewards, *overrides, f"{LOSS}={loss}")
    of_all = verls_advantages(rewards, flat(rewards)[2])
    masks = top_tokens(trainer, {key: of_all[key] for key in sorted(batch.keys)}, 0.3)
    for key, row in rows_of(batch, "advantages", "response_mask", "loss_mask").items():
        assert row["response_mask"].tolist() == row["loss_mask"].tolist() == [0] + [1] * (len(masks[key]) - 1)
        torch.testing.assert_close(row["advantages"], of_all[key] * masks[key], atol=1e-5, rtol=0)
    assert_gradient_on(trainer, masks)
    workers = trainer.actor_rollout_wg
    assert workers.denominators == [sum(len(masks[key]) - 1 for key in keys) for keys in workers.updates]


@pytest.mark.parametrize("scaled", [True, False])
def test_advantages_of_all_and_of_the_kept_differ_as_they_should(queue: None, scaled: bool) -> None:
    """On the same rollouts, one uses the statistics of the whole group, the other those of the survivors (PODS)."""
    rewards = draw_rewards()
    found = {}
    for source in ("all", "kept"):
        _, batch, _ = a_step(
            rewards, f"{D3S}.rollouts_start=3", f"{D3S}.advantages_from={source}", f"{D3S}.rollout_scope=group",
            f"algorithm.norm_adv_by_std_in_grpo={scaled}",
        )  # fmt: skip
        found[source] = advantages_in(rows_of(batch, "advantages", "returns"))
        tq.kv_clear(keys=batch.keys, partition_id="train")
    kept = expected_keys(rewards, 3, "group", "group" if scaled else "none")
    assert sorted(found["all"]) == sorted(found["kept"]) == sorted(kept)
    of_all = verls_advantages(rewards, flat(rewards)[2], scaled)
    assert found["all"] == pytest.approx({key: of_all[key] for key in kept}, abs=1e-5)
    assert found["kept"] == pytest.approx(verls_advantages(rewards, kept, scaled), abs=1e-5)
    assert max(abs(found["all"][key] - found["kept"][key]) for key in kept) > 0.01


def test_updates_are_as_many_as_without_it_and_whole(queue: None) -> None:
    """With 7 groups of 4, 3 groups in an update, verl would make 3 updates. Of the 2 x 7 kept rows each update takes 5,
    rounded up to 6 for two ranks; or, with micro-batches of 4, rounded up to 8, so that 2 updates are enough. Padding
    rows fill an update and have no effect."""
    fixed = (
        "actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    for sizes, rows in (((), [6, 6, 6]), (fixed, [8, 8])):
        rewards = draw_rewards(groups=7)
        put_rollouts(rewards)
        # All tokens are kept, because in verl an update without any would be 0 / 0.
        trainer = make_trainer(f"{D3S}.rollouts_start=2", f"{D3S}.token_ratio_start=1.0", *sizes)
        before = trainer.config.copy()
        batch, _ = run_step(trainer, 7)
        assert trainer.config == before
        workers = trainer.actor_rollout_wg
        assert [len(keys) for keys in workers.updates] == rows
        assert sorted(key for keys in workers.updates for key in keys) == sorted(batch.keys)
        padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
        assert sorted(set(batch.keys) - set(padding)) == sorted(expected_keys(rewards, 2))
        assert not any(workers.tokens_with_gradient(key).any() for key in padding)
        assert all(math.isfinite(loss) for loss in workers.losses)
        tq.kv_clear(keys=batch.keys, partition_id="train")


@pytest.mark.parametrize(("step", "rollouts", "ratio"), [(1, 2, 0.1), (6, 3, 0.2), (11, 4, 0.3)])
def test_the_schedule_follows_the_steps_that_are_done(queue: None, step: int, rollouts: int, ratio: float) -> None:
    ends = "rollouts_start=2", "rollouts_end=4", "token_ratio_start=0.1", "token_ratio_end=0.3"
    _, batch, metrics = a_step(draw_rewards(), *(f"{D3S}.{end}" for end in ends), step=step, steps=11)
    assert metrics["d3s/rollout_share_asked"] == rollouts / 4
    assert metrics["d3s/token_share_asked"] == pytest.approx(ratio)
    assert metrics["d3s/rollouts_kept"] == len(rows_of(batch, "uid")) == 6 * rollouts


def test_outputs_of_a_rollout_stay_together(queue: None) -> None:
    """verl gives the advantage of the last output to all outputs of a rollout."""
    rewards = draw_rewards()
    _, batch, metrics = a_step(rewards, f"{D3S}.rollouts_start=2", outputs=3)
    assert metrics["d3s/rollouts_kept"] == 12
    rows = rows_of(batch, "advantages", "returns")
    kept = expected_keys(rewards, 2)
    assert sorted(rows) == sorted(f"{key[:-1]}{output}" for key in kept for output in range(3))
    of_all = verls_advantages(rewards, flat(rewards)[2])
    found = advantages_in(rows)
    for key in kept:
        for output in range(3):
            assert found[f"{key[:-1]}{output}"] == pytest.approx(of_all[key], abs=1e-5)


def test_rewards_from_a_colocated_model(queue: None) -> None:
    """verl asks the reward model just before the rollouts are chosen."""
    put_rollouts({f"u{group}": [0.0] * 4 for group in range(6)}, length=5)
    rewards, order = torch.rand(24), []

    class RewardLoop:
        reward_loop_worker_handles = None

        def compute_rm_score(self, data: Any) -> Any:
            scores = torch.zeros(len(data), 5)
            scores[:, -1] = rewards
            return DataProto.from_dict(tensors={"rm_scores": scores})

    trainer = make_trainer(f"{D3S}.rollouts_start=2")
    trainer.reward_loop_manager = RewardLoop()
    sample = trainer.replay_buffer.sample

    def note_order(**options: Any) -> Any:
        batch, metrics = sample(**options)
        order.extend(batch.keys)
        return batch, metrics

    trainer.replay_buffer.sample = note_order
    batch, _ = run_step(trainer, 6)
    uids = [key.split("_")[0] for key in order]
    kept = choose_rollouts(rollout_advantages(rewards, uids), 2, groups=uids).tolist()
    assert sorted(batch.keys) == sorted(key for key, is_kept in zip(order, kept, strict=True) if is_kept)


def test_rollouts_without_a_reward_are_dropped(queue: None) -> None:
    with pytest.raises(ValueError, match="rm_scores: got no finite reward in 8 rollouts"):
        a_step({"u0": [math.nan] * 4, "u1": [math.nan] * 4})
    tq.kv_clear(keys=[f"u{group}_{session}_0" for group in range(2) for session in range(4)], partition_id="train")
    rewards = draw_rewards()
    rewards["u1"][2] = rewards["u3"][0] = math.nan
    rewards["u5"] = [math.nan] * 4
    overrides = f"{D3S}.rollouts_start=1", f"{D3S}.token_ratio_start=1.0"  # all that have an advantage
    trainer, batch, metrics = a_step(rewards, *overrides)
    values, _, keys = flat(rewards)
    good = [key for key, value in zip(keys, values.tolist(), strict=True) if not math.isnan(value)]
    rows = rows_of(batch, "advantages", "returns")
    assert sorted(rows) == sorted(good)
    assert advantages_in(rows) == pytest.approx(verls_advantages(rewards, good), abs=1e-5)
    assert metrics["d3s/score_of_all/mean"] == pytest.approx(float(values.nanmean()))
    assert all(math.isfinite(loss) for loss in trainer.actor_rollout_wg.losses)


def test_rows_in_any_order_of_groups_of_any_size(queue: None) -> None:
    rewards = {f"u{group}": torch.rand(size).tolist() for group, size in enumerate((2, 4, 3, 1))}
    values, uids, keys = flat(rewards)
    put_rollouts(rewards)
    shuffled = [keys[row] for row in torch.randperm(len(keys))]
    batch = KVBatchMeta(keys=shuffled, tags=[{} for _ in shuffled], partition_id="train")
    trainer = make_trainer(f"{D3S}.rollouts_start=2")
    kept, expected = trainer._keep_rollouts(batch, {}), expected_keys(rewards, 2)
    assert kept.keys == [key for key in shuffled if key in expected]
    advantages = dict(zip(keys, rollout_advantages(values, uids).tolist(), strict=True))
    assert trainer._advantages == {key: advantages[key] for key in expected}


def test_where_no_group_has_a_spread_there_is_no_gradient_and_no_division_by_0(queue: None) -> None:
    rewards = {f"u{group}": [1.0] * 4 for group in range(6)}
    trainer, batch, metrics = a_step(rewards, f"{D3S}.rollouts_start=2", f"{D3S}.drop_zeros=true")
    assert metrics["d3s/groups_without_spread"] == 1
    assert metrics["d3s/rollouts_kept"] == 12
    workers = trainer.actor_rollout_wg
    assert not any(workers.tokens_with_gradient(key).any() for key in batch.keys)
    assert workers.losses == [0.0] * 4  # the masks are unchanged
    assert all(row["response_mask"][1:].all() for row in rows_of(batch, "response_mask").values())


def test_verls_metrics_of_the_step(queue: None) -> None:
    """verl's metrics read the stored rows, also where the masks have holes."""
    trainer, batch, metrics = a_step(draw_rewards(), f"{D3S}.rollouts_start=2", f"{D3S}.token_scope=sequence")
    trainer._get_n_gpus_for_throughput = lambda: 1
    timing = dict.fromkeys(("step", "gen", "adv", "old_log_prob", "update_actor"), 1.0)
    trainer._compute_metrics(batch, metrics, timing, global_steps=1, epoch=0)
    assert math.isfinite(metrics["critic/score/mean"])
    assert metrics["critic/advantages/max"] > 0 > metrics["critic/advantages/min"]


REFUSED = [
    (["algorithm.rollout_correction.bypass_mode=true"], "algorithm.rollout_correction.bypass_mode: got True; .* False"),
    (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator: got 'gae'; d3s_sync takes one adv"),
    (["critic.enable=true"], "critic.enable: got True; d3s_sync takes one advantage for a rollout, and no critic"),
    (["algorithm.adv_estimator=rloo"], "algorithm.adv_estimator: got 'rloo'; d3s_sync takes 'grpo' or 'grpo_v"),
    (["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward: got True; d3s_sync takes False"),
    ([f"{LOSS}=d3s"], "policy_loss.loss_mode: got 'd3s'; d3s_sync takes another"),
    ([f"{LOSS}=dro", f"{D3S}.loss_denominator=all"], "loss_denominator: got 'all'; d3s_sync takes 'kept'"),
    ([f"{LOSS}=geo_mean", f"{D3S}.loss_denominator=all"], "loss_denominator: got 'all'; d3s_sync takes 'kept'"),
    ([f"{D3S}.rollouts_start=0"], "trainer.v1.d3s_sync.rollouts_start: got 0; takes a share in"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[overrides[0] for overrides, _ in REFUSED])
def test_options_of_verl_that_a_selection_cannot_follow_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(*overrides)


@pytest.mark.parametrize("overrides", [["algorithm.adv_estimator=rloo"], ["algorithm.use_kl_in_reward=true"]])
def test_what_needs_the_survivors_advantages(queue: None, overrides: list[str]) -> None:
    """verl computes those advantages. The rollouts are chosen by GRPO's advantages."""
    rewards = draw_rewards()
    put_rollouts(rewards)
    trainer = make_trainer(*overrides, f"{D3S}.advantages_from=kept", f"{D3S}.rollouts_start=2")
    if trainer.use_reference_policy:
        trainer.ref_in_actor = True
    batch, _ = run_step(trainer, 6)
    assert sorted(batch.keys) == sorted(expected_keys(rewards, 2))


@pytest.mark.parametrize("method", ["_balance_batch", "_compute_advantage"])
def test_a_step_that_leaves_a_choice_out_is_refused(queue: None, method: str) -> None:
    """As if verl had renamed the method that ours overrides. The optimiser has not moved then."""
    put_rollouts(draw_rewards())
    trainer = make_trainer()
    setattr(trainer, method, partial(getattr(PPOTrainerSync, method), trainer))
    with pytest.raises(RuntimeError, match=f"were chosen in this step: verl has not called {method}"):
        run_step(trainer, 6)


@pytest.mark.parametrize(("denominator", "outputs"), [("kept", 1), ("all", 1), ("kept", 2)])
def test_shared_tokens_get_no_gradient(queue: None, denominator: str, outputs: int) -> None:
    """All responses count up from 0, so a wrong one has tokens of its own only behind the longest right one. Right
    rollouts that are dropped count too. The outputs of a rollout are one response.
    """
    keys = put_rollouts({f"u{group}": [1.0, 1.0, 1.0, 0.0] for group in range(6)}, outputs=outputs)
    lengths = tokens_in_loss(keys)
    options = f"{D3S}.rollouts_start=2", f"{D3S}.token_ratio_start=1.0", f"{D3S}.loss_denominator={denominator}"
    trainer = make_trainer(*options, f"{D3S}.rollout_scope=group", f"{D3S}.drop_shared_tokens=true")
    batch, metrics = run_step(trainer, 6)

    rows = [torch.arange(1, lengths[key] + 1) for key in keys]
    offsets = torch.tensor([0, *(sum(map(len, rows[row : row + outputs])) for row in range(0, len(rows), outputs))])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0]).expand(6, 4)
    shared = reference.shared_tokens(torch.cat(rows), advantages, offsets=offsets.cumsum(0))
    of_rows = dict(zip(keys, shared.split([len(row) for row in rows]), strict=True))
    assert_gradient_on(trainer, {key: torch.cat([torch.tensor([False]), ~of_rows[key]]) for key in batch.keys})
    marked, total = sum(int(of_rows[key].sum()) for key in batch.keys), sum(lengths[key] for key in batch.keys)
    assert metrics["d3s/shared_share"] == pytest.approx(marked / total)
    assert 0 < marked < total
    assert sum(trainer.actor_rollout_wg.denominators) == (total - marked if denominator == "kept" else total)
