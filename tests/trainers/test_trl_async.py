"""D3S in TRL's asynchronous trainer, on a recorded queue. Its attention for prefix trees is a kernel for GPUs; here a
dense one for the same arguments stands under its name.
"""

from __future__ import annotations

import copy
import math
import os
import queue
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", minversion="1.16", reason="TRL packs prefix trees from 1.16 on")
import trl_surface as surface
from datasets import Dataset
from processes import run_processes
from test_trusted_tokens import meaning as weights_of_rule
from tiny_trl import EOS, model, run_example, tokenizer
from torch.nn.functional import pad
from transformers import PrinterCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import d3s_kernels as d3s
from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig, D3SAsyncGRPOTrainer, UnknownTRL
from d3s_kernels.integrations.trl.async_window import Rollout, RolloutWindow
from d3s_kernels.integrations.trl.head import OurHead

GROUP = 8
WHOLE = {"rollouts_start": GROUP, "rollouts_end": GROUP}
ENDS = ("rollouts_start", "rollouts_end", "token_ratio_start", "token_ratio_end")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

from _async.on_a_cpu import use_a_cpu  # noqa: E402

use_a_cpu()


class Recording:
    """A worker, and a weight transfer, for samples that were recorded."""

    def __init__(self, samples: Iterable[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)
        self.waits = 0
        self.update_model_version = self.start = self.stop = lambda *_: None
        self.init_weight_transfer = self.pause = self.resume = self.destroy = lambda: None

    def send_weights(self, iterator: Iterator[Any]) -> None:
        assert list(iterator)

    def check_health(self, stale_after_s: float) -> None:
        """TRL calls this when no sample came for a moment, which may also be that a busy machine was slow."""
        self.waits += self.rollout_buffer.empty()
        if self.waits > 1:
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
            fields = {"old_log_probs": np.array([0.0] * 3 + old.tolist(), dtype=np.float32), **changed}
            samples.append(sample(group, float(advantage), tokens, metrics={"reward": float(reward)}, **fields))
    return samples


def options(kind: type[AsyncGRPOConfig] = D3SAsyncGRPOConfig, **changed: Any) -> AsyncGRPOConfig:
    common: dict[str, Any] = {
        "output_dir": "/tmp/d3s-async", "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 1,
        "num_generations": GROUP, "max_steps": 3, "learning_rate": 1e-3, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "token_budget": 0, "gradient_checkpointing": False,
    }  # fmt: skip
    if kind is D3SAsyncGRPOConfig and "keep_all" not in changed:
        common |= dict(zip(ENDS, (4, 4, 0.25, 0.25), strict=True))
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


NOTHING_DROPPED = {"keep_all": {"keep_all": True, "token_budget": 90}, "windows": dict.fromkeys(ENDS, 1.0)}


@pytest.mark.parametrize("which", NOTHING_DROPPED)
def test_with_nothing_dropped_it_is_trls_trainer(saved: str, which: str) -> None:
    made = []
    ours = NOTHING_DROPPED[which]
    for kind, more in ((AsyncGRPOTrainer, {"token_budget": ours.get("token_budget", 0)}), (D3SAsyncGRPOTrainer, ours)):
        torch.manual_seed(0)
        made.append(trainer(saved, recorded(14), kind, gradient_accumulation_steps=2, **more))
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


def with_options(made: AsyncGRPOTrainer, samples: Iterable[RolloutSample], **changed: Any) -> None:
    """Makes the trainer what it would be with these options and another worker."""
    made.args_before = getattr(made, "args_before", made.args)
    made.args = copy.copy(made.args_before)
    vars(made.args).update(changed)
    made._selection = d3s.Selection(made.args)
    made.rollout_queue = made._window(Recording(samples).rollout_buffer)
    made._metrics["train"].clear()
    made._trained_groups.clear()
    for parameter in made.model.parameters():
        parameter.grad = None


def micro_batch(made: AsyncGRPOTrainer) -> dict[str, torch.Tensor]:
    """The next micro-batch, as the trainer gets it."""
    loader = made.get_train_dataloader()
    return loader.collate_fn([next(iter(loader.dataset))])


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
    rule, ratio, weight = args.off_policy_rule, (logprob - old).exp(), torch.ones_like(old)
    if rule != "none":
        bounds = {"high": args.off_policy_high} | ({} if args.off_policy_low is None else {"low": args.off_policy_low})
        offsets, each = pad(of_sample.bincount().cumsum(0), (1, 0)), torch.tensor([one.advantage for one in samples])
        weight = weights_of_rule(logprob.detach(), old, rule, None, offsets, each, **bounds).double()
    left = (weight > 0) & (own > 0)
    score = (advantages.abs() * entropy).masked_fill(~left, -1)
    number = math.ceil(args.token_ratio_start * int(left.sum()) - 1e-9)
    kept = torch.zeros_like(left)
    kept[score.argsort(descending=True)[:number]] = True
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(weight * advantages * logprob if rule.startswith("token_") else clipped) * own
    total = sum(getattr(one.completion_mask, "tokens", int(one.completion_mask.sum())) for one in samples)
    scale = len(old) * number / int(left.sum()) if args.loss_denominator == "kept" else total
    return list(torch.autograd.grad(loss[kept].sum() / scale, list(policy.parameters()), allow_unused=True))


CHOICES = {
    "rollouts and tokens": {},
    "advantages anew": {"advantages_from": "kept", "rollout_scope": "group"},
    "IcePop": {"off_policy_rule": "token_mask", "off_policy_low": 0.8, "off_policy_high": 1.2},
    "truncated": {"off_policy_rule": "token_truncate", "off_policy_low": 0.9, "off_policy_high": 1.2},
    "OPSM": {"off_policy_rule": "opsm", "off_policy_high": 0.0},
    "shared": {"drop_shared_tokens": True},
    "prefixes": {"token_rule": "prefix", "loss_denominator": "all"},
}
CHOICES["IcePop of prefixes"] = CHOICES["IcePop"] | CHOICES["prefixes"]


@pytest.mark.parametrize("choice", CHOICES)
def test_gradient_is_that_of_the_kept_tokens_without_trees(made: AsyncGRPOTrainer, choice: str) -> None:
    samples, share = recorded(2, seed=2), 0.5 if "prefixes" in choice else 0.25
    with_options(made, samples, window_groups=2, **dict.fromkeys(ENDS[2:], share), **CHOICES[choice])
    kept, get = [], made.rollout_queue.get
    made.rollout_queue.get = lambda timeout: kept.append(get(timeout)) or kept[-1]
    made.compute_loss(made.model, micro_batch(made)).backward()
    advantages = torch.tensor([one.advantage for one in samples]).view(2, GROUP)
    expected = d3s.select_rollouts(advantages, 4, scope=made.args.rollout_scope).flatten().nonzero().flatten().tolist()
    places = {id(one.metrics): place for place, one in enumerate(samples)}
    assert [places[id(one.metrics)] for one in kept] == expected
    args = copy.copy(made.args)
    args.token_ratio_start = 1.0 if "prefixes" in choice else share  # all tokens before the cuts
    for own, right in zip(made.model.parameters(), expected_gradient(kept, args), strict=True):
        torch.testing.assert_close(own.grad.double(), right, atol=3e-5, rtol=1e-3)
    logged = made._metrics["train"]
    assert logged["d3s/rollouts_kept"] == [8.0]
    assert made.args.off_policy_rule not in ("token_mask", "opsm") or logged["d3s/off_policy_share"][0][0] > 0.5
    if choice == "advantages anew":
        (theirs, _), (ours, _) = (torch.tensor(values).view(2, 4).sort() for values in (
            advantages.flatten()[expected].tolist(), [one.advantage for one in kept],
        ))  # fmt: skip
        torch.testing.assert_close(ours, d3s.group_advantages(theirs))


def test_gradient_of_conversations_with_several_samples(made: AsyncGRPOTrainer) -> None:
    """Every third rollout has two samples that begin alike and have one advantage. Both are kept, or none."""
    rollouts = [[one] for one in recorded(2, seed=6)]
    for parts in rollouts[::3]:
        (first,) = parts
        first.completion = [{"role": role, "content": str(id(first))} for role in ("assistant", "tool", "assistant")]
        parts.append(copy.copy(first))
        parts[1].input_ids = np.append(first.input_ids[:-2], [50, EOS])
    advantages = torch.tensor([parts[0].advantage for parts in rollouts]).view(2, GROUP)
    expected = d3s.select_rollouts(advantages, 4).flatten().nonzero().flatten().tolist()
    samples = [one for place in expected for one in rollouts[place]]
    assert len(samples) > 8
    sizes = {"window_groups": 2, "per_device_train_batch_size": len(samples)}
    with_options(made, [one for parts in rollouts for one in parts], **sizes)
    batch = micro_batch(made)
    made.compute_loss(made.model, batch).backward()
    tokens = sum(len(one.input_ids) for one in samples)
    assert int(batch["global_n_forward_tokens"][0]) < tokens - 3 * len(samples) / 2  # beginnings once
    for own, right in zip(made.model.parameters(), expected_gradient(samples, made.args), strict=True):
        torch.testing.assert_close(own.grad.double(), right, atol=3e-5, rtol=1e-3)


def test_tokens_that_are_cut_are_not_forwarded(made: AsyncGRPOTrainer) -> None:
    """A token's weight is 1 / P(it is before the cut), where cuts are uniform: T / (T - t + 1) for the t-th of T."""
    samples = recorded(2, seed=5)
    rule = CHOICES["prefixes"] | dict.fromkeys(ENDS[2:], 0.5)
    with_options(made, samples, window_groups=2, **WHOLE, **rule)
    shorter = 0
    for whole in samples:
        one, own = made.rollout_queue.get(60.0), whole.completion_mask.sum()
        kept = int(one.completion_mask.sum())
        assert len(one.input_ids) == len(one.old_log_probs) == 3 + kept
        assert one.input_ids.tolist() == whole.input_ids[: 3 + kept].tolist()
        assert one.completion_mask.weight[3:].tolist() == pytest.approx([own / (own - t) for t in range(kept)])
        shorter += kept < own
    assert shorter > 4


def test_advantages_of_equal_rewards_are_0_in_whole_groups(made: AsyncGRPOTrainer) -> None:
    samples = recorded(3, seed=1)
    for one in samples[:GROUP]:
        one.metrics["reward"], one.advantage = 0.1, 1e-9
    with_options(made, [*samples[: 2 * GROUP], samples[-1]], window_groups=2, heartbeat_stale_after_s=0.0, **WHOLE)
    kept = [made.rollout_queue.get(60.0).advantage for _ in range(2 * GROUP + 1)]
    assert kept[:GROUP] == [0.0] * GROUP
    rest = [one.advantage for one in [*samples[GROUP : 2 * GROUP], samples[-1]]]  # the last is a part of a group
    assert kept[GROUP:] == pytest.approx(rest)
    assert samples[0].advantage == 1e-9  # the worker's sample is not changed


def test_token_without_a_probability_is_not_trusted(made: AsyncGRPOTrainer) -> None:
    samples = recorded(1, seed=3)
    for one in samples:
        one.old_log_probs[4] = math.nan
    with_options(made, samples, window_groups=1, off_policy_rule="token_truncate", **WHOLE)
    loss = made.compute_loss(made.model, micro_batch(made))
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in made.model.parameters())
    ((left_out, _),) = made._metrics["train"]["d3s/off_policy_share"]
    assert left_out == pytest.approx(GROUP)


def test_metrics(made: AsyncGRPOTrainer) -> None:
    samples, before = recorded(2, seed=1), made.state.stateful_callbacks.get("D3STrainer", {"num_tokens_kept": 0})
    before = before["num_tokens_kept"]
    for one in samples[:GROUP]:  # a group of equal rewards, whose advantages are rounding errors
        one.metrics["reward"], one.advantage = 0.1, 1e-9
    with_options(made, samples, window_groups=2, off_policy_rule="token_mask", off_policy_low=0.8, off_policy_high=1.2)
    made.compute_loss(made.model, micro_batch(made))
    logged = made._metrics["train"]
    lengths = [int(one.completion_mask.sum()) for one in samples]
    assert logged["d3s/groups_without_spread"] == logged["d3s/rollout_share"] == [0.5]
    assert logged["d3s/groups_kept"] == [0.5]
    assert logged["d3s/reward"] == [pytest.approx(sum(one.metrics["reward"] for one in samples) / 16)]
    ((left_out, number),) = logged["d3s/off_policy_share"]
    assert number + logged["d3s/tokens_not_forwarded"][0] == sum(lengths)
    kept = math.ceil(0.25 * (number - left_out) - 1e-9)
    assert logged["d3s/tokens_kept"] == [kept]
    assert logged["d3s/num_tokens_kept"] == [before + kept]
    assert logged["d3s/token_share"] == [(kept, number)]
    assert made._trained_groups == {0, 1}  # no rollout of the first one is trained on
    assert 0 < left_out < number


def test_head_computes_kept_positions_once(made: AsyncGRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples that begin alike: positions of the common beginning are rows of the head once, and of its backward
    if a term of one of them is kept."""
    samples = [sample(0, advantage, [2, 7, 9, 11, 5, 6, 3 + place]) for place, advantage in enumerate(range(-4, 4))]
    with_options(made, samples, window_groups=1, token_rule="advantage", **WHOLE)
    rows, op = [], OurHead.apply

    def counted(self: OurHead, hidden: torch.Tensor, *more: Any, **given: Any) -> Any:
        rows.append((self, len(hidden)))
        return op(self, hidden, *more, **given)

    monkeypatch.setattr(OurHead, "apply", counted)
    made.compute_loss(made.model, micro_batch(made)).backward()
    ((head, forward),) = rows
    assert forward == 3 + 8  # 32 terms; the last token of each sample follows one of its own
    assert head.kept.number.value() == 3 + 2  # 8 terms, of the two samples with the largest |A|


# ---- the window ------------------------------------------------------------------------------------------------------


class Watched(RolloutWindow):
    """A window of groups of three, whose choice keeps the rollouts with a positive advantage."""

    def __init__(self, samples: Iterable[Any], groups: int = 2, patience: float = 60.0) -> None:
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self.version, self.choices = 1, []
        super().__init__(
            Recording(samples).rollout_buffer, 3, patience, number_of_groups=lambda: groups,
            is_stale=lambda one: one.model_version < self.version, choose=self.choose,
            prepared=lambda rollout, one: one, metrics=self.metrics,
        )  # fmt: skip

    def choose(self, rollouts: list[Rollout]) -> None:
        self.choices.append([(rollout.group, len(rollout.samples)) for rollout in rollouts])
        for rollout in rollouts:
            rollout.kept = rollout.advantage > 0

    def all(self) -> list[int]:
        """The places of all samples that it hands on until the worker's queue is empty."""
        found: list[int] = []
        while True:
            left = self._incoming.qsize()
            try:
                found.append(int(self.get(0.0).input_ids[0]))
            except queue.Empty:
                if left == 0:
                    return found


def stream(*which: str, **changed: Any) -> list[RolloutSample]:
    """Samples whose first token is their place. "a+" is of the group a, with a positive advantage; "a+2" is of a
    conversation of several messages, the same one wherever it is named.
    """
    samples = []
    for place, name in enumerate(which):
        advantage, messages = 1.0 if name[1] == "+" else -1.0, 3 if len(name) > 2 else 1
        completion = [{"content": name}] * messages
        samples.append(sample(name[0], advantage, [place, 7, 9, 11], completion=completion, **changed))
    return samples


def test_window_counts_a_forked_rollout_once() -> None:
    forked = Watched(stream("a+1", "a+1", "a-2", "a-2", "a-2", "b+", "b-", "a+", "b-"))
    assert forked.all() == [0, 1, 5, 7]
    assert forked.choices == [[("a", 2), ("a", 3), ("a", 1), ("b", 1), ("b", 1), ("b", 1)]]
    equal = Watched(equal_conversations := stream("a+1", "a+1", "a+1", "a+1", "a-"), groups=1)
    for one, other in zip(equal_conversations[2:4], equal_conversations[:2], strict=True):
        one.input_ids = other.input_ids
    assert len(equal.all()) == 4
    assert equal.choices == [[("a", 2), ("a", 2), ("a", 1)]]
    other_prompt = stream("a+1", "a+1", "a-")
    other_prompt[1].prompt = [{"content": "an environment said something else"}]
    assert len(Watched(other_prompt, groups=1).all()) == 2
    other_reward = stream("a+1", "a+1", "a-")
    other_reward[1].advantage = 0.5
    assert len(Watched(other_reward, groups=1).all()) == 2


def test_late_samples_share_the_fate_of_their_rollout() -> None:
    late = Watched(
        stream("a-", "a-", "b+", "b+", "b+", "a+1", "a+1", "a+", "c-1", "c+", "c+", "d+", "d+", "d-2", "d-2")
    )
    assert late.all() == [2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    # The seventh sample is a part of the sixth. The eighth is a rollout more of its group, which is chosen from later.
    assert late.choices[1] == [("a", 1), *[("c", 1)] * 3, *[("d", 1)] * 3]
    assert len(late.metrics["d3s/late_samples_total"]) == 2


def test_part_of_a_group_waits_for_one_choice_more() -> None:
    window = Watched(stream("a+", "b+", "b+", "c+", "b+", "a+", "c+", "c+", "d+", "d+", "d+", "a+"), groups=1)
    assert window.all() == [1, 2, 4, 0, 3, 5, 6, 7, 8, 9, 10]
    assert window.choices[0] == [("b", 1)] * 3
    assert ("a", 1) in window.choices[1]
    assert window.qsize() == 1


def test_nothing_waits_for_ever() -> None:
    never_whole = Watched(stream(*(name for label in "abcdefghijklm" for name in (f"{label}+", f"{label}-"))))
    assert len(never_whole.all()) == 12
    assert len(never_whole.choices) == 1
    silent = Watched(stream("a+", "b+", "a-"), patience=0.0)
    assert silent.all() == [0, 1]
    assert silent.choices == [[("a", 1), ("a", 1), ("b", 1)]]
    begin = time.monotonic()
    with pytest.raises(queue.Empty):  # so TRL asks whether the worker is alive
        Watched(stream("a+")).get(0.02)
    assert time.monotonic() - begin < 30


def test_stale_samples_are_dropped_and_counted() -> None:
    window = Watched([*stream("a+", "a+", "b+"), *stream("b+", "a+", "a+", "b+", "b+", model_version=2)])
    window.version = 2
    assert len(window.all()) == 0
    assert window.choices == []
    assert len(window.metrics["sample/dropped_stale_total"]) == 3
    waiting = Watched([*stream("a+", "b+", "b+", "b+"), *stream("a+", "c+", "c+", "c+", model_version=2)], groups=1)
    first = [waiting.get(60.0).group_id for _ in range(3)]
    waiting.version = 2  # the first sample has become stale while it waited
    assert first == ["b"] * 3
    assert len(waiting.all()) == 4
    assert len(waiting.metrics["sample/dropped_stale_total"]) == 1


@pytest.mark.parametrize("_", range(20))
def test_every_sample_is_handed_on_or_counted(_: int) -> None:
    random = np.random.default_rng(int(torch.randint(2**31, ())))
    names = [
        f"{label}{random.choice(['+', '-'])}{place if random.random() < 0.5 else ''}"
        for label in "abcdefghij"
        for place in range(random.integers(1, 5))
    ]
    names += random.choice(names, 10).tolist()  # parts of rollouts of several messages, or rollouts more
    random.shuffle(names)
    samples = stream(*names)
    for one in samples:
        one.model_version = int(random.integers(0, 4) > 0)
    window = Watched(samples, groups=int(random.integers(1, 4)), patience=0.0)
    out = window.all()
    stale = sum(one.model_version < 1 for one in samples)
    kept = [place for place, one in enumerate(samples) if one.model_version and names[place][1] == "+"]
    assert sorted(out) == kept
    assert window.qsize() == 0
    assert len(window.metrics["sample/dropped_stale_total"]) == stale


# ---- a worker with faults, and what is refused -----------------------------------------------------------------------


def first_micro_batch(made: AsyncGRPOTrainer) -> list[Any]:
    batcher = made.get_train_dataloader().dataset
    batcher.dataset.poll_interval_s = 0.01
    return [one for row in next(iter(batcher)) for one in row.samples]


def test_what_cannot_be_trained_on_is_dropped_before_the_choice(made: AsyncGRPOTrainer) -> None:
    samples = recorded(2, seed=2)
    samples[3].advantage, samples[9].advantage = math.nan, math.inf
    long = samples[12]
    long.advantage = 5.0  # it would be chosen
    long.input_ids, long.completion_mask, long.old_log_probs = (
        np.concatenate([part, np.repeat(part[-1:], 90)])
        for part in (long.input_ids, long.completion_mask, long.old_log_probs)
    )
    with_options(made, [*samples, sample(9, 0.0, [2] * 40)], window_groups=2, token_budget=80)
    made.rollout_queue._patience = 0.0
    kept = first_micro_batch(made)
    logged = made._metrics["train"]
    assert logged["d3s/rollouts_kept"][0] == 8  # the budget is of all rollouts that came
    assert logged["d3s/dropped_not_finite_total"] == [2.0]
    assert logged["batch/dropped_oversize_total"] == [1.0]
    assert all(math.isfinite(one["advantage"]) and len(one["input_ids"]) < 80 for one in kept)


def test_rollouts_without_a_reward_stay_without_an_advantage(made: AsyncGRPOTrainer) -> None:
    samples = recorded(1, seed=2)
    for one in samples[:5]:  # TRL's worker gives them the advantage 0
        one.metrics["reward"], one.advantage = math.nan, 0.0
    with_options(made, samples, window_groups=1, advantages_from="kept", **WHOLE)
    anew = [made.rollout_queue.get(60.0).advantage for _ in samples]
    assert anew[:5] == [0.0] * 5
    of_rewards = torch.tensor([one.advantage for one in samples[5:]])
    assert anew[5:] == pytest.approx(d3s.group_advantages(of_rewards).tolist())


def test_window_whose_rollouts_are_all_too_long_is_dropped(made: AsyncGRPOTrainer) -> None:
    long, samples = [sample(9, 1.0, [2] * 81) for _ in range(GROUP)], recorded(1)
    with_options(made, [*long, *samples], window_groups=1, token_budget=80)
    with pytest.warns(UserWarning, match="token_budget: got 80; a window without a rollout that fits is dropped"):
        assert made.rollout_queue.get(60.0).group_id == 0
    assert made._metrics["train"]["batch/dropped_oversize_total"] == [8.0]
    assert made._trained_groups == {9}  # a checkpoint has it behind it


def test_window_without_a_finite_advantage_is_an_error(made: AsyncGRPOTrainer) -> None:
    samples = recorded(1)
    for one in samples:
        one.advantage = math.nan
    with_options(made, samples, window_groups=1)
    with pytest.raises(ValueError, match=r"advantage: got nan, .* the 8 rollouts of a window; takes a finite one"):
        first_micro_batch(made)


def test_dead_worker_is_an_error_after_what_it_left(made: AsyncGRPOTrainer) -> None:
    with_options(made, recorded(1)[:5], window_groups=1, per_device_train_batch_size=2)
    made.rollout_queue._patience = 0.0  # in a run, heartbeat_stale_after_s: that of a worker which may still come
    assert len(first_micro_batch(made)) == 2
    assert made._metrics["train"]["d3s/partial_groups_total"] == [1.0]
    made.rollout_queue._patience = 60.0
    made.rollout_queue._ready.clear()
    with pytest.raises(RuntimeError, match="the recording has ended"):
        first_micro_batch(made)


def test_progress_is_counted_in_groups_where_epochs_end_a_run(
    made: AsyncGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_options(
        made, recorded(3), window_groups=1, per_device_train_batch_size=2, rollouts_start=2, rollouts_end=GROUP
    )
    monkeypatch.setattr(made, "_epoch_stop_groups", 2)
    for groups, rollouts in ((1, 2.0), (2, 5.0), (3, 8.0)):
        made.rollout_queue._ready.clear()
        assert int(micro_batch(made)["d3s_groups_done"][0]) == groups
        assert made._metrics["train"]["d3s/rollouts_kept"][-1] == rollouts


def test_window_is_by_default_what_a_step_trains_on(made: AsyncGRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with_options(made, recorded(7), rollouts_start=2, rollouts_end=GROUP, window_groups=None)
    for step, groups, rollouts in ((0, 4, 2), (1, 2, 5), (2, 1, 8)):
        monkeypatch.setattr(made.state, "global_step", step)
        made.rollout_queue._ready.clear()
        made._metrics["train"].clear()
        made.rollout_queue.get(60.0)
        assert made._metrics["train"]["d3s/rollout_share"] == [rollouts / GROUP]
        assert len(made.rollout_queue._ready) + 1 == groups * rollouts


def test_data_that_do_not_come_through_trls_batcher_are_refused(
    made: AsyncGRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = SimpleNamespace(dataset=[], collate_fn=None)
    monkeypatch.setattr(AsyncGRPOTrainer, "get_train_dataloader", lambda self: loader)
    with pytest.raises(UnknownTRL, match="got a list; takes TRL's FixedCountBatcher or TokenBudgetBatcher"):
        made.get_train_dataloader()


def test_loss_that_is_not_ours_is_refused(made: AsyncGRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncGRPOTrainer, "training_step", lambda self, *_: torch.zeros(()))
    with pytest.raises(UnknownTRL, match="no token was selected"):
        made.training_step(made.model, {}, None)


REFUSED = {
    "window_groups: got 0; takes a whole number of at least 1, or None": {"window_groups": 0},
    "window_groups: got 20; takes at most 10: up to 4 rollouts of a group are kept": {"window_groups": 20},
    "window_groups: got 2 beside keep_all, which takes None": {"keep_all": True, "window_groups": 2},
    "loss_denominator: got 'kept' with token_rule 'prefix'": {"token_rule": "prefix", "loss_denominator": "kept"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_options_that_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        options(**REFUSED[message])


def test_trl_is_as_it_was_read() -> None:
    """Another name that the loss reads may bring a term, or a denominator, that the selection does not cover."""
    read = surface.read_by(AsyncGRPOTrainer.compute_loss)
    known = (
        "inputs.advantages inputs.attention_mask inputs.global_n_forward_tokens inputs.global_n_tokens "
        "inputs.input_ids inputs.mean_seq_len inputs.old_log_probs inputs.position_ids inputs.segment_id "
        "inputs.shift_labels inputs.token_index inputs.tree_max_seqlens self._last_forward_time_s self._metrics "
        "self._step_forward_s self._step_forward_tokens self._step_samples self._step_seq_len_weighted "
        "self._step_trained_tokens "
        "self.accelerator self.aux_loss_enabled self.current_gradient_accumulation_steps self.epsilon_high "
        "self.epsilon_low self.router_aux_loss_coef"
    )
    assert read == set(known.split())


def test_other_arguments_are_refused(saved: str) -> None:
    with pytest.raises(TypeError, match="args: got a AsyncGRPOConfig; takes a D3SAsyncGRPOConfig"):
        D3SAsyncGRPOTrainer(saved, args=options(AsyncGRPOConfig))


def test_examples_of_the_docstrings(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *_, **__: None)  # an example prints its results alone
    worker = Recording(recorded(4))
    elsewhere = {"use_cpu": True, "bf16": False, "token_budget": 0, "report_to": [], "logging_strategy": "no"}
    elsewhere |= {"disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 4}
    run_example(D3SAsyncGRPOConfig)
    given = {"rollout_worker": worker, "weight_transfer": worker, "processing_class": tokenizer()}
    prompts, reward = Dataset.from_dict({"prompt": ["w2"] * 40}), None
    run_example(D3SAsyncGRPOTrainer, folder=saved, reward=reward, prompts=prompts, worker=given, elsewhere=elsewhere)


@pytest.mark.slow("one gradient of several processes: their terms, their denominators, DDP's mean")
def test_processes_together(saved: str, tmp_path: Path) -> None:
    run_processes(Path(__file__), 2, tmp_path, saved)
    together = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = outcome(saved, ranks=1)
    for one in together:
        assert one["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
        for own, right in zip(one["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-4)


def outcome(saved: str, ranks: int) -> dict[str, Any]:
    """What a trainer has after three steps on eight samples each, whichever process each sample is on."""
    rule = {"off_policy_rule": "m2po", "off_policy_high": 0.05, "optim": "sgd", "learning_rate": 0.1}
    rule |= {"ddp_backend": "gloo"} if ranks > 1 else {}
    made = trainer(
        saved, recorded(12), per_device_train_batch_size=8 // ranks, window_groups=2, logging_steps=3, **rule
    )
    made.train()
    (log,) = (log for log in made.state.log_history if "d3s/tokens_kept" in log)
    metrics = {name: log[name] for name in log if name in ("d3s/tokens_kept", "d3s/off_policy_share", "ratio", "loss")}
    return {"metrics": metrics, "weights": [parameter.detach().clone() for parameter in made.model.parameters()]}


if __name__ == "__main__":  # one of the processes
    folder, policy = sys.argv[1:]
    torch.save(outcome(policy, int(os.environ["WORLD_SIZE"])), Path(folder) / f"{os.environ['RANK']}.pt")
