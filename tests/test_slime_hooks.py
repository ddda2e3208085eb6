"""The hooks of slime and miles, called by stand-ins that are written from the table of what is assumed about them."""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_stand_ins
from ranks import Ranks as World
from ranks import world
from torch import Tensor

from d3s_kernels import reference
from d3s_kernels.integrations import miles, slime
from d3s_kernels.integrations._assumptions import Table, load
from d3s_kernels.integrations._megatron import Ranks
from d3s_kernels.integrations.slime.hooks import Hooks
from d3s_kernels.integrations.slime.options import D3SOptions
from d3s_kernels.integrations.slime.tokens import chosen_tokens, require_layout
from d3s_kernels.integrations.slime.trainers import TRAINERS

GROUPS, GROUP, RATIO = 4, 6, 0.25
HOOKS = {"slime": slime, "miles": miles}
ALONE = Ranks(context_parallel=1, tensor_parallel=None, tensor_rank=0, data_parallel=None)


def table_of(trainer: str) -> Table:
    return TRAINERS[trainer].table


@pytest.fixture(params=HOOKS)
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A trainer of which a stand-in is installed, on one rank."""
    with trainer_stand_ins.installed(tmp_path, table_of(request.param).assumptions):
        alone(request.param)
        yield request.param


def alone(trainer: str, context_parallel: int = 1) -> None:
    """Tells the stand-in that there is no other rank."""
    if trainer == "miles":
        one, context = (SimpleNamespace(size=size, rank=0, group=None) for size in (1, context_parallel))
        state = importlib.import_module("miles.backends.training_utils.parallel")
        state.STATE = SimpleNamespace(cp=context, tp=one, intra_dp=one)
        return
    state = importlib.import_module("megatron.core.parallel_state")
    state.get_context_parallel_world_size = lambda: context_parallel
    state.get_tensor_model_parallel_world_size = lambda: 1
    state.get_tensor_model_parallel_rank = lambda: 0
    state.get_tensor_model_parallel_group = lambda: pytest.fail("a group of one rank is not needed")
    state.get_data_parallel_group = lambda: None


def part(trainer: str, end: str) -> Any:
    """The function or class of the stand-in whose place in the table has this end."""
    return load(next(row.place for row in table_of(trainer).assumptions if row.place.endswith(end)))


def arguments(**options: Any) -> Namespace:
    """A trainer's arguments, with our options as --custom-config-path sets them."""
    given = {
        "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
        "n_samples_per_prompt": GROUP, "global_batch_size": GROUPS, "rollout_temperature": 0.7, "num_rollout": 10,
        "log_passrate": False,
        "d3s_token_pool": "micro_batch", "d3s_token_ratio_start": RATIO, "d3s_token_ratio_end": RATIO,
    }  # fmt: skip
    return Namespace(**given | options)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def groups_of(rewards: Tensor, sample: Callable[..., Any]) -> list[list[Any]]:
    numbers, metadata = iter(range(rewards.numel())), {"source": "a"}  # copies of a prompt may share it
    return [[sample(index=next(numbers), reward=r, metadata=metadata) for r in row] for row in rewards.tolist()]


def spread_rewards() -> Tensor:
    """Rewards whose spread differs between groups, with nearly none in the first."""
    return torch.randn(GROUPS, GROUP) * torch.arange(GROUPS).unsqueeze(1) + torch.randn(GROUPS, 1)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_rollouts(trainer: str, scale: str) -> None:
    rewards = spread_rewards()
    data = groups_of(rewards, part(trainer, ":Sample"))
    everything = [sample for group in data for sample in group]
    args = arguments(d3s_rollouts=2, grpo_std_normalization=scale == "group")
    hooks, ignored = HOOKS[trainer], {"dynamic_filter": None, "group": [], "call_dynamic_filter": lambda *_: None}
    part(trainer, ":generate_rollout_async")(args=args, data=data, filter_func=hooks.keep_rollouts, **ignored)

    advantages = reference.group_advantages(rewards, scale=scale, eps=1e-6)
    kept = reference.select_rollouts(advantages, 2).flatten()
    survivors = [sample for group in data for sample in group]
    assert survivors == [s for s, k in zip(everything, kept.tolist(), strict=True) if k]
    assert all(data)
    assert all(sample.metadata["source"] == "a" for sample in survivors)

    manager = SimpleNamespace(args=args, custom_reward_post_process_func=hooks.post_process_rewards)
    given = {"self": manager} if trainer == "slime" else {"args": args, "f": hooks.post_process_rewards}
    ((raw, normalised),) = part(trainer, "_post_process_rewards")(samples=survivors, **given)
    torch.testing.assert_close(torch.tensor(raw), rewards.flatten()[kept])
    torch.testing.assert_close(torch.tensor(normalised), advantages.flatten()[kept].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rollouts", "sizes"), [(0.2, [3, 1]), (1, [3, 2])])
def test_groups_of_other_sizes(trainer: str, rollouts: float, sizes: list[int]) -> None:
    """2 rollouts of a group are the fewest, and 4 of all; or 6 and 12 are asked for, and there are 5."""
    sample = part(trainer, ":Sample")
    data = [*groups_of(torch.tensor([[0.0, 1.0, 2.0]]), sample), *groups_of(torch.tensor([[5.0, 5.0]]), sample)]
    HOOKS[trainer].keep_rollouts(arguments(d3s_rollouts=rollouts, global_batch_size=sum(sizes)), data)
    assert [len(group) for group in data] == sizes


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3], [0.0, 1.0, 0.0]])
def test_dynamic_sampling(trainer: str, rewards: list[float]) -> None:
    sample, output = part(trainer, ":Sample"), part(trainer, ":DynamicFilterOutput")
    (group,) = groups_of(torch.tensor([rewards], dtype=torch.float64), sample)
    for samples in (group, [group[:2], group[2]]):  # an entry may be a rollout of several samples
        _, found = part(trainer, ":generate_rollout_async")(
            args=arguments(), data=[], filter_func=lambda *_: None, dynamic_filter=HOOKS[trainer].has_spread,
            group=samples, call_dynamic_filter=lambda hook, *given: hook(*given),
        )  # fmt: skip
        assert type(found) is output
        assert (found.keep, found.reason) == ((True, None) if rewards[0] == 0 else (False, "no_spread"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d3s_rollouts": 1.5}, r"d3s_rollouts: got 1\.5; takes a share"),
        ({"d3s_rollout_rule": "best"}, "d3s_rollout_rule: got 'best'; takes 'max_variance' or"),
        ({"d3s_rolouts": 8}, "d3s_rolouts: got 8, but it is no option; the options are d3s_rollouts, "),
        ({"advantage_estimator": "ppo"}, "advantage_estimator: got 'ppo'; takes 'grpo', 'gspo'"),
        ({"rewards_normalization": False}, "disable_rewards_normalization: got True; takes False"),
        ({"log_passrate": True}, "log_passrate: got True; takes False"),
        ({"global_batch_size": 5}, "global_batch_size: got 5, but 12 rollouts are kept; takes a divisor of 12"),
    ],
)
def test_rollouts_refuse(trainer: str, options: dict[str, Any], message: str) -> None:
    data = groups_of(spread_rewards(), part(trainer, ":Sample"))
    before = [list(group) for group in data]
    with pytest.raises(ValueError, match=message):
        HOOKS[trainer].keep_rollouts(arguments(**options), data)
    assert data == before


def test_rollouts_of_several_samples_are_refused(trainer: str) -> None:
    with pytest.raises(ValueError, match="rollouts: got one of several samples"):
        HOOKS[trainer].keep_rollouts(arguments(), [[[], []]])


# ---- tokens ----------------------------------------------------------------------------------------------------------

TOTALS, RESPONSES, VOCABULARY, TEMPERATURE = [9, 7, 14], [4, 3, 9], 50, 0.7


def micro_batch() -> tuple[dict[str, Any], Tensor, Tensor]:
    """A batch, its logits ``[1, T, V]``, and the rows among them that the responses are drawn from.

    The temperature decides which tokens are chosen. A tool's output, which is masked, has the highest entropy.
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
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": masks,
        "advantages": [torch.full((n,), a) for n, a in zip(RESPONSES, (0.5, -1.5, 1.0), strict=True)],
        "log_probs": object(),
    }
    return batch, logits, torch.cat(clean)


def expected(batch: dict[str, Any], rows: Tensor, temperature: float = TEMPERATURE, **options: Any) -> Tensor:
    mask = torch.cat(batch["loss_masks"]).bool()
    entropy = reference.entropy(rows, temperature=temperature).float()
    kept = reference.select_tokens(entropy, torch.cat(batch["advantages"]), RATIO, mask=mask, **options).mask
    assert 0 < kept.sum() < mask.sum()
    return kept


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_tokens(trainer: str, scope: str) -> None:
    batch, logits, rows = micro_batch()
    logits.requires_grad_()
    before, advantages = dict(batch), [a.clone() for a in batch["advantages"]]
    args = arguments(d3s_token_scope=scope)
    ((loss, metrics),) = part(trainer, ":loss_function")(
        args=args, batch=batch, logits=logits, sum_of_sample_mean=torch.sum, func=HOOKS[trainer].token_loss
    )

    offsets = torch.tensor([0, *RESPONSES]).cumsum(0)
    kept = expected(batch, rows, offsets=offsets, scope=scope)
    seen = metrics["seen"]["advantages"]
    assert [len(values) for values in seen] == RESPONSES
    assert torch.equal(torch.cat(seen), torch.cat(advantages) * kept)
    assert torch.equal(loss, torch.cat(seen).sum())
    assert metrics["d3s/token_share"] == kept.sum()
    assert all(batch[name] is before[name] for name in before)  # a recomputed loss starts from the same batch
    assert all(metrics["seen"][name] is before[name] for name in before if name != "advantages")
    assert all(torch.equal(a, b) for a, b in zip(batch["advantages"], advantages, strict=True))
    if scope == "batch":
        assert not torch.equal(kept, expected(batch, rows, temperature=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d3s_token_ratio_start": 0}, r"d3s_token_ratio_start: got 0; takes a number in \(0, 1\]"),
        ({"d3s_token_pool": "all"}, "d3s_token_pool: got 'all'; takes 'data_parallel' or 'micro_batch'"),
        (
            {"d3s_token_rule": "entropy_quantile", "d3s_token_pool": "data_parallel"},
            "d3s_token_pool: got 'data_parallel' with token_rule 'entropy_quantile'; takes 'micro_batch'",
        ),
        ({"d3s_token_ratio_end": 0.5}, r"d3s_token_ratio_end: got 0\.5 with .*takes the same number, unless"),
        ({"advantage_estimator": "gspo"}, "advantage_estimator: got 'gspo'"),
        ({"qkv_format": "bshd"}, "qkv_format: got 'bshd' and logits of shape"),
    ],
)
def test_tokens_refuse(trainer: str, options: dict[str, Any], message: str) -> None:
    batch, logits, _ = micro_batch()
    with pytest.raises(ValueError, match=message):
        HOOKS[trainer].token_loss(arguments(**options), batch, logits, torch.sum)


def test_context_parallelism_is_refused(trainer: str) -> None:
    alone(trainer, context_parallel=2)
    batch, logits, _ = micro_batch()
    with pytest.raises(ValueError, match="context_parallel_size: got 2; takes 1"):
        HOOKS[trainer].token_loss(arguments(), batch, logits, torch.sum)


def test_the_share_of_tokens_follows_the_schedule(trainer: str) -> None:
    hooks = Hooks(TRAINERS[trainer])
    args = arguments(d3s_token_ratio_start=0.1, d3s_token_ratio_end=0.9)
    shares = []
    for rollout_id in (0, 5, 9):
        model = importlib.import_module(f"{trainer}.backends.megatron_utils.model")
        model.call_0(
            args=args, rollout_id=rollout_id, custom_before_train_step_hook=hooks.start_step,
            **dict.fromkeys(("step_id", "model", "optimizer", "opt_param_scheduler")),
        )  # fmt: skip
        batch, logits, _ = micro_batch()
        _, metrics = hooks.token_loss(args, batch, logits, torch.sum)
        shares.append(int(metrics["d3s/token_share"]))
    assert shares == [math.ceil(share * 13) for share in (0.1, 0.5, 0.82)]  # of 13 tokens that are not masked


def tokens_rank(ranks: World, seed: int) -> None:
    """Ranks that share the vocabulary choose the tokens of one rank; ranks with other data choose one pool's."""
    torch.manual_seed(seed)
    batch, logits, rows = micro_batch()
    args, options = arguments(), D3SOptions.from_args(arguments(d3s_token_pool="data_parallel"))
    width = VOCABULARY // ranks.size
    shard = logits[..., ranks.rank * width : (ranks.rank + 1) * width]
    shared = ALONE._replace(tensor_parallel=ranks.group, tensor_rank=ranks.rank)
    assert torch.equal(chosen_tokens(args, batch, shard, options, RATIO, shared), expected(batch, rows))

    others = [micro_batch() for _ in range(ranks.size)]  # the same on all ranks
    for number, (one, _, _) in enumerate(others):
        one["advantages"] = [values * (1 + number) for values in one["advantages"]]
    pooled = {name: [values for one, _, _ in others for values in one[name]] for name in ("loss_masks", "advantages")}
    kept = expected(pooled, torch.cat([rows for _, _, rows in others])).chunk(ranks.size)
    own, own_logits, own_rows = others[ranks.rank]
    found = chosen_tokens(args, own, own_logits, options, RATIO, ALONE._replace(data_parallel=ranks.group))
    assert torch.equal(found, kept[ranks.rank])
    alone = D3SOptions.from_args(arguments(d3s_token_pool="micro_batch"))
    found = chosen_tokens(args, own, own_logits, alone, RATIO, ALONE._replace(data_parallel=ranks.group))
    assert torch.equal(found, expected(own, own_rows))


def test_tokens_of_several_ranks() -> None:
    world(2).run(tokens_rank, int(torch.randint(2**31, ())), D3S_KERNELS_CHECK="1")  # shards must not overlap


def test_random_tokens_of_a_shared_vocabulary_are_refused() -> None:
    options = D3SOptions.from_args(arguments(d3s_token_rule="random"))
    with pytest.raises(ValueError, match="d3s_token_rule: got 'random' with tensor parallelism"):
        require_layout(arguments(), torch.zeros(1, 2, 3), options, ALONE._replace(tensor_parallel=object()))
