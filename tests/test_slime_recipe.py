"""The recipe for slime and miles, on a stand-in for the lines of these trainers that call it, and that it calls."""

from __future__ import annotations

import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, world
from torch import Tensor

from d3s_kernels import reference

RECIPE = Path(__file__).parents[1] / "examples" / "trainers" / "d3s_slime.py"
GROUPS, GROUP, RATIO = 4, 6, 0.25
LOSSES = {
    "token_loss": "slime.backends.megatron_utils.loss",
    "miles_token_loss": "miles.backends.training_utils.loss_hub.losses",
}


def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("d3s_slime", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def policy_loss_function(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """As ``loss.py``: a token's logits are in the row before it, and a KL term has all tokens. Of one rank."""
    scores, end = [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        rows = (logits[0, end - response - 1 : end - 1] / args.rollout_temperature).log_softmax(-1)
        scores.append(rows.gather(-1, tokens[-response:, None])[:, 0])
    moved = torch.cat(scores) - torch.cat(batch["log_probs"])
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * moved.exp()) + 0.1 * sum_of_sample_mean(moved**2)
    return loss, {"loss": loss.detach()}


def reducer(batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """``get_sum_of_sample_mean`` in ``cp_utils.py``, with --calculate-per-token-loss."""
    mask = torch.cat(batch["loss_masks"])
    return lambda values: (values * mask).sum()


def of_megatron(vocabulary: Any, rank: int, data: Any, context: int = 1) -> dict[str, Any]:
    """The modules of a rank."""
    parallel_state = SimpleNamespace(
        get_context_parallel_world_size=lambda: context,
        get_tensor_model_parallel_group=lambda: vocabulary,
        get_tensor_model_parallel_rank=lambda: rank,
        get_data_parallel_group=lambda: data,
    )
    losses = SimpleNamespace(policy_loss_function=policy_loss_function)
    return {"megatron.core.parallel_state": parallel_state, **dict.fromkeys(LOSSES.values(), losses)}


@contextmanager
def installed(modules: dict[str, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


@pytest.fixture
def hooks() -> Iterator[ModuleType]:
    """The recipe on one rank; as in the trainers, its groups are groups of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with installed(of_megatron(dist.group.WORLD, 0, dist.group.WORLD)):
        yield recipe()
    dist.destroy_process_group()


def arguments(**options: Any) -> Namespace:
    """A trainer's arguments; options of --custom-config-path are attributes too."""
    given = {
        "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
        "n_samples_per_prompt": GROUP, "global_batch_size": GROUPS, "rollout_temperature": 0.7, "num_rollout": 10,
        "log_passrate": False, "reward_key": None, "rollout_sample_filter_path": None,
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
    with pytest.raises(ValueError, match=r"rollout_sample_filter_path: got None; takes d3s_slime\.keep_rollouts"):
        hooks.post_process_rewards(arguments(), [Sample(0, 1.0, {})])


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


def micro_batch() -> tuple[dict[str, Any], Tensor, Tensor]:
    """A batch, its logits ``[1, T, V]``, and the rows among them that the responses are drawn from.

    The temperature decides which tokens are chosen. A tool's output, which is masked, has the highest entropy. Tokens
    of a kind have nearly equal entropies, so their advantages differ: no choice is left to rounding.
    """
    logits = torch.full((1, sum(TOTALS) + 6, VOCABULARY), torch.nan)  # prompts and padding must not be read
    clean, end = [], 0
    for total, response in zip(TOTALS, RESPONSES, strict=True):
        end += total
        clean.append(torch.randn(response, VOCABULARY) * 0.01)
        clean[-1][::2, 2:] -= 40  # entropy is ln 2 at any temperature
        clean[-1][1::2, 0] += 6  # entropy above ln 2 at temperature 1, below it at 0.7
        if response == 9:
            clean[-1][3:6] = torch.randn(3, VOCABULARY) * 0.01
        logits[0, end - response - 1 : end - 1] = clean[-1]  # the row before a token predicts it
    masks = [torch.ones(n, dtype=torch.int32) for n in RESPONSES]
    masks[2][3:6] = 0
    batch = {
        "total_lengths": TOTALS, "response_lengths": RESPONSES, "loss_masks": masks,
        "unconcat_tokens": [torch.randint(2, (n,)) for n in TOTALS],
        "advantages": [a * (1 + 0.1 * torch.rand(n)) for n, a in zip(RESPONSES, (0.5, -1.5, 1.0), strict=True)],
        "log_probs": [-torch.rand(n) for n in RESPONSES],
    }  # fmt: skip
    return batch, logits, torch.cat(clean)


def expected(
    batch: dict[str, Any], rows: Tensor, temperature: float = TEMPERATURE, among: Any = True, **options: Any
) -> Tensor:
    mask = torch.cat(batch["loss_masks"]).bool() & among
    entropy = reference.entropy(rows, temperature=temperature).float()
    kept = reference.select_tokens(entropy, torch.cat(batch["advantages"]), RATIO, mask=mask, **options).mask
    assert 0 < kept.sum() < mask.sum()
    return kept


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_tokens(hooks: ModuleType, loss: str, scope: str) -> None:
    batch, logits, rows = micro_batch()
    before, advantages = dict(batch), torch.cat(batch["advantages"])
    args, reduce = arguments(d3s_token_scope=scope), reducer(batch)
    leaf = logits.clone().requires_grad_()
    found, metrics = getattr(hooks, loss)(args, batch, leaf, reduce)
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


def test_off_policy_tokens_have_no_gradient(hooks: ModuleType) -> None:
    """The share is of the others, and the ratio weighs their loss."""
    batch, logits, rows = micro_batch()
    batch["rollout_log_probs"] = [old + 0.5 * torch.randn(len(old)) for old in batch["log_probs"]]
    rule = {"d3s_off_policy_rule": "token_mask", "d3s_off_policy_low": 0.7, "d3s_off_policy_high": 1.5}
    args, reduce, leaf = arguments(**rule), reducer(batch), logits.clone().requires_grad_()
    found, metrics = hooks.token_loss(args, batch, leaf, reduce)
    ratio = torch.cat([p - q for p, q in zip(batch["log_probs"], batch["rollout_log_probs"], strict=True)]).exp()
    kept = expected(batch, rows, among=(ratio >= 0.7) & (ratio <= 1.5))
    changed = {**batch, "advantages": (torch.cat(batch["advantages"]) * torch.where(kept, ratio, 0)).split(RESPONSES)}
    torch.testing.assert_close(found, policy_loss_function(args, changed, logits, reduce)[0])
    assert metrics["d3s/token_share"] == kept.sum()
    refused = "d3s_off_policy_rule: got 'token_mask'; takes 'none' with use_tis or use_rollout_logprobs, or without"
    without = [{key: v for key, v in batch.items() if key != name} for name in ("log_probs", "rollout_log_probs")]
    others = [arguments(**rule, **{name: True}) for name in ("use_tis", "use_rollout_logprobs")]
    for bad_args, bad_batch in (*((other, batch) for other in others), *((args, part) for part in without)):
        with pytest.raises(ValueError, match=refused):
            hooks.token_loss(bad_args, bad_batch, logits, reduce)


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
def test_tokens_refuse(hooks: ModuleType, options: dict[str, Any], message: str) -> None:
    batch, logits, _ = micro_batch()
    with pytest.raises(ValueError, match=message):
        hooks.token_loss(arguments(**options), batch, logits, reducer(batch))


def test_layouts_of_ranks_that_are_refused(hooks: ModuleType) -> None:
    batch, logits, _ = micro_batch()
    two = SimpleNamespace(size=lambda: 2)
    for ranks, options, message in (
        ((two, 0, None), {"d3s_token_rule": "random"}, "d3s_token_rule: got 'random'; takes another with tensor"),
        ((dist.group.WORLD, 0, None, 2), {}, "context_parallel_size: got 2; takes 1"),
    ):
        with installed(of_megatron(*ranks)), pytest.raises(ValueError, match=message):
            hooks.token_loss(arguments(**options), batch, logits, reducer(batch))


def test_the_share_of_tokens_follows_the_schedule(hooks: ModuleType) -> None:
    args, shares = arguments(d3s_token_ratio_start=0.1, d3s_token_ratio_end=0.9), []
    for rollout_id in (0, 5, 9):
        hooks.start_step(args, rollout_id, 0, [], None, None)  # as train_one_step calls it
        batch, logits, _ = micro_batch()
        _, metrics = hooks.token_loss(args, batch, logits, lambda values: values.sum())
        shares.append(int(metrics["d3s/token_share"]))
    assert shares == [
        math.ceil(share * 13) for share in (0.1, 0.1 + 0.8 * 5 / 9, 0.9)
    ]  # of 13 tokens that are not masked


def share_of(module: ModuleType, batch: dict[str, Any], logits: Tensor) -> Tensor:
    """The tokens that are chosen: a reducer sees them."""
    seen: list[Tensor] = []
    losses = SimpleNamespace(policy_loss_function=lambda *_: (torch.zeros(()), {}))
    with installed({LOSSES["token_loss"]: losses}):
        module.token_loss(arguments(), batch, logits, lambda values: seen.append(values) or torch.zeros(()))
    return seen[0].bool()


def tokens_rank(ranks: Ranks, seed: int) -> None:
    """Ranks that share the vocabulary choose the tokens of one rank; ranks with other data choose one pool's."""
    torch.manual_seed(seed)
    module, alone = recipe(), [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
    batch, logits, rows = micro_batch()
    shard = logits.chunk(ranks.size, dim=-1)[ranks.rank]
    with installed(of_megatron(ranks.group, ranks.rank, alone)):
        assert torch.equal(share_of(module, batch, shard), expected(batch, rows))

    others = [micro_batch() for _ in range(ranks.size)]  # the same on all ranks
    for number, (one, _, _) in enumerate(others):
        one["advantages"] = [values * (1 + number) for values in one["advantages"]]
    pooled = {name: [values for one, _, _ in others for values in one[name]] for name in ("loss_masks", "advantages")}
    kept = expected(pooled, torch.cat([rows for _, _, rows in others])).chunk(ranks.size)
    own, own_logits, _ = others[ranks.rank]
    with installed(of_megatron(alone, 0, ranks.group)):
        assert torch.equal(share_of(module, own, own_logits), kept[ranks.rank])


def test_tokens_of_several_ranks() -> None:
    world(2).run(tokens_rank, int(torch.randint(2**31, ())), D3S_KERNELS_CHECK="1")  # shards must not overlap
