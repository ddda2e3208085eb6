"""What the tests of the trainer share: verl's own configuration, storage, rows and loss, and a stand-in for workers.

Real: the configuration (composed by hydra from verl's files), TransferQueue (in a Ray of this machine), the rows
(``AgentLoopOutput``), the replay buffer, the whole of ``_step_once``, and the loss (``ppo_loss``).
Not real: the tokenizer, the reward workers, the rollout server; and the group of actor workers, whose policy here is a
table of log-probabilities. :class:`Workers` divides rows among ranks and mini-batches as verl's engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from composed import composed
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.losses import ppo_loss

Rewards = dict[str, list[float]]  # of the rollouts of each group
MODE = "trainer.v1.trainer_mode=d3s_sync"
BASE = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "data.train_batch_size=6",
)


def compose_config(*overrides: str, **options: str) -> DictConfig:
    """The configuration that verl's main function receives."""
    config = composed(*BASE, *overrides, **options)
    OmegaConf.resolve(config)
    return config


class Workers:
    """Stands in for the group of actor workers, with two data-parallel ranks.

    Its policy is a table. For each row it holds log-probabilities of the response's tokens, which can have a gradient,
    and entropies of the old policy and, as if it had moved, of the updated policy. Every table has a last row for
    verl's rows of padding.
    """

    ranks = 2

    def __init__(self, config: DictConfig) -> None:
        self._dispatch_info = {"actor": list(range(self.ranks))}
        self.config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.log_probs: dict[str, Tensor] = {}
        self.entropies: dict[str, Tensor] = {}
        self.entropies_of_update: dict[str, Tensor] = {}
        self.old_log_probs_asked_for: list[str] = []
        self.updates: list[list[str]] = []  # the keys in each optimiser update
        self.losses: list[float] = []
        self.metrics: list[dict[str, Any]] = []
        self.denominators: list[int] = []

    def _of_whole_sequences(self, tables: dict[str, Tensor], keys: list[str], data: TensorDict) -> Tensor:
        """Values for prompt and response as a model gives them: each token's value is at the position before it."""
        lengths = (data[name].offsets().diff().tolist() for name in ("prompts", "input_ids"))
        rows = [
            torch.cat([torch.zeros(prompt - 1), tables[key][: whole - prompt], torch.zeros(1)])
            for key, prompt, whole in zip(keys, *lengths, strict=True)
        ]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        self.old_log_probs_asked_for = list(batch.keys)
        fields = ["prompts", "responses", "input_ids"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        for key, length in zip(batch.keys, data["responses"].offsets().diff().tolist(), strict=True):
            self.log_probs.setdefault(key, (-torch.rand(length) - 0.1).requires_grad_())
            self.entropies.setdefault(key, torch.rand(length) + 0.1)
            self.entropies_of_update.setdefault(key, torch.rand(length) + 0.1)
        with torch.no_grad():
            scores = {"log_probs": self._of_whole_sequences(self.log_probs, batch.keys, data)}
            if batch.extra_info["calculate_entropy"]:  # not for the reference policy
                scores["entropy"] = self._of_whole_sequences(self.entropies, batch.keys, data)
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(scores, len(batch)))
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        """Takes each rank's rows in mini-batches. Each loss is divided by the tokens of the whole mini-batch."""
        rows_of_rank, rest = divmod(len(batch), self.ranks)
        assert not rest
        mini, rest = divmod(batch.extra_info["mini_batch_size"], self.ranks)
        assert not rest
        assert not rows_of_rank % mini, "verl drops the rows of a mini-batch that is not whole"
        ranks = batch.chunk(self.ranks)
        for first in range(0, rows_of_rank, mini):
            parts = [rank.keys[first : first + mini] for rank in ranks]
            self.updates.append([key for keys in parts for key in keys])
            data = [tq.kv_batch_get(keys=keys, partition_id=batch.partition_id) for keys in parts]
            tokens = sum(int(part["loss_mask"].sum()) for part in data)
            self.denominators.append(tokens)
            for keys, part in zip(parts, data, strict=True):
                whole = {"batch_num_tokens": tokens, "global_batch_size": batch.extra_info["global_batch_size"]}
                tu.assign_non_tensor(part, dp_size=self.ranks, **whole)
                output = {"log_probs": self._of_whole_sequences(self.log_probs, keys, part)}
                if batch.extra_info["calculate_entropy"]:
                    output["entropy"] = self._of_whole_sequences(self.entropies_of_update, keys, part)
                loss, metrics = ppo_loss(self.config, output, part)
                self.losses.append(float(loss.detach()))
                self.metrics.append(metrics)
                if loss.isfinite():  # 0 / 0 without a kept token: the FSDP engine then makes no update
                    (loss / self.ranks).backward()  # data-parallel ranks take the mean
        numbers = {name for name, value in self.metrics[0].items() if isinstance(value, float)}
        theirs = {name: [metrics[name] for metrics in self.metrics] for name in numbers}
        return {"metrics": theirs | {"mfu": [0.0], "loss": self.losses}}

    def tokens_with_gradient(self, key: str) -> Tensor:
        grad = self.log_probs[key].grad
        return torch.zeros_like(self.log_probs[key], dtype=torch.bool) if grad is None else grad != 0


def make_trainer(*overrides: str, step: int = 1, steps: int = 1) -> Any:
    config = compose_config(MODE, *overrides)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.global_steps, trainer.total_training_steps = step, steps
    trainer.tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=0)
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=["rewards come with the rollouts"])
    trainer.curr_step_profile = False
    trainer.actor_rollout_wg = Workers(config)
    return trainer


def draw_rewards(groups: int = 6) -> Rewards:
    return {f"u{group}": torch.rand(4).tolist() for group in range(groups)}


def put_rollouts(
    rewards: Rewards,
    outputs: int = 1,
    length: int | None = None,
    extra_fields: Callable[[list[int]], dict[str, Any]] = lambda response: {},
) -> list[str]:
    """Puts finished groups into the queue, as verl's agent loop does. The first token of each is not the model's.

    ``extra_fields`` gives those of a response.
    """
    keys = []
    for uid, group in rewards.items():
        for session, reward in enumerate(group):
            rows, tags = [], []
            for output in range(outputs):
                prompt, response = 2 + session % 3, length or 3 + int(torch.randint(6, ()))
                row = AgentLoopOutput(
                    prompt_ids=list(range(prompt)),
                    response_ids=list(range(response)),
                    response_mask=[0] + [1] * (response - 1),
                    response_logprobs=[-0.5] * response,
                    reward_score=reward if output == outputs - 1 else -reward,  # only the last output's reward counts
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields=extra_fields(list(range(response))),
                ).as_dict()
                ids = torch.cat([row["prompts"], row["responses"]])
                row |= {"uid": uid, "session_id": session, "raw_prompt": [], "loss_mask": row["response_mask"]}
                row |= {"input_ids": ids, "position_ids": torch.arange(len(ids)), "multi_modal_inputs": {}}
                rows.append(row)
                tag = {"status": "success", "prompt_len": prompt, "response_len": response, "seq_len": len(ids)}
                tags.append(tag | {"global_steps": 1, "min_global_steps": 0, "max_global_steps": 0})
            names = [f"{uid}_{session}_{output}" for output in range(outputs)]
            tq.kv_batch_put(keys=names, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
            keys += names
        tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[tag])
    return keys


def run_step(trainer: Any, groups: int) -> tuple[KVBatchMeta, dict[str, Any]]:
    metrics: dict[str, Any] = {}
    return trainer._step_once(metrics, {}, groups), metrics


def a_step(
    rewards: Rewards, *overrides: str, step: int = 1, steps: int = 1, **rollouts: Any
) -> tuple[Any, KVBatchMeta, dict[str, Any]]:
    """A step on finished groups with these rewards: its trainer, batch and metrics."""
    put_rollouts(rewards, **rollouts)
    trainer = make_trainer(*overrides, step=step, steps=steps)
    return trainer, *run_step(trainer, len(rewards))


def rows_of(batch: KVBatchMeta, *fields: str) -> dict[str, TensorDict]:
    """The queue's fields of each row that is not padding."""
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=list(fields))
    return {key: data[row] for row, key in enumerate(keys)}
