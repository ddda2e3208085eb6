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
from test_trusted_tokens import meaning
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


def run(method: str, values: dict[str, Any]) -> Any:
    line = LINES[method]
    exec(line, values)
    return values[line.partition(" = ")[0]]


# ---- rollouts --------------------------------------------------------------------------------------------------------


def names() -> dict[str, Any]:
    """The names that the page uses. Rewards (except in the first group), lengths and entropies are distinct."""
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


def highest(values: Tensor, count: int) -> Tensor:
    """The highest values of each row. No two values are equal."""
    return values >= values.sort(-1, descending=True).values[..., count - 1 : count]


def pooled(values: Tensor, count: int) -> Tensor:
    return highest(values.flatten(), count).view_as(values)


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


ROLLOUTS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "D3S": lambda v: reference.select_rollouts(v["advantages"], KEEP),
    "D3S-I": lambda v: reference.max_variance_select(v["advantages"], KEEP),
    "PODS, max-variance": lambda v: reference.max_variance_select(v["rewards"], KEEP),
    "PODS, max-reward": lambda v: highest(v["rewards"], KEEP),
    "PODS, percentile": lambda v: reference.select_rollouts(v["rewards"], KEEP, rule="percentile", scope="group"),
    "GFPO, shortest": lambda v: highest(-v["lengths"], KEEP),
    "GFPO, token efficiency": lambda v: highest(v["rewards"] / v["lengths"], KEEP),
    "CPPO, in groups": lambda v: highest(v["advantages"].abs(), N - int(N * 0.3)),
    "CPPO, in the batch": lambda v: pooled(v["advantages"].abs(), GROUPS * N - int(GROUPS * N * 0.3)),
    "GRPO, advantages": lambda v: standardised(v["rewards"], torch.ones(GROUPS, N, dtype=torch.bool)),
    "Dr. GRPO": lambda v: centred(v["rewards"]),
    "Lite-PPO": lambda v: centred(v["rewards"]) / (v["rewards"].std() + 1e-4),
    "PODS, advantages": lambda v: standardised(v["rewards"], v["kept"]),
    "GFPO, advantages": lambda v: standardised(v["rewards"], v["kept"], 0, 0.0),
    "MaxRL, advantages": lambda v: centred(v["rewards"]) / (v["rewards"].mean(-1, keepdim=True) + 1e-6),
    "ESPO, advantages": lambda v: standardised(v["rewards"], v["verified"]),
    "DAPO, dynamic sampling": lambda v: torch.tensor([len(set(row)) > 1 for row in v["rewards"].tolist()]),
}


@pytest.mark.parametrize("method", ROLLOUTS)
def test_lines_of_rollouts(method: str) -> None:
    values = names()
    if method.startswith(("CPPO", "PODS, max-reward", "GFPO, token")):  # these need rewards without ties
        values["rewards"] = torch.randn(GROUPS, N)
        values["advantages"] = reference.group_advantages(values["rewards"])
    expected = ROLLOUTS[method](dict(values))
    torch.testing.assert_close(run(method, values), expected, rtol=1e-5, atol=1e-6)


def test_lines_of_groups_and_of_random_draws() -> None:
    """The groups, the first of which has no spread, go into a rule as its mask."""
    values = names()
    groups = run("DAPO, dynamic sampling", values)
    (given,) = re.findall(r"`(mask=groups[^`]+)`", PAGE)
    kept = eval(f"d3s.select_rollouts(rewards, keep, rule='random', scope='group', {given})", values)
    assert (kept.sum(-1) == KEEP * groups).all()
    assert (run("PODS, random", values).sum(-1) == KEEP).all()
    expected = reference.variance_mass(values["rewards"], 0.9)
    assert run("RAGEN-2", values).equal(expected)
    assert 0 < expected.sum() < GROUPS


def test_the_band_of_difficulty() -> None:
    """With 0, 2, ... 10 correct answers of ten, both ends of the band belong to it."""
    values = names() | {"rewards": (torch.arange(10) < torch.arange(0, 11, 2).unsqueeze(-1)).float()}
    assert run("Online Difficulty Filtering", values).tolist() == [False, True, True, True, True, False]


def test_the_schedule() -> None:
    assert [run("D3S, schedule", names() | {"progress": p}) for p in (0, 0.5, 1)] == [(8, 0.05), (20, 0.125), (32, 0.2)]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def names_of_tokens() -> dict[str, Any]:
    mask = torch.rand(6, 40) < 0.8
    advantages, entropy = torch.randn(6), torch.where(mask, torch.rand(6, 40), 9.0)
    advantages[0] = advantages[0].abs()  # at least one is above 0
    return {"torch": torch, "d3s": d3s, "entropy": entropy, "mask": mask, "advantages": advantages, "ratio": RATIO}


TOKENS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "D3S, tokens": lambda v: v["advantages"].abs().unsqueeze(-1) * v["entropy"],
    "80/20": lambda v: v["entropy"],
    "TRL's `top_entropy_quantile`": lambda v: v["entropy"],  # without ties it keeps as many, up to rounding
}


@pytest.mark.parametrize("method", TOKENS)
def test_lines_of_tokens(method: str) -> None:
    values = names_of_tokens()
    scores = TOKENS[method](values).masked_fill(~values["mask"], -1)
    found = run(method, values)
    n = int(values["mask"].sum())
    assert RATIO * n - 1 <= found.count <= RATIO * n + 1
    torch.testing.assert_close(found.mask, pooled(scores, int(found.count)))


def test_lines_of_tokens_in_sequences() -> None:
    values = names_of_tokens()
    shares = [-(-int(n) // 4) for n in values["mask"].sum(-1)]
    by_entropy = run("entropy, in sequences", values)
    for row, mask, kept, count in zip(values["entropy"], values["mask"], by_entropy.mask, shares, strict=True):
        torch.testing.assert_close(kept, highest(row.masked_fill(~mask, -1), count))
    drawn = run("S-GRPO", values)
    assert drawn.mask.sum(-1).tolist() == shares
    assert not drawn.mask[~values["mask"]].any()


def test_lines_of_prefixes() -> None:
    values = names_of_tokens() | {"ratio": 0.75}
    position = values["mask"].cumsum(-1)
    for found in (run("NAT, random prefixes", values), run("NAT, before the forward", values)):
        for row, weights, mask, t in zip(found.mask, found.weight, values["mask"], position, strict=True):
            total, cut = int(mask.sum()), int(row.sum())
            least = max(1, -(-total // 2))
            assert least <= cut <= total
            assert torch.equal(row, mask & (t <= cut))
            expected = (total - least + 1) / (total - t.clamp(min=least) + 1)
            torch.testing.assert_close(weights, torch.where(row, expected, 0.0))
    best = run("NAT and D3S", values)
    score = (values["advantages"].abs().unsqueeze(-1) * values["entropy"]).masked_fill(best.weight == 0, -1)
    assert torch.equal(best.mask, pooled(score, int(best.count)))
    assert ((best.weight >= 1) == best.mask).all()


def test_the_line_of_the_advantage_alone() -> None:
    """The sequences with the largest |A|, each from its first token on."""
    values = names_of_tokens()
    left = -(-int(values["mask"].sum()) // 4)
    expected = torch.zeros(6, 40, dtype=torch.bool)
    for row in values["advantages"].abs().argsort(descending=True).tolist():
        first = values["mask"][row].nonzero().flatten()[:left]
        expected[row, first] = True
        left -= len(first)
    torch.testing.assert_close(run(r"\|A\| alone", values).mask, expected)


def test_gtpo_leaves_out_what_right_responses_share() -> None:
    values = names_of_tokens() | {"token_ids": torch.randint(3, (6, 40))}
    values["groups_of_advantages"] = torch.tensor([[1.0, -1.0], [-2.0, 0.5], [-1.0, -1.0]])
    mask, ids = values["mask"], values["token_ids"]
    mask[1], ids[1] = mask[0], ids[0]  # a wrong response that is the right one, word for word
    shared = reference.shared_tokens(ids, values["groups_of_advantages"], mask)
    assert shared.sum() >= mask[1].sum()
    assert run("GTPO", values).equal(mask & ~shared)


# ---- trust -----------------------------------------------------------------------------------------------------------


def names_of_trust() -> dict[str, Any]:
    """Probabilities, with entropies between 0 and 1. Some tokens, and some sequences, are far from how they were."""
    values = names_of_tokens() | {"entropy": torch.rand(6, 40)}
    old = -3 * torch.rand(6, 40)
    logprob, sampled = old + 0.3 * torch.randn(6, 40), old + torch.randn(6, 40) * torch.rand(6, 1).mul(2)
    sampled[0], sampled[1] = old[0], old[1] - 0.1
    A, mask = values["advantages"][:, None], values["mask"]
    each, n = A.expand(6, 40), int(mask.sum())
    c = 3 * (each - each[mask].mean()) * (logprob - logprob[mask].mean())
    shape = {"A": A, "c": c, "n": n, "clipped": torch.rand(6, 40) < 0.1, "p": logprob.exp(), "old_p": old.exp()}
    bounds = {"low": 0.1, "high": 0.15, "tau_p": 0.4, "tau_h": 0.6, "delta": 0.05}
    return values | shape | bounds | {"logprob": logprob, "old_logprob": old, "sampling_logprob": sampled}


# What tests/test_trusted_tokens.py says of each rule, with the bounds that it has by default or on the page.
TRUST: dict[str, tuple[str, dict[str, float]]] = {
    "IcePop": ("token_mask", {"low": 0.5, "high": 5.0}),
    "truncated importance sampling": ("token_truncate", {"high": 2.0}),
    "TRL's `sequence_mask`": ("sequence_mask", {"high": 3.0}),
    "verl's `seq_mean_k1`": ("geometric_mask", {"low": 0.999, "high": 1.001}),
    "KPop": ("kpop", {"high": 2.0}),
    "OPSM": ("opsm", {"high": 0.05}),
    "NeMo-RL's sequence mask": ("sequence_error", {"high": 2.0}),
    "M2PO": ("m2po", {"high": 0.04}),
}


@pytest.mark.parametrize("method", TRUST)
def test_lines_of_trust(method: str) -> None:
    values, (rule, bounds) = names_of_trust(), TRUST[method]
    given = values["old_logprob"], values["sampling_logprob"], rule, values["mask"], None, values["advantages"]
    found = run(method, values)
    torch.testing.assert_close(found.weight, meaning(*given, **bounds), rtol=1e-5, atol=1e-30)
    assert found.mask.equal(found.weight > 0)
    assert found.mask.any()


KEPT_OR_MARKED: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "DPPO-TV": lambda v: v["mask"] & torch.where(v["A"] > 0, v["p"] - v["old_p"] <= 0.15, v["old_p"] - v["p"] <= 0.1),
    "STAPO": lambda v: v["mask"] & ((v["A"] <= 0) | (v["p"] >= 0.4) | (v["entropy"] >= 0.6)),
    "KL-Cov": lambda v: pooled(v["c"].masked_fill(~v["mask"], -math.inf), 1),
}


@pytest.mark.parametrize("method", KEPT_OR_MARKED)
def test_lines_that_need_no_function(method: str) -> None:
    values = names_of_trust()
    found = run(method, values)
    assert found.equal(KEPT_OR_MARKED[method](values))
    assert 0 < found.sum() < values["mask"].sum()


def test_clip_cov_draws_from_the_middle() -> None:
    values = names_of_trust()
    among = (values["c"] > 1) & (values["c"] < 5) & values["mask"] & ~values["clipped"]
    drawn = torch.stack([run("Clip-Cov", dict(values)) for _ in range(30)])
    assert among.sum() > 5
    assert (drawn.sum((1, 2)) == 1).all()
    assert not (drawn & ~among).any()
    assert drawn.any(0).sum() > 1
    assert not run("Clip-Cov", values | {"c": torch.zeros(6, 40)}).any()


def test_archer_clips_the_upper_fifth_at_half() -> None:
    values = names_of_trust()
    assert run("Archer", values).equal(torch.where(upper_fifths(values) == 1, 0.5, 0.2))


def test_the_block_of_trusted_tokens() -> None:
    """Its head computes the trusted tokens alone."""
    values, weight = names_of_trust(), torch.randn(50, 8)
    hidden = torch.randn(6, 40, 8, requires_grad=True)
    selection = d3s.Selection(off_policy_rule="token_mask", token_ratio_start=1.0)
    values |= {"hidden": hidden, "labels": torch.randint(50, (6, 40)), "selection": selection, "progress": 0.0}
    values["model"] = SimpleNamespace()
    head = SimpleNamespace(**vars(d3s) | {"lm_head": lambda model: {"weight": weight}})
    exec(BLOCKS[0], values | {"d3s": head}, found := {})
    found["loss"].backward()
    assert hidden.grad.any(-1).equal(found["trusted"].mask)
    assert 0 < found["trusted"].count < values["mask"].sum()


# ---- ratios ----------------------------------------------------------------------------------------------------------


def names_of_ratios() -> dict[str, Any]:
    values = names_of_tokens()
    old = -torch.rand(6, 40)
    groups = reference.entropy_groups(values["entropy"], values["mask"])
    moved = {"old_logprob": old, "logprob": old + 0.1 * torch.randn(6, 40), "groups": groups, "vocab_size": VOCABULARY}
    moved["sentence_ids"] = ids = (torch.rand(6, 40) < 0.2).cumsum(-1)
    of_tokens = (ids + 100 * torch.arange(6).unsqueeze(-1))[values["mask"]]  # another number for each sentence
    moved["sentences"] = pad(torch.unique_consecutive(of_tokens, return_counts=True)[1].cumsum(0), (1, 0))
    moved["epsilon"] = reference.adaptive_clip(values["entropy"], groups, values["mask"], vocab_size=VOCABULARY)
    return values | moved


def means(values: Tensor, groups: Tensor) -> Tensor:
    """The mean of the values of each group of each row; 0 where the index is below 0, so there is no group."""
    result = torch.zeros(values.shape, dtype=torch.float64)
    for row, of_row, number in zip(result, values.double(), groups, strict=True):
        for group in number[number >= 0].unique():
            row[number == group] = of_row[number == group].mean()
    return result


def moves(v: dict[str, Any]) -> Tensor:
    return (v["logprob"].double() - v["old_logprob"].double()).masked_fill(~v["mask"], 0)


def mean_ratio(v: dict[str, Any], groups: Tensor) -> Tensor:
    return means(moves(v), groups).exp()


def upper_fifths(v: dict[str, Any]) -> Tensor:
    found = []
    for row, mask in zip(v["entropy"], v["mask"], strict=True):
        upper = highest(row.masked_fill(~mask, -1), -(-int(mask.sum()) // 5))
        found.append(torch.where(mask, upper.to(torch.int8), -1))
    return torch.stack(found)


RATIOS: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "GRPO, ratio": lambda v: moves(v).exp(),
    "GSPO, GSPO-token": lambda v: mean_ratio(v, v["mask"].int() - 1),
    "sentence-level ratio": lambda v: mean_ratio(v, torch.where(v["mask"], v["sentence_ids"], -1)),
    "ESPO, ratio": lambda v: mean_ratio(v, v["groups"]),
    "ESPO, ratio as printed": lambda v: mean_ratio(v, v["groups"]) * moves(v).exp(),
    "ESPO, groups": upper_fifths,
    "ESPO, clip": lambda v: means(v["entropy"], v["groups"]) * 0.02 / math.log(VOCABULARY),
}


@pytest.mark.parametrize("method", RATIOS)
def test_lines_of_ratios(method: str) -> None:
    values = names_of_ratios()
    expected = RATIOS[method](dict(values))
    found = run(method, values)
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-6)


def test_the_objective_has_no_gradient_where_it_is_clipped() -> None:
    values = names_of_ratios()
    values["logprob"].requires_grad_()
    exec(BLOCKS[1], values)
    (gradient,) = torch.autograd.grad(values["objective"].sum(), values["logprob"])
    w, epsilon, up = values["w"], values["epsilon"], values["advantages"].unsqueeze(-1) > 0
    clipped = torch.where(up, w > 1 + epsilon, w < 1 - epsilon)
    torch.testing.assert_close(gradient != 0, ~clipped & values["mask"])


# ---- queries ---------------------------------------------------------------------------------------------------------

SUCCESSES = [0] * 10 + [1, 2, 3, 4, 5, 6, 7, 8]


def check_plan(plan: d3s.RolloutPlan[Tensor]) -> None:
    """One of the ten unsolved queries is kept."""
    assert plan.group_size[10:].tolist() == [8, 4, 2, 2, 2, 2, 0, 0]
    assert sorted(plan.group_size[:10].tolist()) == [d3s.EVERY_PHASE] + [0] * 9


def write_profile() -> None:
    lines: list[dict[str, Any]] = [{"settings": {"queries": len(SUCCESSES)}}]
    for index, count in enumerate(SUCCESSES):
        lines.append({"index": index, "successes": count, "samples": 8, "mean_reward": count / 8})
    Path("profile.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lines_of_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_profile()
    values = {"d3s": d3s, "successes": torch.tensor(SUCCESSES), "samples": 8}
    check_plan(run("sGPO", values))
    check_plan(run("sGPO, from a profile", values))
    assert len(list(run("sGPO, served to a trainer", values))) == (4 + 1) + (1 + 1) + (1 + 1)


class Prompts(list[int]):
    """The methods of a dataset that the page uses."""

    def select(self, rows: list[int]) -> Prompts:
        return Prompts(self[row] for row in rows)

    def to_parquet(self, path: str) -> None:
        Path(path).write_text(str(self))


def test_blocks_of_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, the loop, TRL's runs and verl's files run one after the other, unchanged."""
    monkeypatch.chdir(tmp_path)
    write_profile()
    runs: list[Any] = []

    def trainer(**arguments: Any) -> Any:
        made = SimpleNamespace(**arguments, train=lambda: runs.append(made), save_model=lambda: None)
        return made

    trl: Any = ModuleType("trl")
    trl.GRPOTrainer, trl.GRPOConfig = trainer, lambda folder, **options: SimpleNamespace(folder=folder, **options)
    monkeypatch.setitem(sys.modules, "trl", trl)

    generated: list[tuple[int, int]] = []
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
    check_plan(plan)
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
    tested = {*ROLLOUTS, *TOKENS, *TRUST, *KEPT_OR_MARKED, *RATIOS, *re.findall(r'run\(r?"([^"]+)"', source)}
    assert tested == set(LINES)
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
