"""D3S in TRL's asynchronous trainer, on a recorded queue. Its attention for prefix trees is a kernel for GPUs; here a
dense one for the same arguments stands under its name.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import queue
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trl
from packaging.version import Version

if Version(trl.__version__) < Version("1.16"):
    pytest.skip("TRL packs no prefix trees before 1.16", allow_module_level=True)

from datasets import Dataset
from tiny_trl import EOS, VOCABULARY, model, tokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import d3s_kernels as d3s
from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig, D3SAsyncGRPOTrainer, UnknownTRL
from d3s_kernels.integrations.trl.async_window import RolloutWindow

GROUP = 8
EXAMPLE = Path(__file__).parents[2] / "examples" / "async_trl_d3s.py"


def example() -> ModuleType:
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        spec = importlib.util.spec_from_file_location("async_trl_d3s", EXAMPLE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    return module


example().use_a_cpu()


class Recording:
    """A worker, and a weight transfer, for samples that were recorded."""

    def __init__(self, samples: Iterable[RolloutSample], update: bool = True) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)
        self.update_model_version = self.start = self.stop = lambda *_: None
        self.init_weight_transfer = self.pause = self.resume = self.destroy = lambda: None

    def send_weights(self, iterator: Iterator[Any]) -> None:
        assert list(iterator)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the recording has ended")


def sample(group: int, advantage: float, tokens: list[int], prompt: int = 3, **changed: Any) -> RolloutSample:
    fields: dict[str, Any] = {
        "prompt": [{"role": "user", "content": f"w{group}"}],
        "completion": [{"role": "assistant", "content": " ".join(map(str, tokens[prompt:]))}],
        "input_ids": np.array(tokens),
        "completion_mask": np.array([0] * prompt + [1] * (len(tokens) - prompt)),
        "old_log_probs": np.array([0.0] * prompt + [-2.0] * (len(tokens) - prompt), dtype=np.float32),
        "advantage": advantage, "model_version": 1, "group_id": group,
        "metrics": {"reward": advantage}, "enqueued_at": time.time(),
    }  # fmt: skip
    return RolloutSample(**{**fields, **changed})


def recorded(groups: int, seed: int = 0, noise: float = 0.3, **changed: Any) -> list[RolloutSample]:
    """Groups whose completions begin alike, with log-probabilities near those of the tiny model."""
    random, policy, samples = np.random.default_rng(seed), model(), []
    for group in range(groups):
        prompt = [2 + group % 50, 7, 9]
        rewards = random.integers(0, 5, GROUP) / 4
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        for reward, advantage in zip(rewards, advantages, strict=True):
            length = int(random.integers(2, 9))
            tokens = [*prompt, 11, *random.integers(2, 8, length).tolist(), EOS]
            with torch.no_grad():
                logprob = policy(torch.tensor([tokens])).logits[0].log_softmax(-1)
            old = logprob[torch.arange(2, len(tokens) - 1), torch.tensor(tokens[3:])].numpy()
            old = old + noise * random.standard_normal(len(old))
            samples.append(
                sample(
                    group, float(advantage), tokens, metrics={"reward": float(reward)},
                    old_log_probs=np.array([0.0] * 3 + old.tolist(), dtype=np.float32), **changed,
                )  # fmt: skip
            )
    return samples


def options(kind: type[AsyncGRPOConfig] = D3SAsyncGRPOConfig, **changed: Any) -> AsyncGRPOConfig:
    common: dict[str, Any] = {
        "output_dir": "/tmp/d3s-async", "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 1,
        "num_generations": GROUP, "max_steps": 3, "learning_rate": 1e-3, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "token_budget": 0, "gradient_checkpointing": False,
    }  # fmt: skip
    if kind is D3SAsyncGRPOConfig and "keep_all" not in changed:
        common |= dict.fromkeys(("rollouts_start", "rollouts_end"), 4)
        common |= dict.fromkeys(("token_ratio_start", "token_ratio_end"), 0.25)
    return kind(**{**common, **changed})


def trainer(
    saved: str, samples: Iterable[RolloutSample], kind: type[AsyncGRPOTrainer] = D3SAsyncGRPOTrainer, **changed: Any
) -> AsyncGRPOTrainer:
    args = options(D3SAsyncGRPOConfig if issubclass(kind, D3SAsyncGRPOTrainer) else AsyncGRPOConfig, **changed)
    worker = Recording(samples)
    made = kind(
        saved, args=args, train_dataset=Dataset.from_dict({"prompt": ["w2"] * 40}), processing_class=tokenizer(),
        rollout_worker=worker, weight_transfer=worker,
    )  # fmt: skip
    made.state.max_steps = args.max_steps
    made.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    made.model.train()
    made.model_version = 1
    return made


def losses(made: AsyncGRPOTrainer) -> list[float]:
    return [log["loss"] for log in made.state.log_history if "loss" in log]


EVERYTHING = {
    "keep_all": {"keep_all": True},
    "windows": dict.fromkeys(("rollouts_start", "rollouts_end", "token_ratio_start", "token_ratio_end"), 1.0),
}


@pytest.mark.parametrize("budget", [0, 90])
@pytest.mark.parametrize("which", EVERYTHING)
def test_with_nothing_dropped_it_is_trls_trainer(saved: str, which: str, budget: int) -> None:
    made = []
    for kind, more in ((AsyncGRPOTrainer, {}), (D3SAsyncGRPOTrainer, EVERYTHING[which])):
        torch.manual_seed(0)
        made.append(trainer(saved, recorded(14), kind, token_budget=budget, gradient_accumulation_steps=2, **more))
        made[-1].train()
    theirs, ours = made
    assert losses(theirs) == pytest.approx(losses(ours), abs=1e-6)
    assert len(losses(ours)) == 3
    for (name, expected), own in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-4, msg=name)


# ---- what is kept, and its gradient, against float64 without trees ---------------------------------------------------


@pytest.fixture(scope="module")
def made(saved: str) -> AsyncGRPOTrainer:
    return trainer(saved, [])


def with_options(made: AsyncGRPOTrainer, samples: Iterable[RolloutSample], **changed: Any) -> AsyncGRPOTrainer:
    """The same trainer as if it had been made with other options and another worker."""
    made.args = made.args_before = copy.copy(getattr(made, "args_before", made.args))
    made.args = copy.copy(made.args)
    vars(made.args).update(changed)
    made._selection = d3s.Selection(made.args)
    made.rollout_queue = made._window(Recording(samples).rollout_buffer)
    made._metrics["train"].clear()
    made._trained_groups.clear()
    for parameter in made.model.parameters():
        parameter.grad = None
    return made


def terms(samples: list[Any]) -> tuple[torch.Tensor, ...]:
    """Log-probabilities with their graph, entropies, and fields of the loss terms, sample after sample, and the
    parameters of the graph."""
    policy, found = model().double(), []
    for index, one in enumerate(samples):
        ids, mask = torch.from_numpy(np.asarray(one.input_ids)), torch.from_numpy(np.asarray(one.completion_mask)) > 0
        logits = policy(ids[None]).logits[0, :-1].log_softmax(-1)[mask[1:]]
        own = np.ones(len(ids)) if not hasattr(one.completion_mask, "weight") else one.completion_mask.weight
        rest = [torch.from_numpy(np.asarray(part, dtype=np.float64))[mask] for part in (one.old_log_probs, own)]
        number = len(logits)
        fields = torch.full((number,), one.advantage, dtype=torch.float64), torch.full((number,), index)
        entropy = -(logits.exp() * logits).sum(-1).detach()
        found.append((logits.gather(-1, ids[1:][mask[1:], None])[:, 0], entropy, *rest, *fields))
    return *(torch.cat(parts) for parts in zip(*found, strict=True)), policy


def expected_gradient(samples: list[Any], args: D3SAsyncGRPOConfig) -> list[torch.Tensor]:
    logprob, entropy, old, own, advantages, of_sample, policy = terms(samples)
    ratio = (logprob - old).exp()
    constant, weight = ratio.detach(), torch.ones_like(old)
    trusted = torch.ones_like(old, dtype=torch.bool)
    if args.off_policy_rule == "token_mask":
        trusted = (constant >= 0.5) & (constant <= 1.5)
        weight = constant
    elif args.off_policy_rule == "token_truncate":
        weight = constant.clamp(0.9, 1.2)
    elif args.off_policy_rule == "opsm":
        for index in range(len(samples)):
            mine = of_sample == index
            trusted[mine] = (advantages[mine][0] >= 0) | ((old - logprob.detach())[mine].mean() <= 0.02)
    left = trusted & (own > 0)
    score = (advantages.abs() * entropy).masked_fill(~left, -1)
    number = math.ceil(args.token_ratio_start * int(left.sum()) - 1e-9)
    kept = torch.zeros_like(left)
    kept[score.argsort(descending=True)[:number]] = True
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(weight * advantages * logprob if args.off_policy_rule.startswith("token_") else clipped * own)
    total = sum(getattr(one.completion_mask, "tokens", int(one.completion_mask.sum())) for one in samples)
    scale = len(old) * number / int(left.sum()) if args.loss_denominator == "kept" else total
    return list(torch.autograd.grad(loss[kept].sum() / scale, list(policy.parameters()), allow_unused=True))


CHOICES = {
    "rollouts and tokens": {},
    "over all tokens": {"loss_denominator": "all"},
    "advantages anew": {"advantages_from": "kept", "rollout_scope": "group"},
    "IcePop": {"off_policy_rule": "token_mask", "off_policy_low": 0.5, "off_policy_high": 1.5},
    "truncated": {"off_policy_rule": "token_truncate", "off_policy_low": 0.9, "off_policy_high": 1.2},
    "OPSM": {"off_policy_rule": "opsm", "off_policy_high": 0.02},
    "shared": {"drop_shared_tokens": True},
    "prefixes": {"token_rule": "prefix", "loss_denominator": "all"} | dict.fromkeys(
        ("token_ratio_start", "token_ratio_end"), 1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_gradient(made: AsyncGRPOTrainer, choice: str) -> None:
    samples, changed = recorded(2, seed=len(choice)), CHOICES[choice]
    if choice == "prefixes":
        changed = changed | dict.fromkeys(("token_ratio_start", "token_ratio_end"), 0.5)
    with_options(made, samples, window_groups=2, **changed)
    kept, get = [], made.rollout_queue.get
    made.rollout_queue.get = lambda timeout: kept.append(get(timeout)) or kept[-1]
    (examples,) = [next(iter(made.get_train_dataloader().dataset))]
    made.compute_loss(made.model, made.get_train_dataloader().collate_fn([examples])).backward()
    advantages = torch.tensor([one.advantage for one in samples]).view(2, GROUP)
    expected = d3s.select_rollouts(advantages, 4, scope=made.args.rollout_scope).flatten().nonzero().flatten().tolist()
    places = {id(one.metrics): place for place, one in enumerate(samples)}
    assert [places[id(one.metrics)] for one in kept] == expected
    args = made.args if choice != "prefixes" else SimpleNamespace(**{**vars(made.args), "token_ratio_start": 1.0})
    for own, right in zip(made.model.parameters(), expected_gradient(kept, args), strict=True):
        torch.testing.assert_close(own.grad.double(), right, atol=3e-5, rtol=1e-3)
    assert made._metrics["train"]["d3s/rollouts_kept"] == [8.0]
