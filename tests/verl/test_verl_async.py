"""verl's asynchronous trainers: the modes ``d3s_colocate_async`` and ``d3s_separate_async`` on verl's own step, and the
older trainers ``fully_async_policy`` and ``one_step_off_policy``, which refuse our modes.

``verl_world.py`` says what is real and what is not.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

import transfer_queue as tq
import verl
from composed import composed
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.experimental.fully_async_policy import fully_async_main
from verl.experimental.one_step_off_policy import main_ppo as one_step_main
from verl.trainer import main_ppo
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl_losses import options
from verl_world import BASE, Workers, draw_rewards, make_trainer, put_rollouts, rows_of

COLOCATED, SEPARATE = "d3s_colocate_async", "d3s_separate_async"
CHOICE = {"rollouts_start": 2, "rollout_scope": "group", "token_ratio_start": 0.3}
SEPARATELY = (
    f"trainer.v1.trainer_mode={SEPARATE}", "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", "trainer.v1.sampler.max_off_policy_threshold=2",
)  # fmt: skip


class VersionedWorkers(Workers):
    """Workers that count their updates, and save and restore that number as verl's save and restore the weights."""

    version = 0

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.saved: dict[int, int] = {}
        self.asked: list[tuple[int, list[str]]] = []  # the version and the rows of each pass for old log-probabilities

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        self.asked.append((self.version, list(batch.keys)))
        return super().compute_log_prob(batch)

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        self.version += 1
        return super().update_actor(batch)

    def save_model_to_cpu(self, name: int) -> None:
        self.saved[name] = self.version

    def restore_model_from_cpu(self, name: int) -> None:
        self.version = self.saved[name]

    def clear_cpu_model(self, name: int) -> None:
        del self.saved[name]


def an_async_trainer(mode: str, *overrides: str) -> Any:
    trainer = make_trainer(*overrides, *(f"+trainer.v1.{mode}.{key}={value}" for key, value in CHOICE.items()), step=2)
    trainer.actor_rollout_wg = VersionedWorkers(trainer.config)
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None, abort_replicas=lambda: None)
    trainer.current_mode = HybridEngineMode.TRAINER
    trainer._add_batch_to_generate = lambda: None  # no prompts for the step after this one
    return trainer


def a_whole_step(trainer: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
    metrics: dict[str, Any] = {}
    trainer.on_step_begin()
    return trainer.step(metrics, {}), metrics


def extremes(rewards: dict[str, list[float]]) -> set[str]:
    """The keys of the rollouts with the highest and the lowest reward of each group: the two that vary most."""
    return {f"{uid}_{of(range(4), key=group.__getitem__)}_0" for uid, group in rewards.items() for of in (min, max)}


def assert_top_tokens(trainer: Any, batch: KVBatchMeta, keys: list[str]) -> None:
    """Of these rows' tokens, the share with the highest |A| * entropy has a gradient."""
    workers, rows = trainer.actor_rollout_wg, rows_of(batch, "advantages")
    scores = torch.cat([rows[key]["advantages"][1:].abs() * workers.entropies[key][1:] for key in keys])
    kept = torch.cat([workers.tokens_with_gradient(key)[1:] for key in keys])
    assert int(kept.sum()) == math.ceil(0.3 * len(kept))
    assert scores[kept].min() > scores[~kept].max()


def test_each_local_update_of_a_separate_trainer_chooses(queue: None) -> None:
    """verl's whole ``step``: two local updates, whose old log-probabilities and entropies are of the weights before the
    first. A group that has become too old is evicted before the choice.
    """
    rewards = draw_rewards(7)
    put_rollouts(rewards)
    stale = {"is_prompt": True, "status": "finished", "global_steps": 0}
    tq.kv_batch_put(keys=["u6"], partition_id="train", tags=[stale])
    trainer = an_async_trainer(SEPARATE, *SEPARATELY)
    trainer.replay_buffer.refill_fn = lambda prompts: None
    batch, metrics = a_whole_step(trainer)

    del rewards["u6"]
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert sorted(tq.kv_list()["train"]) == sorted(batch.keys), (
        "verl clears the rows of the batch at the end, no others"
    )
    assert set(batch.keys) == extremes(rewards)
    assert metrics["d3s/rollouts_kept"] == 6, "verl's mean over the local updates"
    workers = trainer.actor_rollout_wg
    assert [version for version, _ in workers.asked] == [0, 0]
    assert workers.version == len(workers.updates) == 2
    for (_, asked), updated in zip(workers.asked, workers.updates, strict=True):
        assert set(asked) == set(updated)
        assert len({key.split("_")[0] for key in asked}) == 3
        assert_top_tokens(trainer, batch, asked)


def test_a_colocated_trainer_chooses(queue: None) -> None:
    rewards = draw_rewards()
    put_rollouts(rewards)
    trainer = an_async_trainer(COLOCATED, f"trainer.v1.trainer_mode={COLOCATED}")
    batch, _ = a_whole_step(trainer)
    assert type(trainer.replay_buffer).__name__ == "ReplayBufferAsync"
    assert set(batch.keys) == extremes(rewards)
    assert len(trainer.actor_rollout_wg.updates) == 2
    assert_top_tokens(trainer, batch, batch.keys)


def test_local_updates_draw_at_random_anew() -> None:
    trainer = make_trainer(*SEPARATELY)
    places = [(step, update) for step in (1, 2) for update in (0, 1)]
    numbers = set()
    for trainer.global_steps, trainer.local_trigger_step in places:
        numbers |= {float(torch.rand(1, generator=trainer._draws(what))) for what in ("rollouts", "tokens")}
    assert len(numbers) == 2 * len(places)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"+trainer.v1.{SEPARATE}.rollouts_start=0", "d3s_separate_async.rollouts_start: got 0; takes a share in"),
        (f"+trainer.v1.{SEPARATE}.sampling_mask_field=sets", "_field: got 'sets'; d3s_separate_async takes null"),
        ("skip.rollout_tq.enable=true", "skip.rollout_tq.enable: got True; d3s_separate_async takes False"),
        ("algorithm.rollout_correction.bypass_mode=true", "bypass_mode: got True; d3s_separate_async takes False"),
    ],
)
def test_refused_by_the_modes(override: str, message: str) -> None:
    with_sets = "actor_rollout_ref.model.use_fused_kernels=true", "actor_rollout_ref.rollout.top_p=0.9"
    ours = "actor_rollout_ref.model.fused_kernel_options.impl_backend=d3s"
    with pytest.raises(ValueError, match=message):
        make_trainer(*SEPARATELY, *with_sets, ours, override)


EXPERIMENTAL = Path(verl.__file__).parent / "experimental"
FILES = {
    fully_async_main: EXPERIMENTAL / "fully_async_policy/config/fully_async_ppo_trainer.yaml",
    one_step_main: EXPERIMENTAL / "one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
}
SYNC, STARTS = "trainer.v1.trainer_mode=d3s_sync", "+trainer.v1.d3s_sync.rollouts_start=2"


def configured(main: Any, *overrides: str) -> DictConfig:
    """The configuration that one of verl's main functions receives."""
    if main is main_ppo:
        return composed(*BASE, *overrides)
    with initialize_config_dir(str(FILES[main].parent), version_base=None):
        return compose(FILES[main].stem, overrides=list(overrides))


@pytest.mark.parametrize(
    ("main", "overrides", "message"),
    [
        (
            fully_async_main,
            [STARTS],
            r"v1\.d3s_sync: got {'rollouts_start': 2} with verl\.experimental\.fully_async_po",
        ),
        (fully_async_main, [SYNC], r"trainer_mode: got 'd3s_sync' with verl\.experimental\.fully_async_policy, which"),
        (
            one_step_main,
            [SYNC, STARTS],
            "with verl.experimental.one_step_off_policy, .*takes .*trainer_mode=d3s_separate_as",
        ),
        (main_ppo, [SYNC, "trainer.use_v1=false"], "trainer_mode: got 'd3s_sync' with trainer.use_v1=False, which"),
        (main_ppo, [STARTS], "with trainer.v1.trainer_mode=sync, which ignores it; takes .*trainer_mode=d3s_sync"),
        (
            main_ppo,
            [SYNC, f"+trainer.v1.{SEPARATE}.rollouts_start=2"],
            "separate_async: got .*v1.trainer_mode=d3s_sync, which",
        ),
        (main_ppo, [SYNC, STARTS], ""),
        (fully_async_main, options("d3s"), ""),
    ],
)
def test_what_a_trainer_would_ignore_is_refused(
    monkeypatch: pytest.MonkeyPatch, main: Any, overrides: list[str], message: str
) -> None:
    """By verl's own main functions, before anything is started."""
    started: list[Any] = []
    monkeypatch.setattr(main_ppo, "run_ppo", lambda config, task_runner_class: started.append(config))
    monkeypatch.chdir(Path(verl.__file__).parents[1])  # one of verl's files names a folder from here
    config = configured(main, *overrides)
    if message:
        with pytest.raises(ValueError, match=message):
            main.main.__wrapped__(config)
    else:
        main.main.__wrapped__(config)
    assert len(started) == (not message)
