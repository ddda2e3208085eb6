"""The recipes for slime and miles, on a stand-in for the lines of these trainers that call it, and that it calls."""

from __future__ import annotations

import importlib.util
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_core import installed, parallel_state
from ranks import Ranks, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference

RECIPES = Path(__file__).parents[1] / "examples" / "trainers"
GROUPS, GROUP, RATIO = 4, 6, 0.25
LOSSES = [f"miles.backends.training_utils.{name}.losses" for name in ("loss_hub", "loss.hub")]  # at 31f1ca9, and newer


def recipe(name: str = "d3s_slime") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_for_miles() -> ModuleType:
    with installed({"d3s_slime": recipe()}):  # which lies beside it
        return recipe("d3s_miles")


# ---- the trainers: written from slime at 624b824 and miles at 31f1ca9, both of 2026-08-21 ----------------------------


class Sample:
    """``utils/types.py``; copies of a prompt may share their metadata."""

    def __init__(self, index: int, reward: Any, metadata: dict[str, Any]) -> None:
        self.index, self.reward, self.metadata = index, reward, metadata

    def get_reward_value(self, args: Namespace) -> float:
        return self.reward[args.reward_key] if args.reward_key else self.reward


def rollouts_to_train_on(hooks: ModuleType, args: Namespace, data: list[list[Sample]]) -> tuple[Any, ...]:
    """``generate_rollout_async`` and what follows in ``ray/rollout.py``: the samples, their raw rewards and rewards."""
    every_group = list(data)
    hooks.keep_rollouts(args, data)  # what it returns is not used
    assert [len(group) for group in every_group] == [GROUP] * len(every_group)  # "all samples" are handed on as well
    samples = [sample for group in data for sample in group]
    raw, rewards = hooks.post_process_rewards(args, samples)
    assert len(raw) == len(rewards) == len(samples)
    return samples, raw, rewards


class DataIterator:
    """``data.py``: the tensors of each micro-batch's samples. A field that was not computed is there, and is None."""

    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data, self.micro_batch_indices, self.offset = rollout_data, micro_batch_indices, 0

    def get_next(self, keys: list[str]) -> dict[str, Any]:
        batch = {key: self.rollout_data.get(key) for key in keys}
        indices, self.offset = self.micro_batch_indices[self.offset], self.offset + 1
        return {key: None if values is None else [values[i] for i in indices] for key, values in batch.items()}


KEYS = ["tokens", "total_lengths", "response_lengths", "loss_masks", "advantages", "log_probs", "rollout_log_probs"]


def get_batch(iterator: DataIterator) -> dict[str, Any]:
    """The fields that the loss reads; ``tokens`` are packed in the real one, which ``unconcat_tokens`` are not."""
    batch = iterator.get_next(KEYS)
    return {**batch, "unconcat_tokens": batch["tokens"]}


def get_log_probs_and_entropy(args: Namespace, batch: dict[str, Any], logits: Tensor) -> dict[str, list[Tensor]]:
    """``loss.py``, of one rank: a token's logits are in the row before it."""
    log_probs, entropy, end = [], [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        rows = (logits[0, end - response - 1 : end - 1] / args.rollout_temperature).log_softmax(-1)
        log_probs.append(rows.gather(-1, tokens[-response:, None])[:, 0])
        entropy.append(-(rows.exp() * rows).sum(-1))
    return {"log_probs": log_probs, "entropy": entropy}


def policy_loss_function(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """``loss.py``: a KL term has all tokens."""
    log_probs = torch.cat(get_log_probs_and_entropy(args, batch, logits)["log_probs"])
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    moved = log_probs - (torch.cat(old) if old else log_probs.detach())
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * moved.exp()) + 0.1 * sum_of_sample_mean(moved**2)
    return loss, {"loss": loss.detach()}


def reducer(batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """``get_sum_of_sample_mean`` in ``cp_utils.py``, with --calculate-per-token-loss."""
    mask = torch.cat(batch["loss_masks"])
    return lambda values: (values * mask).sum()


def train_actor(
    hooks: ModuleType, args: Namespace, rollout_id: int, rollout_data: dict[str, Any], samples: list[Tensor],
    micro_batches: list[list[int]],
) -> list[Tensor]:  # fmt: skip
    """``train_actor`` in slime's ``actor.py``, with one training step for a rollout step. ``samples`` are logits; their
    gradients are returned.
    """
    leaves, batches = [sample.clone().requires_grad_() for sample in samples], DataIterator(rollout_data, micro_batches)
    reuses = args.loss_type == "policy_loss" and not args.use_rollout_logprobs  # the log-probabilities of the loss
    if not args.use_rollout_logprobs and not reuses:
        for indices in micro_batches:
            scores = get_log_probs_and_entropy(args, get_batch(batches), packed([samples[i] for i in indices]))
            for name in ("log_probs", "entropy")[: 1 + args.use_rollout_entropy]:
                places = rollout_data.setdefault(name, [None] * len(samples))
                for index, values in zip(indices, scores[name], strict=True):
                    places[index] = values.detach()
    hooks.choose_tokens(args, rollout_id, rollout_data)
    batches.offset = 0
    for indices in micro_batches:
        batch = get_batch(batches)
        policy_loss_function(args, batch, packed([leaves[i] for i in indices]), reducer(batch))[0].backward()
    return [leaf.grad for leaf in leaves]


def packed(samples: list[Tensor]) -> Tensor:
    """``[1, T, V]``, padded at its end."""
    return torch.cat([*samples, torch.full((6, samples[0].shape[-1]), torch.nan)]).unsqueeze(0)


def of_megatron(*ranks: Any, losses: str = LOSSES[0], **layout: Any) -> dict[str, Any]:
    """The modules of a rank."""
    return {
        "megatron.core.parallel_state": parallel_state(*ranks, **layout),
        losses: SimpleNamespace(policy_loss_function=policy_loss_function),
    }


@pytest.fixture
def hooks() -> Iterator[ModuleType]:
    """The recipe for slime on one rank; as in the trainers, its groups are groups of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with installed(of_megatron(dist.group.WORLD, 0, dist.group.WORLD)):
        yield recipe()
    dist.destroy_process_group()


@pytest.fixture
def miles(hooks: ModuleType) -> ModuleType:
    return recipe_for_miles()


def arguments(**options: Any) -> Namespace:
    """A trainer's arguments; options of --custom-config-path are attributes too."""
    given = {
        "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
        "n_samples_per_prompt": GROUP, "global_batch_size": GROUPS, "rollout_temperature": 0.7, "num_rollout": 10,
        "log_passrate": False, "reward_key": None, "rollout_sample_filter_path": "d3s_slime.keep_rollouts",
        "rollout_function_path": "my.rollouts", "use_rollout_logprobs": False, "use_rollout_entropy": True,
        "loss_type": "custom_loss",
        "d3s_rollouts_start": 2, "d3s_rollouts_end": 2, "d3s_token_ratio_start": RATIO, "d3s_token_ratio_end": RATIO,
        "d3s_loss_denominator": "all",
    }  # fmt: skip
    return Namespace(**given | options)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def groups_of(rewards: Any) -> list[list[Sample]]:
    metadata = {"source": "a"}
    return [[Sample(10 * g + i, r, metadata) for i, r in enumerate(row)] for g, row in enumerate(rewards)]


def spread_rewards() -> Tensor:
    """Rewards whose spread differs between groups, with nearly none in the first."""
    return torch.randn(GROUPS, GROUP) * torch.arange(GROUPS).unsqueeze(1) + torch.randn(GROUPS, 1)


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, "group"), ({"grpo_std_normalization": False}, "none"), ({"advantage_estimator": "cispo"}, "group"),
     ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "none")],
)  # fmt: skip
def test_rollouts(hooks: ModuleType, options: dict[str, Any], scale: str) -> None:
    rewards = spread_rewards()
    data = groups_of(rewards.tolist())
    everything = [sample for group in data for sample in group]
    samples, raw, normalised = rollouts_to_train_on(hooks, arguments(**options), data)
    advantages = reference.group_advantages(rewards, scale=scale, eps=1e-6)
    kept = reference.select_rollouts(advantages, 2).flatten()
    assert samples == [s for s, k in zip(everything, kept.tolist(), strict=True) if k]
    assert all(data)
    assert all(sample.metadata["source"] == "a" for sample in samples)
    torch.testing.assert_close(torch.tensor(raw), rewards.flatten()[kept])
    torch.testing.assert_close(torch.tensor(normalised), advantages.flatten()[kept].float(), rtol=1e-5, atol=1e-5)


def test_advantages_of_the_kept_rollouts(hooks: ModuleType) -> None:
    args = arguments(d3s_rollout_scope="group", d3s_rollouts_start=3, d3s_rollouts_end=3, d3s_advantages_from="kept")
    _, raw, normalised = rollouts_to_train_on(hooks, args, groups_of(spread_rewards().tolist()))
    expected = reference.group_advantages(torch.tensor(raw).view(GROUPS, 3))
    torch.testing.assert_close(torch.tensor(normalised).view(GROUPS, 3), expected.float(), rtol=1e-3, atol=1e-3)


def test_only_groups_with_a_share_of_the_variance(hooks: ModuleType) -> None:
    rewards = spread_rewards()
    rewards[-1] *= 99
    data = groups_of(rewards.tolist())
    last = list(data[-1])
    hooks.keep_rollouts(arguments(d3s_group_variance_mass=0.9, global_batch_size=2), data)
    assert [[sample in last for sample in group] for group in data] == [[True, True]]


@pytest.mark.parametrize(("rollouts", "sizes"), [(0.2, [3, 1]), (0.5, [3, 2])])
def test_groups_of_other_sizes(hooks: ModuleType, rollouts: float, sizes: list[int]) -> None:
    """A share is of the trainer's group of 6. 2 are the fewest, and 4 of all; or 6 are asked for, and there are 5."""
    data = groups_of([[{"score": 0}, {"score": 1}, {"score": 2}], [{"score": 5}, {"score": 5}]])
    args = arguments(d3s_rollouts_start=rollouts, d3s_rollouts_end=rollouts, global_batch_size=sum(sizes))
    args.reward_key = "score"
    hooks.keep_rollouts(args, data)
    assert [len(group) for group in data] == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d3s_rollouts_start": 1.5}, r"d3s_rollouts_start: got 1\.5; takes a share"),
        ({"d3s_rollouts_end": 3}, "d3s_rollouts_end: got 3; takes d3s_rollouts_start, which is 2: steps have a fixed"),
        ({"d3s_rolouts": 8}, "d3s_rolouts: got 8, but it is no option; the options are d3s_rollouts_start, "),
        ({"advantage_estimator": "ppo"}, r"advantage_estimator: got 'ppo'; takes one of \('grpo', 'gspo'"),
        ({"rewards_normalization": False}, "disable_rewards_normalization: got True; takes False"),
        ({"log_passrate": True}, "log_passrate: got True; takes False"),
        ({"global_batch_size": 5}, "global_batch_size: got 5; takes a divisor of 8, the rollouts kept"),
    ],
)
def test_rollouts_refuse(hooks: ModuleType, options: dict[str, Any], message: str) -> None:
    data = groups_of(spread_rewards().tolist())
    before = [list(group) for group in data]
    with pytest.raises(ValueError, match=message):
        hooks.keep_rollouts(arguments(**options), data)
    assert data == before


def test_other_refusals_of_rollouts(hooks: ModuleType) -> None:
    data = groups_of(spread_rewards().tolist())
    hooks.keep_rollouts(arguments(global_batch_size=5, use_dynamic_global_batch_size=True), data)  # miles
    assert sum(map(len, data)) == 8
    with pytest.raises(ValueError, match=r"reward: got \[0\.5, 1\.0\]; takes one for all samples of a rollout"):
        hooks.keep_rollouts(arguments(), [[[Sample(0, 0.5, {}), Sample(1, 1.0, {})]]])
    for path, message in (
        (None, r"rollout_sample_filter_path: got None; takes d3s_slime\.keep_rollouts"),
        (
            "d3s_slime.keep_rollouts",
            r"rollout_function_path: got 'my\.rollouts'; takes one that calls the sample",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            hooks.post_process_rewards(arguments(rollout_sample_filter_path=path), [Sample(0, 1.0, {})])


def test_rollouts_of_several_samples(hooks: ModuleType) -> None:
    """They are chosen as rollouts, and each of their samples has the rollout's advantage."""
    rewards = spread_rewards()
    plain, data = groups_of(rewards.tolist()), groups_of(rewards.tolist())
    for group in data:
        group[1:] = [[one, Sample(-one.index, one.reward, one.metadata)] for one in group[1:]]
    for each in (plain, data):
        hooks.keep_rollouts(arguments(), each)
    assert any(isinstance(rollout, list) for group in data for rollout in group)
    for group, of_one in zip(data, plain, strict=True):
        for rollout, one in zip(group, of_one, strict=True):
            for sample in rollout if isinstance(rollout, list) else [rollout]:
                assert abs(sample.index) == one.index
                assert sample.metadata == one.metadata


# ---- tokens ----------------------------------------------------------------------------------------------------------

TOTALS, RESPONSES, VOCABULARY, TEMPERATURE = [9, 7, 14], [4, 3, 9], 50, 0.7


def samples_of() -> tuple[dict[str, Any], list[Tensor], Tensor]:
    """A rank's samples, the logits of each, and the rows among them that the responses are drawn from.

    The temperature decides which tokens are chosen. A tool's output, which is masked, has the highest entropy. Tokens
    of a kind have nearly equal entropies, so their advantages differ: no choice is left to rounding.
    """
    samples, clean = [], []
    for total, response in zip(TOTALS, RESPONSES, strict=True):
        clean.append(torch.randn(response, VOCABULARY) * 0.01)
        clean[-1][::2, 2:] -= 40  # entropy is ln 2 at any temperature
        clean[-1][1::2, 0] += 6  # entropy above ln 2 at temperature 1, below it at 0.7
        if response == 9:
            clean[-1][3:6] = torch.randn(3, VOCABULARY) * 0.01
        samples.append(torch.full((total, VOCABULARY), torch.nan))  # prompts must not be read
        samples[-1][total - response - 1 : -1] = clean[-1]  # the row before a token predicts it
    masks = [torch.ones(n, dtype=torch.int32) for n in RESPONSES]
    masks[2][3:6] = 0
    data = {
        "total_lengths": TOTALS, "response_lengths": RESPONSES, "loss_masks": masks,
        "tokens": [torch.randint(2, (n,)) for n in TOTALS],
        "advantages": [a * (1 + 0.1 * torch.rand(n)) for n, a in zip(RESPONSES, (0.5, -1.5, 1.0), strict=True)],
    }  # fmt: skip
    return data, samples, torch.cat(clean)


def micro_batch() -> tuple[dict[str, Any], Tensor, Tensor]:
    """A batch of all samples, as a trainer hands it to its loss, the logits ``[1, T, V]``, and the responses' rows."""
    data, samples, rows = samples_of()
    data["log_probs"] = [-torch.rand(n) for n in RESPONSES]
    return get_batch(DataIterator(data, [[0, 1, 2]])), packed(samples), rows


def expected(
    batch: dict[str, Any], rows: Tensor, temperature: float = TEMPERATURE, among: Any = True, **options: Any
) -> Tensor:
    mask = torch.cat(batch["loss_masks"]).bool() & among
    entropy = reference.entropy(rows, temperature=temperature).float()
    kept = reference.select_tokens(entropy, torch.cat(batch["advantages"]), RATIO, mask=mask, **options).mask
    assert 0 < kept.sum() < mask.sum()
    return kept


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_tokens_in_slime(hooks: ModuleType, scope: str) -> None:
    """They are chosen from all micro-batches at once, and the others have no gradient."""
    data, samples, rows = samples_of()
    before = dict(data)
    gradients = train_actor(hooks, arguments(d3s_token_scope=scope), 0, data, samples, [[2, 0], [1]])
    kept = expected(before, rows, offsets=torch.tensor([0, *RESPONSES]).cumsum(0), scope=scope)
    advantages = torch.cat(before["advantages"])
    torch.testing.assert_close(torch.cat(data["advantages"]), advantages * kept)
    assert [len(values) for values in data["advantages"]] == RESPONSES
    of_responses = [gradient[-n - 1 : -1] for gradient, n in zip(gradients, RESPONSES, strict=True)]
    assert torch.equal(torch.cat(of_responses).abs().sum(-1) > 0, kept)
    assert data["d3s/token_share"] == kept.sum() / torch.cat(data["loss_masks"]).sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_rollout_entropy": False}, "use_rollout_entropy: got False; takes True"),
        ({"loss_type": "policy_loss"}, "loss_type: got 'policy_loss'; takes 'custom_loss', so that slime has a pass"),
        (
            {"use_rollout_logprobs": True},
            "loss_type: got 'custom_loss'; takes .* which use_rollout_logprobs also",
        ),
    ],
)
def test_slime_without_entropies(hooks: ModuleType, options: dict[str, Any], message: str) -> None:
    data, samples, _ = samples_of()
    data["rollout_log_probs"] = [-torch.rand(n) for n in RESPONSES]
    with pytest.raises(ValueError, match=message):
        train_actor(hooks, arguments(**options), 0, data, samples, [[0, 1, 2]])


def test_other_stages_of_slimes_pipeline_have_nothing_to_choose(hooks: ModuleType) -> None:
    with installed(of_megatron(None, 0, None, last_stage=False)):
        hooks.choose_tokens(arguments(use_rollout_entropy=False), 0, {})


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_tokens_in_miles(miles: ModuleType, losses: str, scope: str) -> None:
    batch, logits, rows = micro_batch()
    before, advantages = dict(batch), torch.cat(batch["advantages"])
    args, reduce = arguments(d3s_token_scope=scope), reducer(batch)
    leaf = logits.clone().requires_grad_()
    with installed({LOSSES[0]: None, **of_megatron(dist.group.WORLD, 0, dist.group.WORLD, losses=losses)}):
        found, metrics = miles.token_loss(args, batch, leaf, reduce)
    assert all(batch[name] is before[name] for name in before)  # a recomputed loss starts from the same batch
    kept = expected(batch, rows, offsets=torch.tensor([0, *RESPONSES]).cumsum(0), scope=scope)
    plain = logits.clone().requires_grad_()
    of_kept = {**batch, "advantages": (advantages * kept).split(RESPONSES)}
    wanted, theirs = policy_loss_function(args, of_kept, plain, reduce)
    torch.testing.assert_close(found, wanted)
    gradients = (torch.autograd.grad(value, of)[0] for value, of in ((found, leaf), (wanted, plain)))
    torch.testing.assert_close(*gradients, equal_nan=True)
    assert metrics == {**theirs, "d3s/token_share": reduce(kept.float())}
    if scope == "batch":
        assert not torch.equal(kept, expected(batch, rows, temperature=1.0))


def test_scores_that_miles_did_not_compute(miles: ModuleType) -> None:
    """With --use-rollout-logprobs there is no pass before the update."""
    batch, logits, rows = micro_batch()
    batch |= {"rollout_log_probs": batch["log_probs"], "log_probs": None}
    _, metrics = miles.token_loss(arguments(use_rollout_logprobs=True), batch, logits, reducer(batch))
    assert metrics["d3s/token_share"] == expected(batch, rows).sum()


def test_off_policy_tokens_have_no_gradient(miles: ModuleType) -> None:
    """The share is of the others, and the ratio weighs their loss."""
    batch, logits, rows = micro_batch()
    batch["rollout_log_probs"] = [old + 0.5 * torch.randn(len(old)) for old in batch["log_probs"]]
    rule = {"d3s_off_policy_rule": "token_mask", "d3s_off_policy_low": 0.7, "d3s_off_policy_high": 1.5}
    args, reduce, leaf = arguments(**rule), reducer(batch), logits.clone().requires_grad_()
    found, metrics = miles.token_loss(args, batch, leaf, reduce)
    ratio = torch.cat([p - q for p, q in zip(batch["log_probs"], batch["rollout_log_probs"], strict=True)]).exp()
    kept = expected(batch, rows, among=(ratio >= 0.7) & (ratio <= 1.5))
    changed = {**batch, "advantages": (torch.cat(batch["advantages"]) * torch.where(kept, ratio, 0)).split(RESPONSES)}
    torch.testing.assert_close(found, policy_loss_function(args, changed, logits, reduce)[0])
    assert metrics["d3s/token_share"] == kept.sum()
    refused = "d3s_off_policy_rule: got 'token_mask'; takes 'none' with use_tis or use_rollout_logprobs, or without"
    without = [batch | {name: None} for name in ("log_probs", "rollout_log_probs")]
    others = [arguments(**rule, **{name: True}) for name in ("use_tis", "use_rollout_logprobs")]
    for bad_args, bad_batch in (*((other, batch) for other in others), *((args, part) for part in without)):
        with pytest.raises(ValueError, match=refused):
            miles.token_loss(bad_args, bad_batch, logits, reduce)


HALF = {"d3s_token_ratio_start": 0.5, "d3s_token_ratio_end": 0.5}


def test_cut_responses_have_weights(hooks: ModuleType) -> None:
    data, samples, _ = samples_of()
    torch.manual_seed(1)  # some draws keep one token of each response, and the weight of a first token is 1
    advantages, generator = torch.cat(data["advantages"]), torch.get_rng_state()
    train_actor(hooks, arguments(d3s_token_rule="prefix", **HALF), 0, data, samples, [[0, 1, 2]])
    torch.set_rng_state(generator)
    mask, offsets = torch.cat(data["loss_masks"]), torch.tensor([0, *RESPONSES]).cumsum(0)
    weight = d3s.random_prefixes(mask, 0.5, offsets=offsets).weight
    assert weight.max() > 1
    torch.testing.assert_close(torch.cat(data["advantages"]), advantages * weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d3s_token_ratio_start": 0}, r"d3s_token_ratio_start: got 0; takes a number in \(0, 1\]"),
        ({"d3s_token_ratio_end": 0.5}, r"d3s_token_ratio_end: got 0\.5; takes 0\.25, unless start_step is called"),
        ({"d3s_token_rule": "entropy_quantile"}, "process_group: got one with rule 'entropy_quantile'"),
        ({"d3s_loss_denominator": "kept"}, "d3s_loss_denominator: got 'kept'; takes 'all'"),
        ({"d3s_drop_shared_tokens": True}, "d3s_drop_shared_tokens: got True; takes false"),
        ({"advantage_estimator": "gspo"}, "advantage_estimator: got 'gspo'; takes one with a ratio for each token"),
        ({"qkv_format": "bshd"}, "qkv_format: got 'bshd'; takes 'thd'"),
    ],
)
def test_tokens_refuse(miles: ModuleType, options: dict[str, Any], message: str) -> None:
    batch, logits, _ = micro_batch()
    with pytest.raises(ValueError, match=message):
        miles.token_loss(arguments(**options), batch, logits, reducer(batch))


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_layouts_of_ranks_that_are_refused(hooks: ModuleType, miles: ModuleType, trainer: str) -> None:
    batch, logits, _ = micro_batch()
    two = SimpleNamespace(size=lambda: 2)
    for ranks, options, message in (
        ((two, 0, None), {"d3s_token_rule": "random"}, "d3s_token_rule: got 'random'; takes another with tensor"),
        ((two, 0, None), {"d3s_token_rule": "prefix", **HALF}, "d3s_token_rule: got 'prefix'; takes another with"),
        ((dist.group.WORLD, 0, None, 2), {}, "context_parallel_size: got 2; takes 1"),
    ):
        args = arguments(**options)
        choose = hooks.choose_tokens, (args, 0, batch)
        if trainer == "miles":
            choose = miles.token_loss, (args, batch, logits, reducer(batch))
        with installed(of_megatron(*ranks)), pytest.raises(ValueError, match=message):
            choose[0](*choose[1])


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_the_share_of_tokens_follows_the_schedule(hooks: ModuleType, miles: ModuleType, trainer: str) -> None:
    args, shares = arguments(d3s_token_ratio_start=0.1, d3s_token_ratio_end=0.9), []
    for rollout_id in (0, 5, 9):
        if trainer == "slime":
            data, samples, _ = samples_of()
            train_actor(hooks, args, rollout_id, data, samples, [[0, 1, 2]])
            shares.append(round(13 * float(data["d3s/token_share"])))
        else:
            miles.start_step(args, rollout_id, 0, [], None, None)  # as train_one_step calls it
            batch, logits, _ = micro_batch()
            _, metrics = miles.token_loss(args, batch, logits, lambda values: values.sum())
            shares.append(int(metrics["d3s/token_share"]))
    assert shares == [
        math.ceil(share * 13) for share in (0.1, 0.1 + 0.8 * 5 / 9, 0.9)
    ]  # of 13 tokens that are not masked


def share_of(miles: ModuleType, batch: dict[str, Any], logits: Tensor) -> Tensor:
    """The tokens that are chosen: a reducer sees them."""
    seen: list[Tensor] = []
    losses = SimpleNamespace(policy_loss_function=lambda *_: (torch.zeros(()), {}))
    with installed({LOSSES[0]: losses}):
        miles.token_loss(arguments(), batch, logits, lambda values: seen.append(values) or torch.zeros(()))
    return seen[0].bool()


def tokens_rank(ranks: Ranks, seed: int) -> None:
    """Ranks that share the vocabulary choose the tokens of one rank; ranks with other data choose one pool's."""
    torch.manual_seed(seed)
    module, miles = recipe(), recipe_for_miles()
    alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    batch, logits, rows = micro_batch()
    shard = logits.chunk(ranks.size, dim=-1)[ranks.rank]
    with installed(of_megatron(ranks.group, ranks.rank, alone)):
        assert torch.equal(share_of(miles, batch, shard), expected(batch, rows))

    others = [samples_of() for _ in range(ranks.size)]  # the same on all ranks
    for number, (one, _, _) in enumerate(others):
        one["advantages"] = [values * (1 + number) for values in one["advantages"]]
    pooled = {name: [values for one, _, _ in others for values in one[name]] for name in ("loss_masks", "advantages")}
    kept = expected(pooled, torch.cat([rows for _, _, rows in others]))
    (data, samples, _), own = others[ranks.rank], kept.chunk(ranks.size)[ranks.rank]
    with installed(of_megatron(alone, 0, ranks.group)):
        assert torch.equal(share_of(miles, get_batch(DataIterator(data, [[0, 1, 2]])), packed(samples)), own)
        train_actor(module, arguments(), 0, data, samples, [[1], [2, 0]][:: 1 - 2 * ranks.rank])
    assert torch.equal(torch.cat(data["advantages"]) != 0, own)
    assert data["d3s/token_share"] == kept.sum() / torch.cat(pooled["loss_masks"]).sum()


def test_tokens_of_several_ranks() -> None:
    world(2).run(tokens_rank, int(torch.randint(2**31, ())), D3S_KERNELS_CHECK="1")  # shards must not overlap
