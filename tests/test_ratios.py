"""importance_ratio, entropy_groups, adaptive_clip: GRPO's, GSPO's and ESPO's ratios, in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import INF, NAN, assert_identical, assert_same_bits, threads, unwritten
from torch import Tensor

from d3s_kernels import adaptive_clip, entropy_groups, importance_ratio, reference

LEVELS = ("token", "sequence", "entropy_group")
UNBOUNDED = (-INF, INF)


def groups_at(level: str, shape: torch.Size, *, least: int = -2, most: int = 15) -> Tensor | None:
    """Random groups of tokens where `level` takes some. A number below 0 is no group."""
    return torch.randint(least, most + 1, shape, dtype=torch.int8) if level == "entropy_group" else None


def with_gradient(
    ratio_of: Callable[..., Tensor], logprob: Tensor, cotangent: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    leaf = logprob.detach().clone().requires_grad_()
    with unwritten(leaf, cotangent, *(part for part in options.values() if isinstance(part, Tensor))):
        ratio = ratio_of(leaf, **options)
        return ratio.detach(), torch.autograd.grad(ratio, leaf, cotangent.to(ratio.dtype))[0]


def assert_ratio(actual: Tensor, expected: Tensor) -> None:
    """exp is accurate to a rounding step; a log-ratio below 30 and its mean are accurate to two of theirs."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-37, equal_nan=True)


# ---- the papers' and the trainers' formulas --------------------------------------------------------------------------


def sample(rows: int = 6, tokens: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, old_logprob and a mask of completions of several lengths; one is empty."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, tokens, generator=generator)
    logprob = old + 0.1 * torch.randn(rows, tokens, generator=generator)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    lengths[0] = 0
    return logprob, old, torch.arange(tokens) < lengths


def ppo_loss(ratio: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def trl_gspo_token(logprob: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """`sequence_token` of TRL's GSPO-token trainer, which was in TRL's releases up to 1.13."""
    sequence = (((logprob - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).detach().unsqueeze(-1)
    return torch.exp(logprob - logprob.detach() + sequence)


def verl_gspo(logprob: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """verl 0.9's policy loss `gspo`."""
    sequence = torch.sum((logprob - old) * mask, dim=-1) / torch.sum(mask, dim=-1).clamp(min=1)
    return torch.exp(torch.clamp(logprob - logprob.detach() + sequence.detach().unsqueeze(-1), max=10.0))


@pytest.mark.parametrize("shift", [0.0, 15.0])
@pytest.mark.parametrize("trainers", [trl_gspo_token, verl_gspo])
def test_sequences_as_trainers_have_them(trainers: Callable[..., Tensor], shift: float) -> None:
    logprob, old, mask = sample()
    logprob[2] += shift  # a ratio beyond verl's bound
    bounds = UNBOUNDED if trainers is trl_gspo_token else None
    theirs = with_gradient(trainers, logprob, mask / 7, old=old, mask=mask)
    options = {"old_logprob": old, "mask": mask, "level": "sequence", "log_bounds": bounds}
    ours = with_gradient(importance_ratio, logprob, mask / 7, **options)
    for our, their in zip(ours, theirs, strict=True):
        assert_ratio(our[mask], their[mask])


@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_that_has_not_moved(level: str) -> None:
    """Ratios are exactly 1, and their gradient is that of the log-probability."""
    _, old, mask = sample(tokens=5000)
    options = {"old_logprob": old, "mask": mask, "level": level, "groups": groups_at(level, old.shape)}
    ratio, gradient = with_gradient(importance_ratio, old, torch.ones_like(old), **options)
    assert_identical(ratio, torch.ones_like(old))
    assert_identical(gradient, (mask if level != "entropy_group" else mask & (options["groups"] >= 0)).float())


def test_bounds() -> None:
    """As in verl, a token's ratio is clamped on both sides, a sequence's only above. Beyond it there is no gradient."""
    shifts = torch.tensor([-60.0, -19.0, 0.0, 19.0, 60.0])
    ones, zeros = torch.ones(5), torch.zeros(5)
    ratio, gradient = with_gradient(importance_ratio, shifts, ones, old_logprob=zeros)
    assert_ratio(ratio, shifts.clamp(-20, 20).exp())
    assert_identical(gradient != 0, torch.tensor([False, True, True, True, False]))
    for level in ("sequence", "entropy_group"):  # sequences of one token
        singly = {"level": level, "offsets": torch.arange(6), "groups": groups_at(level, shifts.shape, least=0)}
        ratio, gradient = with_gradient(importance_ratio, shifts, ones, old_logprob=zeros, **singly)
        assert_ratio(ratio, shifts.clamp(max=10).exp())
        assert_identical(gradient != 0, torch.tensor([True, True, True, False, False]))
    ratio, gradient = with_gradient(importance_ratio, 2 * shifts, ones, old_logprob=zeros, log_bounds=UNBOUNDED)
    assert_ratio(ratio, (2 * shifts).exp())
    assert gradient[-1] == INF


# ---- NaN and infinite values -----------------------------------------------------------------------------------------


@pytest.mark.simd
@pytest.mark.parametrize("denominator", ["self", "old"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_of_0_stays_0(level: str, denominator: str) -> None:
    """A clipped token has one. Where its ratio is infinite, 0 * inf would make the gradients of the whole model NaN."""
    old, shifts = torch.zeros(4, 40), torch.tensor([100.0, 0.05, NAN, -1000.0]).view(4, 1)
    options = {"level": level, "groups": groups_at(level, old.shape, least=0, most=0)}
    options |= {"old_logprob": old, "denominator": denominator, "log_bounds": UNBOUNDED}
    leaf = (old + shifts).requires_grad_()
    (gradient,) = torch.autograd.grad(ppo_loss(importance_ratio(leaf, **options), torch.ones(())).sum(), leaf)
    assert_identical(gradient != 0, torch.tensor([False, True, True, False]).view(4, 1).expand(4, 40))
    cotangent = torch.where(torch.rand(4, 40) < 0.5, 0.0, torch.randn(4, 40))
    _, gradient = with_gradient(importance_ratio, leaf, cotangent, **options)
    # e^1000 is infinite in float64 too.
    _, expected = with_gradient(reference.importance_ratio, 10 * leaf.double(), cotangent, **options)
    for some in (gradient, expected):
        assert (some[cotangent == 0] == 0).all()
    assert_identical(gradient.isnan(), expected.isnan())
    assert_identical(gradient.isinf(), expected.isinf())


@pytest.mark.simd
@pytest.mark.parametrize("level", LEVELS)
def test_a_mask_may_be_a_view_of_any_bytes(level: str) -> None:
    logprob, old, mask = sample()
    options = {"old_logprob": old, "level": level, "groups": groups_at(level, mask.shape, least=0)}
    expected = with_gradient(importance_ratio, logprob, old, mask=mask, **options)
    for byte in (2, 0x80, 0xFF):
        viewed = (mask * torch.tensor(byte, dtype=torch.uint8)).view(torch.bool)
        found = with_gradient(importance_ratio, logprob, old, mask=viewed, **options)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("terms", "mean"),
    [
        ([NAN, 0.0], NAN),
        ([INF, 1.0], INF),
        ([-INF, 1.0], -INF),
        ([INF, -INF], NAN),
        ([INF, NAN, -INF], NAN),
        ([5000.0, 0.0], INF),  # too large to be added
        ([-5000.0, 0.0], -INF),
        ([4000.0, -4000.0, 0.25, -0.25], 0.0),
    ],
)
def test_means_of_what_is_no_number(terms: list[float], mean: float) -> None:
    """NaN and infinities affect only their own group."""
    logprob = torch.tensor([[*terms, 0.5, 0.5], [0.25] * (len(terms) + 2)])
    groups = torch.tensor([[1] * len(terms) + [0, 0], [1] * (len(terms) + 2)], dtype=torch.int8)
    options = {"level": "entropy_group", "groups": groups, "log_bounds": UNBOUNDED}
    ratio = importance_ratio(logprob, torch.zeros_like(logprob), **options)
    expected = torch.exp(torch.where(groups == 1, torch.tensor([[mean], [0.25]]), 0.5))
    assert_ratio(ratio, expected)


@pytest.mark.simd
@pytest.mark.parametrize("sign", [1, -1])
def test_how_far_a_term_may_be_out(sign: int) -> None:
    """4096 counts as infinite, the float before it counts as itself. The mean of many terms shows the difference. A
    single value too large for the vector loop takes another path."""
    last = torch.nextafter(torch.tensor(4096.0), torch.tensor(0.0)).item()
    logprob = torch.zeros(4, 10_000)
    logprob[:3, 5003] = sign * torch.tensor([last, 4096.0, 1e30])
    ratio = importance_ratio(logprob, torch.zeros_like(logprob), level="sequence", log_bounds=UNBOUNDED)
    beyond = INF if sign > 0 else 0.0
    assert_ratio(ratio[:, 0], torch.tensor([math.exp(sign * last / 10_000), beyond, beyond, 1.0]))


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.simd
@pytest.mark.parametrize("denominator", ["self", "old"])
@pytest.mark.parametrize("level", LEVELS)
def test_padded_packed_alone_turned_and_on_one_thread(level: str, denominator: str) -> None:
    logprob, old, mask = sample(40, 3000)
    tokens = {"logprob": logprob, "cotangent": torch.randn(logprob.shape), "old_logprob": old}
    if level == "entropy_group":
        tokens["groups"] = groups_at(level, mask.shape, most=3)

    def call(**options: object) -> tuple[Tensor, Tensor]:
        return with_gradient(importance_ratio, level=level, denominator=denominator, **options)

    expected = call(mask=mask, **tokens)
    with threads(1):
        one = call(mask=mask, **tokens)
    turned = {name: part.T.contiguous().T for name, part in (tokens | {"mask": mask}).items()}
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(-1).cumsum(0)])
    flat = call(offsets=offsets, **{name: part[mask] for name, part in tokens.items()})
    row = call(mask=mask[7], **{name: part[7] for name, part in tokens.items()})
    for found, wanted in ((one, expected), (call(**turned), expected)):
        assert_same_bits(found[0], wanted[0])
        assert_same_bits(found[1], wanted[1])
    for i in range(2):
        assert_same_bits(flat[i], expected[i][mask])
        assert_same_bits(row[i], expected[i][7])


@pytest.mark.simd
def test_exp_is_good_to_a_rounding_step() -> None:
    shifts = torch.cat([torch.linspace(-104, 89, 200_001), torch.linspace(-0.01, 0.01, 100_001)])
    ratio = importance_ratio(shifts, torch.zeros_like(shifts), log_bounds=UNBOUNDED).double()
    exact = shifts.double().exp()
    step = torch.nextafter(exact.float(), torch.tensor(INF)).double() - exact.float().double()
    finite = exact < torch.finfo(torch.float32).max
    assert ((ratio - exact).abs() <= step)[finite].all()
    assert (ratio[exact > 3.5e38] == INF).all()
    assert importance_ratio(torch.tensor([-1e4, 1e4]), torch.zeros(2), log_bounds=UNBOUNDED).tolist() == [0, INF]


def test_half_precision() -> None:
    """Differences are in float32. The gradient has the dtype of its tensor."""
    logprob, old, mask = sample()
    for dtype in (torch.bfloat16, torch.float16):
        half = logprob.to(dtype)
        ratio, gradient = with_gradient(importance_ratio, half, logprob, old_logprob=old.to(dtype), mask=mask)
        assert_identical(ratio, importance_ratio(half.float(), old.to(dtype).float(), mask))
        assert gradient.dtype == dtype


def test_old_log_probabilities_are_constants() -> None:
    logprob, old, _ = sample()
    leaves = logprob.requires_grad_(), old.requires_grad_()
    importance_ratio(*leaves, level="sequence").sum().backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None


def test_no_second_derivative() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    gradient = torch.autograd.grad(importance_ratio(leaf, torch.zeros(3)).sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once, not twice"):
        gradient.sum().backward()


# ---- entropy_groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantile", "tokens", "high"),
    [
        *((hundredths / 100, 700, 7 * (100 - hundredths)) for hundredths in range(1, 100)),
        *((0.9994, 35_000, 21), (0.9, 10, 1), (0.93, 100, 7), (0.3, 10, 7)),
    ],
)
def test_a_quantile_is_the_number_that_is_written(quantile: float, tokens: int, high: int) -> None:
    """A quantile counts as the decimal written: 1 - 0.9 is above 0.1 in float32, and 1 - 0.7 above 0.3 in float64."""
    assert (entropy_groups(torch.rand(2, tokens), quantiles=(quantile,)).sum(-1) == high).all()


# ---- adaptive_clip ---------------------------------------------------------------------------------------------------


def test_the_scale_of_espo() -> None:
    """With a vocabulary of 151,936, a group of 1.2 nats may move by 2.0e-3, and one of 0.02 nats by 3.4e-5."""
    entropy = torch.tensor([[1.0, 1.4, 0.01, 0.03]])
    groups = torch.tensor([[1, 1, 0, 0]], dtype=torch.int8)
    epsilon = adaptive_clip(entropy, groups, vocab_size=151_936)
    assert epsilon[0].tolist() == pytest.approx([2.01e-3, 2.01e-3, 3.35e-5, 3.35e-5], rel=3e-3)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_one_long_sequence_among_short_ones() -> None:
    """All threads share the long sequence, and each also has some short ones."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 9, (400,), generator=generator)
    lengths[200] = 150_000
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(offsets[-1])
    old = -torch.rand(total, generator=generator)
    logprob = old + 0.1 * torch.randn(total, generator=generator)
    for level in ("sequence", "entropy_group"):
        options = {"level": level, "groups": groups_at(level, old.shape, most=1)}
        found = importance_ratio(logprob, old, offsets=offsets, **options)
        assert_ratio(found, reference.importance_ratio(logprob, old, offsets=offsets, **options))


def test_a_sequence_too_long_to_be_added_up_is_refused() -> None:
    tokens = torch.zeros(1).expand(2**25 + 1)
    for offsets in (None, torch.tensor([0, 0, len(tokens)]), torch.tensor([0, len(tokens)], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"logprob: got a sequence of 33554433 tokens; takes at most 2\^25"):
            importance_ratio(tokens, tokens, level="sequence", offsets=offsets)
    with pytest.raises(ValueError, match="entropy: got a sequence"):
        adaptive_clip(tokens, tokens.to(torch.int8), vocab_size=10)
