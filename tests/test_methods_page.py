"""The lines of docs/methods.md do what the page says, and the page lists every rule and function."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader

import d3s_kernels as d3s
from d3s_kernels import planning, reference
from d3s_kernels._rules.rules import ROLLOUT_RULES, TOKEN_RULES
from d3s_kernels.off_policy import importance_ratio, trusted_tokens
from d3s_kernels.off_policy.trusted_tokens import RULES
from d3s_kernels.planning.profile.__main__ import _arguments

PAGE = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
LINES: dict[str, str] = dict(re.findall(r"^\| (\S.*?) \| .*?`(\w+ = [^`]+)` \| [^|]*\|$", PAGE, re.MULTILINE))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

GROUPS, N, KEEP, RATIO, VOCABULARY = 5, 8, 3, 0.25, 1000
Oracle = Callable[[Any], Tensor]


def run(method: str, values: dict[str, Any]) -> Any:
    line = LINES[method]
    exec(line, values)
    return values[line.partition(" = ")[0]]


def highest(values: Tensor, count: int) -> Tensor:
    """The highest values of each row; of equal ones the first."""
    places = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros(values.shape, dtype=torch.bool).scatter(-1, places, True)


def pooled(values: Tensor, count: int) -> Tensor:
    return highest(values.flatten(), count).view_as(values)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def names_of_rollouts() -> dict[str, Any]:
    """The names that the page uses. Rewards (except in the first group) and lengths are distinct."""
    rewards = torch.randn(GROUPS, N)
    rewards[0] = 0.1
    numbers = {"keep": KEEP, "n": N, "batch": GROUPS * N, "p": 0.3, "low": 0.2, "high": 0.8}
    return numbers | {
        "torch": torch,
        "d3s": d3s,
        "rewards": rewards,
        "advantages": reference.group_advantages(rewards),
        "lengths": (torch.randperm(GROUPS * N).float() + 1).view(GROUPS, N),
        "kept": reference.max_variance_select(rewards, KEEP),
        "verified": torch.rand(GROUPS, N) < 0.8,
    }


def centred(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(-1, keepdim=True)


def standardised(rewards: Tensor, counted: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Standardises the counted rewards of each group. The others are 0, also where the counted ones are equal."""
    result = torch.zeros(GROUPS, N)
    for row, group, chosen in zip(result, rewards.double(), counted, strict=True):
        scored = group[chosen]
        if len(set(scored.tolist())) > 1:
            row[chosen] = ((scored - scored.mean()) / (scored.std(correction=ddof) + eps)).float()
    return result


ROLLOUTS: dict[str, Oracle] = {
    "D3S": lambda v: reference.select_rollouts(v.advantages, KEEP),
    "D3S-I": lambda v: reference.max_variance_select(v.advantages, KEEP),
    "PODS, max-variance": lambda v: reference.max_variance_select(v.rewards, KEEP),
    "PODS, percentile": lambda v: reference.select_rollouts(v.rewards, KEEP, rule="percentile", scope="group"),
    "GFPO, shortest": lambda v: highest(-v.lengths, KEEP),
    "GRPO, advantages": lambda v: standardised(v.rewards, torch.ones(GROUPS, N, dtype=torch.bool)),
    "Dr. GRPO": lambda v: centred(v.rewards),
    "Lite-PPO": lambda v: centred(v.rewards) / (v.rewards.std() + 1e-4),
    "PODS, advantages": lambda v: standardised(v.rewards, v.kept),
    "GFPO, advantages": lambda v: standardised(v.rewards, v.kept, 0, 0.0),
    "MaxRL, advantages": lambda v: centred(v.rewards) / (v.rewards.mean(-1, keepdim=True) + 1e-6),
    "ESPO, advantages": lambda v: standardised(v.rewards, v.verified),
    "DAPO, dynamic sampling": lambda v: torch.tensor([len(set(row)) > 1 for row in v.rewards.tolist()]),
    "RAGEN-2": lambda v: reference.variance_mass(v.rewards, 0.9),
    "PODS, max-reward": lambda v: highest(v.rewards, KEEP),
    "GFPO, token efficiency": lambda v: highest(v.rewards / v.lengths, KEEP),
    "CPPO, in groups": lambda v: highest(v.advantages.abs(), N - int(N * 0.3)),
    "CPPO, in the batch": lambda v: pooled(v.advantages.abs(), GROUPS * N - int(GROUPS * N * 0.3)),
}


@pytest.mark.parametrize("method", ROLLOUTS)
def test_lines_of_rollouts(method: str) -> None:
    values = names_of_rollouts()
    expected = ROLLOUTS[method](SimpleNamespace(**values))
    torch.testing.assert_close(run(method, values), expected, rtol=1e-5, atol=1e-6)


def test_groups_go_into_a_rule_as_its_mask() -> None:
    values = names_of_rollouts()
    groups = run("DAPO, dynamic sampling", values)
    (given,) = re.findall(r"`(mask=groups[^`]+)`", PAGE)
    kept = eval(f"d3s.select_rollouts(rewards, keep, rule='random', scope='group', {given})", values)
    assert (kept.sum(-1) == KEEP * groups).all()
    assert (run("PODS, random", values).sum(-1) == KEEP).all()


def test_lines_of_shares_and_steps() -> None:
    """With 0, 2, ... 10 correct answers of ten, both ends of the band of difficulty belong to it."""
    values = names_of_rollouts() | {"rewards": (torch.arange(10) < torch.arange(0, 11, 2).unsqueeze(-1)).float()}
    assert run("Online Difficulty Filtering", values).tolist() == [False, True, True, True, True, False]
    found = [run("D3S, schedule", values | {"progress": progress}) for progress in (0, 0.5, 1)]
    assert found == [(8, 0.05), (20, 0.125), (32, 0.2)]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def names_of_tokens() -> dict[str, Any]:
    """Probabilities, with entropies between 0 and 1. Some tokens, and some sequences, are far from how they were."""
    mask, entropy, advantages, old = torch.rand(6, 40) < 0.8, torch.rand(6, 40), torch.randn(6), -3 * torch.rand(6, 40)
    advantages[0] = advantages[0].abs()  # at least one is above 0
    logprob, sampled = old + 0.3 * torch.randn(6, 40), old + torch.randn(6, 40) * torch.rand(6, 1).mul(2)
    sampled[0], sampled[1] = old[0], old[1] - 0.1
    A, sentence_ids = advantages[:, None], (torch.rand(6, 40) < 0.2).cumsum(-1)
    of_tokens = (sentence_ids + 100 * torch.arange(6).unsqueeze(-1))[mask]  # another number for each sentence
    groups = reference.entropy_groups(entropy, mask)
    return {
        "torch": torch, "d3s": d3s, "entropy": entropy, "mask": mask, "advantages": advantages, "A": A, "ratio": RATIO,
        "logprob": logprob, "old_logprob": old, "sampling_logprob": sampled, "p": logprob.exp(), "old_p": old.exp(),
        "c": 3 * (A - A.expand(6, 40)[mask].mean()) * (logprob - logprob[mask].mean()), "n": int(mask.sum()),
        "clipped": torch.rand(6, 40) < 0.1, "low": 0.1, "high": 0.15, "tau_p": 0.4, "tau_h": 0.6, "delta": 0.05,
        "groups": groups, "vocab_size": VOCABULARY, "sentence_ids": sentence_ids,
        "sentences": pad(torch.unique_consecutive(of_tokens, return_counts=True)[1].cumsum(0), (1, 0)),
        "epsilon": reference.adaptive_clip(entropy, groups, mask, vocab_size=VOCABULARY),
    }  # fmt: skip


def upper(v: Any, values: Tensor, share: int) -> Tensor:
    """The upper share of each sequence's tokens."""
    rows = zip(values, v.mask, strict=True)
    return torch.stack([mask & highest(row.masked_fill(~mask, -1), -(-int(mask.sum()) // share)) for row, mask in rows])


def best(v: Any, values: Tensor) -> Tensor:
    """The upper quarter of all tokens."""
    return pooled(values.masked_fill(~v.mask, -1), math.ceil(RATIO * v.n))


def far(v: Any, rule: str, **bounds: Any) -> Tensor:
    """A rule's weights, with the bounds that it has by default or on the page."""
    return d3s.trusted_tokens(v.old_logprob, v.sampling_logprob, rule, mask=v.mask, **bounds).weight


def means(values: Tensor, groups: Tensor) -> Tensor:
    """The mean of the values of each group of each row; 0 where the index is below 0, so there is no group."""
    result = torch.zeros(values.shape, dtype=torch.float64)
    for row, of_row, number in zip(result, values.double(), groups, strict=True):
        for group in number[number >= 0].unique():
            row[number == group] = of_row[number == group].mean()
    return result


def moves(v: Any) -> Tensor:
    return (v.logprob.double() - v.old_logprob.double()).masked_fill(~v.mask, 0)


TOKENS: dict[str, Oracle] = {
    "D3S, tokens": lambda v: best(v, v.A.abs() * v.entropy),
    "80/20": lambda v: best(v, v.entropy),
    "entropy, in sequences": lambda v: upper(v, v.entropy, 4),
    r"\|A\| alone": lambda v: best(v, v.A.abs().expand(6, 40)),  # each from its first token on
    "IcePop": lambda v: far(v, "token_mask", low=0.5, high=5.0),
    "truncated importance sampling": lambda v: far(v, "token_truncate", low=0.0, high=2.0),
    "TRL's `sequence_mask`": lambda v: far(v, "sequence_mask", low=0.0, high=3.0),
    "verl's `seq_mean_k1`": lambda v: far(v, "geometric_mask", low=0.999, high=1.001),
    "KPop": lambda v: far(v, "kpop", high=2.0),
    "OPSM": lambda v: far(v, "opsm", high=0.05, advantages=v.advantages),
    "NeMo-RL's sequence mask": lambda v: far(v, "sequence_error", high=2.0),
    "M2PO": lambda v: far(v, "m2po", high=0.04),
    "DPPO-TV": lambda v: v.mask & torch.where(v.A > 0, v.p - v.old_p <= 0.15, v.old_p - v.p <= 0.1),
    "STAPO": lambda v: v.mask & ((v.A <= 0) | (v.p >= 0.4) | (v.entropy >= 0.6)),
    "KL-Cov": lambda v: pooled(v.c.masked_fill(~v.mask, -math.inf), 1),
    "Archer": lambda v: torch.where(upper(v, v.entropy, 5), 0.5, 0.2),
    "ESPO, groups": lambda v: torch.where(v.mask, upper(v, v.entropy, 5).to(torch.int8), -1),
    "GRPO, ratio": lambda v: moves(v).exp(),
    "GSPO, GSPO-token": lambda v: means(moves(v), v.mask.int() - 1).exp(),
    "sentence-level ratio": lambda v: means(moves(v), torch.where(v.mask, v.sentence_ids, -1)).exp(),
    "ESPO, ratio": lambda v: means(moves(v), v.groups).exp(),
    "ESPO, ratio as printed": lambda v: (means(moves(v), v.groups) + moves(v)).exp(),
    "ESPO, clip": lambda v: means(v.entropy, v.groups) * 0.02 / math.log(VOCABULARY),
}


@pytest.mark.parametrize("method", TOKENS)
def test_lines_of_tokens(method: str) -> None:
    values = names_of_tokens()
    expected = TOKENS[method](SimpleNamespace(**values))
    found = run(method, values)
    if isinstance(found, tuple):
        found = found.mask if expected.dtype == torch.bool else found.weight
    assert expected.any()
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-6)


def test_lines_of_random_tokens() -> None:
    """tests/test_prefixes.py has the weights of cuts."""
    values = names_of_tokens()
    drawn = run("S-GRPO", values).mask
    assert drawn.sum(-1).tolist() == [-(-int(n) // 4) for n in values["mask"].sum(-1)]
    assert not drawn[~values["mask"]].any()
    values["ratio"], found = 0.75, []
    for method in ("NAT, before the forward", "NAT, random prefixes"):
        torch.manual_seed(5)
        found.append(run(method, values))
    assert found[0].weight.equal(found[1].weight)
    best = run("NAT and D3S", values)
    assert ((best.weight >= 1) == best.mask).all()
    among = (values["c"] > 1) & (values["c"] < 5) & values["mask"] & ~values["clipped"]
    drawn = torch.stack([run("Clip-Cov", dict(values)) for _ in range(30)])
    assert (drawn.sum((1, 2)) == 1).all()
    assert not (drawn & ~among).any()
    assert not run("Clip-Cov", values | {"c": torch.zeros(6, 40)}).any()


def test_trls_quantile_keeps_as_many_up_to_rounding() -> None:
    values = names_of_tokens()
    found = run("TRL's `top_entropy_quantile`", values)
    assert abs(int(found.count) - RATIO * values["n"]) <= 1
    assert found.mask.equal(pooled(values["entropy"].masked_fill(~values["mask"], -1), int(found.count)))


def test_gtpo_leaves_out_what_right_responses_share() -> None:
    values = names_of_tokens() | {"token_ids": torch.randint(3, (6, 40))}
    values["groups_of_advantages"] = torch.tensor([[1.0, -1.0], [-2.0, 0.5], [-1.0, -1.0]])
    mask, ids = values["mask"], values["token_ids"]
    mask[1], ids[1] = mask[0], ids[0]  # a wrong response that is the right one, word for word
    shared = reference.shared_tokens(ids, values["groups_of_advantages"], mask)
    assert shared.sum() >= mask[1].sum()
    assert run("GTPO", values).equal(mask & ~shared)


def test_the_block_of_trusted_tokens() -> None:
    """Its head computes the trusted tokens alone."""
    values, weight = names_of_tokens(), torch.randn(50, 8)
    hidden = torch.randn(6, 40, 8, requires_grad=True)
    selection = d3s.Selection(off_policy_rule="token_mask", token_ratio_start=1.0)
    values |= {"hidden": hidden, "labels": torch.randint(50, (6, 40)), "selection": selection, "progress": 0.0}
    head = SimpleNamespace(**vars(d3s) | {"lm_head": lambda model: {"weight": weight}})
    exec(BLOCKS[0], values | {"d3s": head, "model": None}, found := {})
    found["loss"].backward()
    assert hidden.grad.any(-1).equal(found["trusted"].mask)
    assert 0 < found["trusted"].count < values["mask"].sum()


def test_the_objective_has_no_gradient_where_it_is_clipped() -> None:
    values = names_of_tokens()
    values["logprob"].requires_grad_()
    exec(BLOCKS[1], values)
    (gradient,) = torch.autograd.grad(values["objective"].sum(), values["logprob"])
    w, epsilon = values["w"], values["epsilon"]
    clipped = torch.where(values["A"] > 0, w > 1 + epsilon, w < 1 - epsilon)
    torch.testing.assert_close(gradient != 0, ~clipped & values["mask"])


# ---- queries ---------------------------------------------------------------------------------------------------------

SUCCESSES = [0] * 10 + [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[dict[str, Any]] = [{"settings": {"queries": len(SUCCESSES)}}]
    for index, count in enumerate(SUCCESSES):
        lines.append({"index": index, "successes": count, "samples": 8, "mean_reward": count / 8})
    Path("profile.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lines_of_queries(profile: None) -> None:
    """One of the ten unsolved queries is kept."""
    values = {"d3s": d3s, "successes": torch.tensor(SUCCESSES), "samples": 8}
    for method in ("sGPO", "sGPO, from a profile"):
        plan = run(method, values)
        assert plan.group_size[10:].tolist() == [8, 4, 2, 2, 2, 2, 0, 0]
        assert sorted(plan.group_size[:10].tolist()) == [d3s.EVERY_PHASE] + [0] * 9
    assert len(list(run("sGPO, served to a trainer", values))) == (4 + 1) + (1 + 1) + (1 + 1)


class Prompts(list[int]):
    """The methods of a dataset that the page uses."""

    def select(self, rows: list[int]) -> Prompts:
        return Prompts(self[row] for row in rows)

    def to_parquet(self, path: str) -> None:
        Path(path).write_text(str(self))


def test_blocks_of_queries(profile: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, the loop, TRL's runs and verl's files run one after the other, unchanged."""
    runs: list[Any] = []
    generated: list[tuple[int, int]] = []

    def trainer(**arguments: Any) -> Any:
        made = SimpleNamespace(**arguments, train=lambda: runs.append(made), save_model=lambda: None)
        return made

    trl: Any = ModuleType("trl")
    trl.GRPOTrainer, trl.GRPOConfig = trainer, lambda folder, **options: SimpleNamespace(folder=folder, **options)
    monkeypatch.setitem(sys.modules, "trl", trl)
    values: dict[str, Any] = {
        "DataLoader": DataLoader,
        "prompts": Prompts(range(len(SUCCESSES))),
        "generate": lambda batch, num_generations: generated.append((len(batch), num_generations)),
        "checkpoint": {},
        "reward": None,
    }
    for block in BLOCKS[2:]:
        exec(block, values)
    plan = values["plan"]
    assert generated == [(32, 2), (32, 4), (32, 8)]
    values["sampler"].load_state_dict(values["checkpoint"]["sampler"])
    assert [(run.args.num_generations, list(run.train_dataset)) for run in runs] == [
        (size, plan.queries(phase).tolist()) for phase, size in enumerate((2, 4, 8))
    ]
    assert [run.model for run in runs[1:]] == [run.args.folder for run in runs[:-1]]
    for phase in range(3):
        assert Path(f"phase-{phase}.parquet").read_text() == str(plan.queries(phase).tolist())


def test_the_command_that_profiles() -> None:
    (command,) = re.findall(r"^python -m d3s_kernels\.planning\.profile (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert _arguments().parse_args(shlex.split(command.replace("\\\n", ""))).out == Path("profile.jsonl")


# ---- the page as a whole ---------------------------------------------------------------------------------------------


def test_every_line_is_tested_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [method for method in LINES if f'"{method}"' not in source] == []
    assert len(LINES) == len(
        re.findall(r"`\w+ = ~?d3s\.|`groups = \(|`kept = mask|`epsilon = torch|`mask = mask|`w = torch", PAGE)
    )


def test_every_rule_and_every_function_is_on_the_page() -> None:
    rules = {f'"{rule}"' for rule in (*ROLLOUT_RULES, *TOKEN_RULES, "inverse_success_rate")}
    trusting = {f'"{rule}"' for rule in RULES if not rule.endswith("_truncate")}
    levels = {f'level="{level}"' for level in get_args(get_type_hints(d3s.importance_ratio)["level"])}
    modules = (importance_ratio, trusted_tokens, planning)
    functions = {name for name in d3s.__all__ if any(getattr(d3s, name) is getattr(of, name, None) for of in modules)}
    assert levels >= {'level="token"'}
    assert functions >= {"importance_ratio", "entropy_groups", "adaptive_clip", "plan_rollouts", "RolloutPlan"}
    assert [name for name in rules | trusting | levels | functions if name not in PAGE] == []
