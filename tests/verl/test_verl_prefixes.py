"""Rollouts that verl's trainer mode cuts at random: no pass gets what comes after a cut, and the tokens before it have
the weights with which the mean of the gradients over all cuts is the gradient of all tokens (tests/test_prefixes.py).

``verl_world.py`` says what is real and what is not. Old log-probabilities differ from those of the update here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

import transfer_queue as tq
import verl_world
from verl_world import Rewards, make_trainer, put_rollouts, rows_of, run_step

from d3s_kernels import reference
from d3s_kernels.integrations.verl.cuts import shortened

D3S = "+trainer.v1.d3s_sync"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
AGG = "actor_rollout_ref.actor.loss_agg_mode"
RULE, WITH_LOG_PROBS = f"{D3S}.off_policy_rule", "actor_rollout_ref.rollout.calculate_log_probs=true"
ALL_ROLLOUTS = f"{D3S}.rollouts_start=1.0"
ONE_UPDATE = "actor_rollout_ref.actor.ppo_mini_batch_size=6"
PREFIX, COMBINED = f"{D3S}.token_rule=prefix", f"{D3S}.token_rule=prefix_advantage_entropy"
EVERYTHING = f"{D3S}.token_ratio_start=1.0", f"{D3S}.loss_denominator=all"
REWARDS = {f"u{group}": [0.0, 1.0, 0.25 * group, 0.5] for group in range(2)}


class Run:
    """A step: its trainer, batch, metrics, the gradient of each row, and the lengths of the rows in each pass."""

    def __init__(self, *overrides: str, rewards: Rewards = REWARDS, ranks: int = 2, **rollouts: Any) -> None:
        torch.manual_seed(7)  # the same rows and policy in each run
        self.lengths: dict[str, dict[str, tuple[int, int]]] = {"old": {}, "update": {}}
        keys = put_rollouts(rewards, **rollouts)
        sizes = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["responses"])["responses"].unbind()
        self.trainer = make_trainer(ALL_ROLLOUTS, ONE_UPDATE, *overrides)
        self.trainer.ref_in_actor = True  # the policy is its own reference, before it moves
        workers = self.trainer.actor_rollout_wg
        workers.ranks, workers._dispatch_info = ranks, {"actor": list(range(ranks))}
        for key, response in zip(keys, sizes, strict=True):
            workers.log_probs[key] = (-torch.rand(len(response)) - 0.1).requires_grad_()
            workers.entropies[key] = torch.rand(len(response)) + 0.1
            workers.entropies_of_update[key] = torch.rand(len(response), requires_grad=True)
        moves = {key: 0.3 * torch.randn(len(table)) for key, table in workers.log_probs.items()}
        compute, update = workers.compute_log_prob, workers.update_actor

        def compute_log_prob(batch: Any) -> Any:
            self._note("old", batch)
            return compute(batch)

        def update_actor(batch: Any) -> Any:
            self._note("update", batch)
            with torch.no_grad():
                for key, move in moves.items():
                    workers.log_probs[key] += move
            return update(batch)

        workers.compute_log_prob, workers.update_actor = compute_log_prob, update_actor
        self.batch, self.metrics = run_step(self.trainer, len(rewards))
        self.gradients = {key: _gradient(workers.log_probs[key]) for key in keys}
        self.of_entropy = {key: _gradient(workers.entropies_of_update[key]) for key in keys}
        self.rows = rows_of(self.batch, "response_mask", "loss_mask", "rollout_is_weights", "responses")
        tq.kv_clear(keys=self.batch.keys, partition_id="train")

    def _note(self, when: str, batch: Any) -> None:
        fields = ["prompts", "responses", "input_ids", "position_ids"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        lengths = (data[name].offsets().diff().tolist() for name in fields)
        for key, prompt, response, whole, positions in zip(batch.keys, *lengths, strict=True):
            assert prompt + response == whole == positions
            self.lengths[when][key] = response


def _gradient(table: Tensor) -> Tensor:
    return torch.zeros_like(table) if table.grad is None else table.grad


def weights_of(lengths: dict[str, int], seed: int = 0) -> dict[str, Tensor]:
    """1 / P(before the cut) of each token, for the ratio 0.5; the first token is a tool's. Rollouts have random numbers
    in the order of their names; outputs of a rollout have the same one."""
    names = sorted({key.rsplit("_", 1)[0] for key in lengths})
    generator = torch.Generator().manual_seed(2 * (1_000_003 * seed + 1) + 1)
    draws = dict(zip(names, torch.rand(len(names), 1, dtype=torch.float64, generator=generator), strict=True))
    found = {}
    for key, length in lengths.items():
        mask = torch.arange(length)[None] > 0
        found[key] = reference.random_prefixes(mask, 0.5, draws=draws[key.rsplit("_", 1)[0]]).weight[0]
    return found


def lengths_of(run: Run) -> dict[str, int]:
    return {key: len(gradient) for key, gradient in run.gradients.items()}


def last(weight: Tensor) -> int:
    return int(weight.nonzero()[-1]) + 1


CASES: dict[str, tuple[str, ...]] = {
    "token-sum": (f"{AGG}=token-sum",),
    "mean of rows": (f"{AGG}=seq-mean-token-mean",),
    "rows divided by a number": (f"{AGG}=seq-mean-token-sum-norm", "actor_rollout_ref.actor.loss_scale_factor=9"),
    "rows divided by the width": (f"{AGG}=seq-mean-token-sum-norm",),
    "dro": (f"{LOSS}=dro", "+actor_rollout_ref.actor.policy_loss.dro_beta=0.5"),
    "a ratio of sequences": (f"{LOSS}=gspo", f"{AGG}=seq-mean-token-mean"),
    "kl_cov": (f"{LOSS}=kl_cov",),
    "rows of a sampled estimator": (f"{D3S}.advantages_from=kept", "algorithm.adv_estimator=rloo"),
}
WHOLE_ROWS = "rows divided by the width", "a ratio of sequences", "kl_cov"


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_weighted_tokens(queue: None, name: str) -> None:
    options = CASES[name]
    # Losses whose gradient is not 0 at advantage 0 refuse loss_denominator=all; here all tokens are kept.
    full = Run(f"{D3S}.token_ratio_start=1.0", f"{D3S}.token_ratio_end=1.0", *options)
    ours = Run(PREFIX, *options)
    weights = weights_of(lengths_of(full))
    for key, weight in weights.items():
        assert full.gradients[key].norm() > 0
        torch.testing.assert_close(ours.gradients[key], full.gradients[key] * weight, rtol=1e-4, atol=1e-7)
        shorter = len(weight) if name in WHOLE_ROWS else last(weight)
        early = name not in ("rows of a sampled estimator", *WHOLE_ROWS)
        assert ours.lengths["update"][key] == shorter
        assert ours.lengths["old"][key] == (shorter if early else len(weight))
    assert sum(last(weight) for weight in weights.values()) < sum(map(len, weights.values()))


CORRECTION = "algorithm.rollout_correction"
REJECTING: dict[str, tuple[str, ...]] = {
    "token_mask": (f"{RULE}=token_mask", f"{D3S}.off_policy_high=1.2"),
    "token_truncate": (f"{RULE}=token_truncate", f"{D3S}.off_policy_high=1.2"),
    "verl's": (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.8_1.25"),
}


@pytest.mark.parametrize("name", REJECTING)
def test_cuts_after_rejections(queue: None, name: str) -> None:
    """The mask of the remaining tokens does not depend on the cuts, which are among these tokens."""
    options = f"{AGG}=seq-mean-token-mean", WITH_LOG_PROBS, *REJECTING[name]
    full, ours = Run(*EVERYTHING, *options), Run(PREFIX, *options)
    trusted = {key: row["response_mask"] for key, row in full.rows.items()}
    assert name == "token_truncate" or any((mask[1:] == 0).any() for mask in trusted.values())
    as_if = weights_of({key: int(mask.sum()) + 1 for key, mask in trusted.items()})
    for key, mask in trusted.items():
        weight = torch.zeros(len(mask)).masked_scatter(mask.bool(), as_if[key][1:])
        torch.testing.assert_close(ours.gradients[key], full.gradients[key] * weight, rtol=1e-4, atol=1e-7)
        assert ours.lengths["old"][key] == len(mask)
        assert ours.lengths["update"][key] == (last(weight) if mask.any() else 1)


def test_cuts_do_not_depend_on_the_ranks(queue: None) -> None:
    runs = [Run(PREFIX, ranks=ranks) for ranks in (1, 3)]
    assert [len(run.batch) for run in runs] == [8, 9], "one row is padding"
    for key, row in runs[0].rows.items():
        assert row["rollout_is_weights"].equal(runs[1].rows[key]["rollout_is_weights"])
        torch.testing.assert_close(runs[1].gradients[key], runs[0].gradients[key], rtol=1e-4, atol=1e-7)


def test_outputs_of_a_rollout_have_one_random_number(queue: None) -> None:
    run = Run(PREFIX, "data.seed=5", outputs=2)
    weights = weights_of(lengths_of(run), seed=5)
    assert len(weights) == 16
    for key, row in run.rows.items():
        torch.testing.assert_close(row["rollout_is_weights"], weights[key][: last(weights[key])])


def test_tokens_are_ranked_before_the_cuts_alone(queue: None) -> None:
    full, ours = Run(*EVERYTHING), Run(COMBINED, f"{D3S}.token_ratio_start=0.25")
    weights = weights_of(lengths_of(full))
    sizes = [len(weight) for weight in weights.values()]
    entropies = torch.cat([ours.trainer.actor_rollout_wg.entropies[key] for key in weights])
    advantages = torch.tensor([ours.trainer._advantages[key] for key in weights])
    of_tokens, before = advantages.repeat_interleave(torch.tensor(sizes)), torch.cat([*weights.values()]) > 0
    kept = reference.select_tokens(entropies, of_tokens, 0.25, mask=before).mask
    for (key, weight), places in zip(weights.items(), kept.split(sizes), strict=True):
        expected = full.gradients[key] * weight * places
        torch.testing.assert_close(ours.gradients[key], expected, rtol=1e-4, atol=1e-7)
        assert ours.lengths["old"][key] == last(weight)
        assert ours.lengths["update"][key] == (last(places) if places.any() else 1)
    assert ours.metrics["d3s/tokens_kept"] == kept.sum()
    assert ours.metrics["d3s/token_share_asked"] == pytest.approx(0.125)
    everything = sum(len(weight) - 1 for weight in weights.values())
    assert ours.metrics["d3s/token_share"] == pytest.approx(int(kept.sum()) / everything)
    assert ours.metrics["d3s/head_rows_not_computed"] == everything - kept.sum()
    assert "d3s/off_policy_share" not in ours.metrics


OTHERS = "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.2"


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_kl_loss_and_entropy_bonus(queue: None, loss: str) -> None:
    """They have the same weights, with their own denominators; whole rows have them at all tokens."""
    theirs = f"{LOSS}={loss}"
    policy, full = Run(*EVERYTHING, theirs), Run(*EVERYTHING, *OTHERS, theirs)
    ours, ranked = Run(PREFIX, *OTHERS, theirs), Run(COMBINED, *OTHERS, theirs)
    for key, weight in weights_of(lengths_of(full)).items():
        of_kl = full.gradients[key] - policy.gradients[key]
        assert of_kl.norm() > 0
        of_others = torch.ones_like(weight) if loss == "gspo" else weight
        expected = policy.gradients[key] * weight + of_kl * of_others
        torch.testing.assert_close(ours.gradients[key], expected, rtol=1e-4, atol=1e-6)
        for run in (ours, ranked):
            torch.testing.assert_close(run.of_entropy[key], full.of_entropy[key] * of_others, rtol=1e-4, atol=1e-6)
            assert run.lengths["update"][key] == (len(weight) if loss == "gspo" else last(weight))


def test_workers_that_do_not_weigh_the_kl_loss_are_found_out(queue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_world, "ppo_loss", verl_world.ppo_loss.__wrapped__)
    with pytest.raises(RuntimeError, match="token_rule=prefix: the workers have not weighed the KL loss"):
        Run(PREFIX, OTHERS[0])


def test_a_row_is_shortened_in_all_of_its_fields() -> None:
    row: dict[str, Any] = {
        "prompts": torch.arange(2), "responses": torch.arange(4), "response_mask": torch.tensor([0, 1, 1, 1]),
        "loss_mask": torch.tensor([0, 1, 1, 1]), "rm_scores": torch.tensor([0.0, 0.5, 0.0, 2.0]),
        "input_ids": torch.arange(6), "position_ids": torch.arange(18).view(3, 6),
        "routed_experts": torch.arange(12).view(6, 1, 2), "multi_modal_inputs": {},
        "extra_fields": {"sets": [[0], [1], [2], [3]], "other": 5},
    }  # fmt: skip
    changed = shortened(row, 2, "sets")
    assert {name: value.tolist() for name, value in changed.items() if isinstance(value, Tensor)} == {
        "responses": [0, 1], "response_mask": [0, 1], "loss_mask": [0, 3], "rm_scores": [0.0, 2.5],
        "input_ids": [0, 1, 2, 3], "position_ids": [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]],
        "routed_experts": [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]],
    }  # fmt: skip
    assert changed["extra_fields"] == {"sets": [[0], [1]], "other": 5}
    assert row["loss_mask"].tolist() == [0, 1, 1, 1]
    assert shortened(row | {"multi_modal_inputs": {"pixel_values": torch.ones(1)}}, 2, None) == {}
    assert shortened(row, 4, None) == {}


REFUSED = [
    ([f"{LOSS}=geo_mean"], "loss_mode: got 'geo_mean'; d3s_sync takes 'vanilla' or .* with token_rule=prefix"),
    (["algorithm.rollout_correction.rollout_is=token"], "rollout_is: got 'token'; d3s_sync takes null with token_rule"),
    (["distillation.enabled=true"], "distillation.enabled: got True; d3s_sync takes False with token_rule=prefix"),
    (["actor_rollout_ref.model.mtp.enable_train=true"], "enable_train: got True; d3s_sync takes False with token_rule"),
    ([f"{D3S}.loss_denominator=kept"], "loss_denominator: got 'kept' with token_rule 'prefix'; takes 'all'"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[overrides[0] for overrides, _ in REFUSED])
def test_options_that_do_not_go_with_cuts_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(PREFIX, *overrides)
