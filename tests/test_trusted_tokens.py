"""trusted_tokens against its meaning in float64, and against verl's own masks and weights."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch
from cases.draw import draws
from cases.tokens import segmented
from helpers import INF, NAN, assert_identical, compiled_once
from ranks import Ranks, world
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels.off_policy.trusted_tokens import RULES, TrustRule, trusted_tokens

# Sums of these are exact in every order, so that means tie with the bounds.
LOG_PROBABILITIES = (0.0, -0.25, -0.5, -1.0, -1.5, -4.0, -30.0, -INF, NAN)
# Ratios tie with bounds at 1 alone: another ratio and its logarithm are rounded each.
LOW = (0.0, 0.3, 1.0)
HIGH = {
    "m2po": [0.0625, 0.25, 1.0],
    "opsm": [0.0, 0.25, 0.5],
    "kpop": [0.0, 0.1, 2.0],
    "sequence_error": [1.0, 1.7, 9.0],
}


def meaning(
    logprob: Tensor, sampled: Tensor, rule: str, mask: Tensor | None, offsets: Tensor | None, advantages: Tensor | None,
    **bounds: float,
) -> Tensor:  # fmt: skip
    """The weight of each token, in float64, sequence after sequence."""
    p, q = logprob.double().flatten(), sampled.double().flatten()
    usable, weight = reference._usable(logprob - sampled, mask), torch.zeros_like(p)
    each = p if advantages is None else reference._per_token(advantages, logprob, offsets).flatten()
    for begin, end in [(0, len(p))] if rule == "m2po" else reference._segments(logprob, offsets):
        at = begin + usable[begin:end].nonzero().flatten()
        weight[at] = of_sequence(rule, p[at], q[at], each[at], **bounds)
    return weight.float().nan_to_num(0, posinf=0).view(logprob.shape)


def of_sequence(rule: str, p: Tensor, q: Tensor, advantages: Tensor, high: float, low: float = 0.0) -> Tensor:
    log_ratio, (level, _, way) = p - q, rule.partition("_")
    if way in ("mask", "truncate"):
        over = {"token": log_ratio, "sequence": log_ratio.sum(), "geometric": log_ratio.mean()}[level]
        ratio = over.expand_as(log_ratio).exp()
        normal = torch.finfo(torch.float32)  # the ratio of two probabilities above 0 is neither 0 nor infinite
        ratio = torch.where(over.isfinite(), ratio.clamp(normal.tiny, normal.max), ratio)
        return ratio.clamp(low, high) if way == "truncate" else torch.where((low <= ratio) & (ratio <= high), ratio, 0)
    if rule == "kpop":
        a, b = (log.exp().clamp(1e-8, 1 - 1e-8) for log in (p, q))
        both = [x * (x / y).log() + (1 - x) * ((1 - x) / (1 - y)).log() for x, y in ((a, b), (b, a))]
        kept = torch.maximum(*both) <= high
    elif rule == "opsm":
        kept = (advantages >= 0) | ((advantages < 0) & (-log_ratio.mean() <= high))
    elif rule == "sequence_error":
        kept = (log_ratio.abs().exp().mean() <= high).expand_as(log_ratio)
    else:
        smallest = log_ratio.square().float().double().sort(stable=True)
        number = int((smallest.values.cumsum(0) / torch.arange(1, len(p) + 1) < high).sum())
        kept = torch.zeros_like(p, dtype=torch.bool).index_fill(0, smallest.indices[:number], True)
    return kept.double()


@pytest.mark.parametrize("rule", RULES)
def test_any_arguments(rule: str) -> None:
    """With ties, NaN, empty and fully masked sequences, in rows and packed."""
    for draw in draws():
        case = segmented(draw, "logprob")
        like, offsets = case["logprob"], case["offsets"]
        logprob, sampled = (
            torch.tensor(LOG_PROBABILITIES)[torch.randint(9, like.shape, generator=draw.generator())].to(like.dtype)
            for _ in range(2)
        )
        bounds = {"high": draw.choice(HIGH.get(rule, (1.0, 2.5, INF)))}
        bounds |= {"low": draw.choice(LOW)} if RULES[rule].is_ratio else {}
        given: dict[str, Any] = {"mask": case["mask"], "offsets": offsets, "advantages": None}
        if rule == "opsm":
            sequences = like.shape[:-1] if offsets is None else (len(offsets) - 1,)
            each = torch.randint(-1, 2, draw.choice((sequences, like.shape)), generator=draw.generator()).float()
            given["advantages"] = each.masked_fill(torch.rand(each.shape, generator=draw.generator()) < 0.1, NAN)
        found = trusted_tokens(logprob, sampled, rule, **bounds, **given)
        weight = meaning(logprob, sampled, rule, **bounds, **given)
        torch.testing.assert_close(found.weight, weight, rtol=1e-6, atol=0)
        assert_identical(found.mask, weight > 0)
        assert_identical(found.count, (weight > 0).sum())


def near(shape: tuple[int, ...], spread: float = 0.3) -> tuple[Tensor, Tensor]:
    logprob = -torch.rand(shape) * 3
    return logprob, logprob + spread * torch.randn(shape)


@pytest.mark.parametrize(
    ("rule", "bounds", "kept"),
    [
        ("token_mask", {"low": 1.0, "high": 1.0}, [True, False, False, True]),
        ("geometric_mask", {"low": 1.0, "high": 1.0}, [True, True, True, False]),  # the logarithms' mean is 0
        ("kpop", {"high": 0.0}, [True, False, False, True]),
        ("opsm", {"high": 0.0}, [True, True, True, False]),
        ("sequence_error", {"high": 1.0}, [False, False, False, True]),
        ("m2po", {"high": 0.03125}, [True, True, False, True]),  # the mean of all; of the equal ones the first
    ],
)
def test_bounds_themselves(rule: Any, bounds: dict[str, float], kept: list[bool]) -> None:
    """A value at a bound is kept, but M2PO's mean has to be below it."""
    sampled = torch.tensor([0.0, -0.25, 0.25, 0.0]) - 1
    offsets = torch.tensor([0, 3, 4])
    advantages = torch.tensor([-1.0, -1.0])
    if rule in ("geometric_mask", "opsm"):
        sampled[3] = -0.5
    found = trusted_tokens(torch.full((4,), -1.0), sampled, rule, **bounds, advantages=advantages, offsets=offsets)
    assert found.mask.tolist() == kept


@pytest.mark.parametrize("rule", [rule for rule, row in RULES.items() if row.is_ratio])
def test_ratios_that_float32_has_no_number_for(rule: Any) -> None:
    """A sequence is kept if it is within the bounds, however small or large its product is. A probability of 0 has no
    ratio.
    """
    logprob = torch.tensor([[-60.0] * 20, [-1.0] * 20, [-400.0, -400.0] + [-1.0] * 18, [-INF] + [-1.0] * 19])
    sampled = torch.tensor([[-1.0] * 20, [-60.0] * 20, [-1.0] * 20, [-1.0] * 20])
    found = trusted_tokens(logprob, sampled, rule, low=0.0, high=INF)
    normal = torch.finfo(torch.float32)
    assert found.mask[:3].all()
    assert ((found.weight[:3] >= normal.tiny) & (found.weight[:3] <= normal.max)).all()
    assert found.mask[3].tolist() == [False] + [rule.startswith("token")] * 19
    truncated = trusted_tokens(logprob, sampled, rule, low=0.0, high=3.0)
    assert truncated.mask[0].all()
    assert not trusted_tokens(logprob, sampled, rule, low=0.0, high=0.0).mask.any()
    if rule == "sequence_truncate":
        assert truncated.weight[:, 5].tolist() == [normal.tiny, 3.0, normal.tiny, 0.0]


TIGHT = {
    "opsm": 0.05,
    "sequence_mask": 3.0,
    "geometric_mask": 1.05,
    "m2po": 0.002,
    "kpop": 1e-3,
    "sequence_error": 1.04,
}


def some_far(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Row 0 is likelier now, the last row was likelier before, row 1 is as it was: the bounds above tell them apart."""
    logprob, sampled = near((rows, tokens), 0.05)
    sampled[0] -= 0.1
    sampled[-1] += 0.1
    sampled[1] = logprob[1]
    return logprob, sampled


@pytest.mark.parametrize("rule", RULES)
def test_rows_and_packed_tokens_agree_to_the_bit(rule: str) -> None:
    """And nothing masked is read, nothing has a gradient, nothing asks for a value while a graph is made."""
    logprob, sampled = some_far(6, 300)
    mask = torch.arange(300) < torch.tensor([300, 1, 0, 17, 300, 299])[:, None]
    mask[4] = False
    given = {"high": TIGHT.get(rule), "advantages": torch.tensor([-1.0, 1, -1, -1, -1, -1])}
    found = trusted_tokens(logprob.requires_grad_(), sampled, rule, mask=mask, **given)
    assert not found.weight.requires_grad
    assert 0 < found.count < mask.sum() or rule in ("token_mask", "token_truncate") or RULES[rule].truncates
    dirty = torch.where(mask, logprob, INF), torch.where(mask, sampled, NAN)
    again = [trusted_tokens(*dirty, rule, mask=mask.long(), **given)]
    if rule in ("sequence_error", "m2po"):  # the two kinds that are sums; a graph takes a second
        compiled = compiled_once(lambda *tensors: trusted_tokens(*tensors, rule, mask=mask, **given), "eager")
        again.append(compiled(logprob, sampled))
    for each in again:
        assert_identical(each.mask, found.mask)
        assert_identical(each.weight, found.weight)
    offsets = torch.cat([torch.tensor([0]), mask.sum(1).cumsum(0)])
    packed = trusted_tokens(logprob[mask], sampled[mask], rule, offsets=offsets, **given)
    assert_identical(packed.mask, found.mask[mask])
    assert_identical(packed.weight, found.weight[mask])


def test_the_rules_and_their_bounds() -> None:
    """The defaults are those of the table in the docstring, which a reader sees."""
    assert get_args(TrustRule) == tuple(RULES)
    logprob, sampled = near((8, 40), 0.8)
    for rule, row in RULES.items():
        if row.high is None:
            continue
        bounds = {"low": row.low, "high": row.high} if row.is_ratio else {"high": row.high}
        found, given = (trusted_tokens(logprob, sampled, rule, **each) for each in ({}, bounds))
        assert_identical(found.weight, given.weight)
        shown = ", ".join(f"{bound:g}" for bound in bounds.values())
        line = next(line for line in str(trusted_tokens.__doc__).splitlines() if line.strip().startswith(f'"{rule}"'))
        assert re.search(rf"\s{re.escape(shown)}(\s|$)", line), line


WIDE, TALL = torch.zeros(2, 3), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("rule", "given", "message"),
    [
        ("icepop", {}, "rule: got 'icepop'; takes one of 'token_mask', 'token_truncate', "),
        (
            "opsm",
            {"advantages": torch.ones(2)},
            "high: got None with rule 'opsm', which has no default; takes a number",
        ),
        ("opsm", {"high": 0.1}, "advantages: got None with rule 'opsm'; takes one for each sequence or for each token"),
        (
            "opsm",
            {"high": 0.1, "advantages": torch.ones(3)},
            r"advantages: got shape \[3\]; takes one for each of the 2",
        ),
        ("kpop", {"low": 0.1}, "low: got 0.1 with rule 'kpop'; takes None"),
        ("token_mask", {"low": -0.1}, "low: got -0.1; takes a number of at least 0"),
        ("token_mask", {"high": NAN}, "high: got nan; takes a number of at least 0"),
        ("token_mask", {"high": 0.4}, "high: got 0.4; takes a number of at least low, 0.5"),
        ("kpop", {"high": "2"}, "high: got '2'; takes a number"),
        ("kpop", {"offsets": torch.tensor([0, 3])}, "offsets"),
        ("kpop", {"mask": torch.ones(2, 2)}, "mask: got dtype torch.float32; takes bool or integers"),
        ("kpop", {"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask"),
        ("kpop", {"sampling_logprob": TALL}, r"sampling_logprob: got shape \[3, 2\]; takes that of logprob, \[2, 3\]"),
        ("kpop", {"logprob": WIDE.long()}, r"logprob: got dtype torch.int64; takes float32, bfloat16 or float16"),
    ],
)
def test_bad_arguments_are_named(rule: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if given.get("high") == "2" else ValueError, match=message):
        trusted_tokens(**{"logprob": WIDE, "sampling_logprob": WIDE} | given, rule=rule)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def task(ranks: Ranks, rule: Any, pieces: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    logprob, sampled, mask = pieces[ranks.rank]
    given = {"high": TIGHT[rule], "mask": mask, "process_group": ranks.group}
    return tuple(trusted_tokens(logprob, sampled, rule, **given))


@pytest.mark.parametrize("rule", ["m2po", "sequence_mask"])
def test_across_ranks(rule: Any) -> None:
    """m2po ranks the tokens of all ranks, with ties in rank order; the count is of all of them."""
    logprob, sampled = some_far(7, 40)
    logprob, sampled = (values.mul(32).round() / 32 for values in (logprob, sampled))
    mask = torch.rand(7, 40) < 0.8
    expected = trusted_tokens(logprob, sampled, rule, mask=mask, high=TIGHT[rule])
    assert 0 < expected.count < mask.sum()
    found = world(2).run(task, rule, list(zip(*(t.split([5, 2]) for t in (logprob, sampled, mask)), strict=True)))
    assert torch.cat([each[0] for each in found]).equal(expected.mask)
    assert torch.cat([each[1] for each in found]).equal(expected.weight)
    assert [each[2] for each in found] == [expected.count] * 2


# ---- a choice of tokens ----------------------------------------------------------------------------------------------


def test_a_selection_chooses_among_the_trusted() -> None:
    logprob, sampled = near((6, 50))
    mask, entropy, advantages = torch.rand(6, 50) < 0.9, torch.rand(6, 50), torch.randn(6)
    selection = d3s.Selection(off_policy_rule="token_mask", off_policy_low=0.8, off_policy_high=1.25)
    trusted = selection.trusted(logprob, sampled, advantages, mask=mask)
    expected = trusted_tokens(logprob, sampled, "token_mask", low=0.8, high=1.25, mask=mask)
    assert_identical(trusted.weight, expected.weight)
    found = selection.tokens(entropy, advantages, 1.0, mask=trusted)
    assert_identical(found.mask, d3s.select_tokens(entropy, advantages, 0.2, mask=trusted.mask).mask)
    with pytest.raises(ValueError, match="mask: got a Tensor with off_policy_rule 'token_mask'; takes what trusted"):
        selection.tokens(entropy, advantages, 1.0, mask=mask)

    everything = d3s.Selection().trusted(logprob, sampled, mask=mask)
    assert everything.mask is mask
    assert everything.weight.equal(mask.float())
    assert everything.count == mask.sum()
    assert d3s.Selection().trusted(logprob, sampled).mask.all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"off_policy_rule": "icepop"}, "off_policy_rule: got 'icepop'; takes 'none' or 'token_mask' or "),
        ({"off_policy_rule": "opsm"}, "off_policy_high: got None with rule 'opsm', which has no default"),
        ({"off_policy_rule": "kpop", "off_policy_low": 1}, "off_policy_low: got 1 with rule 'kpop'"),
        ({"off_policy_high": 2.0}, r"off_policy_high: got 2.0 with (s\.)?off_policy_rule 'none'; takes None, or set "),
        ({"off_policy_rule": "kpop", "off_policy_high": -1}, "off_policy_high: got -1; takes a number of at least 0"),
    ],
)
def test_bad_options_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^s.{message}"):
        d3s.Selection.from_mapping(values, "s.")
    with pytest.raises(ValueError, match=f"^{message}"):
        d3s.Selection(**values)
