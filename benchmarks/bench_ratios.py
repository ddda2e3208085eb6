"""Importance ratios of tokens, sequences and groups, forward and with gradient; and ESPO's groups and clip ranges.

Trainers' masks are int64, and the peers use them directly. Our ops take bool masks. A trainer converts its mask to bool
once for all calls on a batch; the yardstick `mask.bool()` measures the cost of this conversion.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s

from . import inputs, peers, ratio_peers
from .clock import copied
from .harness import Agree, Contest, close, describe, same_kept
from .sizes import SHORT, Sizes
from .targets import groups_of_tokens

VOCABULARY = 151_936
# Bytes read and written per element: two log-probabilities, a ratio, and a mask or group.
FORWARD_BYTES = {"token": 12, "sequence": 13, "entropy_group": 13}
# The same for forward and backward together. The backward adds the ratio, two gradients (incoming and outgoing), and a
# mask or group.
GRADIENT_BYTES = {"token": 24, "sequence": 26, "entropy_group": 26}
QUANTILE, GROUPS = 0.8, 2
ONE_EACH = "TRL's formula, one for each sequence"
LEVELS = ["token", "sequence", "entropy_group"]
Ratio = Callable[..., Tensor]  # takes log-probabilities, old log-probabilities, and what else the level needs


class Tokens:
    """A batch of completions of different lengths, and a policy that differs a little from the old policy."""

    def __init__(self, sizes: Sizes) -> None:
        shape = sizes.batch
        self.size = describe(*shape)
        self.old = -inputs.entropies(*shape)
        self.logprob = self.old + 0.01 * inputs.advantages(*shape)
        self.present = inputs.right_padded(*shape)
        self.mask = self.present.long()
        self.entropy = inputs.entropies(*shape)
        self.groups = d3s.entropy_groups(self.entropy, self.present, (QUANTILE,))

    def others(self, level: str) -> tuple[Tensor, ...]:
        """The arguments for ratios of this level, besides the log-probabilities."""
        return {"token": (), "sequence": (self.present, self.mask), "entropy_group": (self.groups,)}[level]


@pytest.fixture(scope="module")
def tokens(sizes: Sizes) -> Tokens:
    return Tokens(sizes)


def ratios(level: str) -> tuple[Ratio, dict[str, Ratio]]:
    """Our ratio and the peers' ratios."""
    if level == "token":
        return d3s.importance_ratio, {
            "TRL's formula": ratio_peers.trl_token,
            "verl's formula": ratio_peers.verl_token,
        }
    if level == "sequence":
        return lambda logprob, old, present, _: d3s.importance_ratio(logprob, old, present, level=level), {
            "verl's formula": lambda logprob, old, _, mask: ratio_peers.verl_sequence(logprob, old, mask),
            ONE_EACH: lambda logprob, old, _, mask: ratio_peers.trl_sequence(logprob, old, mask).expand_as(logprob),
        }
    return lambda logprob, old, groups: d3s.importance_ratio(logprob, old, level=level, groups=groups), {
        "plain PyTorch": lambda logprob, old, groups: ratio_peers.espo_ratio(logprob, old, groups, GROUPS),
    }


@pytest.mark.parametrize("level", LEVELS)
def test_forward(contest: Contest, tokens: Tokens, level: str) -> None:
    ours, rivals = ratios(level)
    forward(contest, tokens, level, ours, rivals)


@pytest.mark.parametrize("level", LEVELS)
def test_forward_and_backward(contest: Contest, tokens: Tokens, level: str) -> None:
    ours, rivals = ratios(level)
    rivals.pop(ONE_EACH, None)
    forward_and_backward(contest, tokens, level, ours, rivals)


@pytest.mark.skipif(not peers.ON_GPU, reason="on a CPU, all numbers of groups take as long")
@pytest.mark.parametrize("number", [2, 4, 6, 8, 10])
def test_groups(contest: Contest, tokens: Tokens, number: int) -> None:
    """Up to eight groups have sums of their own on a GPU."""
    groups = d3s.entropy_groups(tokens.entropy, tokens.present, tuple(i / number for i in range(1, number)))
    source = source_of(FORWARD_BYTES["entropy_group"] * tokens.logprob.numel())
    contest(
        groups_of_tokens(number),
        tokens.size,
        lambda _, *given: ratios("entropy_group")[0](*given),
        inputs=copied(source, tokens.logprob, tokens.old, groups),
        yardsticks={"copy": copy},
    )


@pytest.mark.parametrize("level", LEVELS)
def test_compiled(contest: Contest, tokens: Tokens, level: str) -> None:
    """Times the peers' formulas as torch.compile fuses them. These contests are separate, since compiling takes
    seconds.
    """
    if contest.sizes == SHORT and level != "sequence":
        pytest.skip("on a CPU, a short run compiles for one level alone")
    ours, rivals = ratios(level)
    fused = {f"{name}, compiled": peers.compiled(formula) for name, formula in rivals.items() if name != ONE_EACH}
    contest.name_ends = ", beside torch.compile"
    forward(contest, tokens, level, ours, fused)
    forward_and_backward(contest, tokens, level, ours, fused)


def forward(contest: Contest, tokens: Tokens, level: str, ours: Ratio, rivals: dict[str, Ratio | None]) -> None:
    given = tokens.logprob, tokens.old, *tokens.others(level)
    source = source_of(FORWARD_BYTES[level] * tokens.logprob.numel())

    def of(ratio: Ratio) -> Ratio:
        return lambda _, *given: ratio(*given)

    contest(
        f"importance_ratio, {level}",
        tokens.size,
        of(ours),
        inputs=copied(source, *given, touched=min(source.nbytes, 2 * tokens.logprob.nbytes)),
        peers={name: rival and of(rival) for name, rival in rivals.items()},
        yardsticks={
            "copy": copy,
            **({"mask.bool()": of(lambda logprob, old, present, mask: mask.bool())} if level == "sequence" else {}),
        },
        agree=close_in_completions(tokens.present, 1e-5),
    )


def forward_and_backward(
    contest: Contest, tokens: Tokens, level: str, ours: Ratio, rivals: dict[str, Ratio | None]
) -> None:
    leaf = tokens.logprob.clone().requires_grad_()
    given = leaf, tokens.old, *tokens.others(level)
    source, cotangent = source_of(GRADIENT_BYTES[level] * leaf.numel()), tokens.entropy * tokens.mask

    def with_gradient(ratio: Ratio) -> Ratio:
        return lambda _, cotangent, leaf, *given: torch.autograd.grad(ratio(leaf, *given), leaf, cotangent)[0]

    contest(
        f"importance_ratio with its gradient, {level}",
        tokens.size,
        with_gradient(ours),
        inputs=copied(source, cotangent, *given, touched=min(source.nbytes, 3 * leaf.nbytes)),
        peers={name: rival and with_gradient(rival) for name, rival in rivals.items()},
        yardsticks={"copy": copy},
        agree=close(1e-4),
    )


def source_of(moved: int) -> Tensor:
    """A tensor whose copy moves this number of bytes: the bytes read and the bytes written, together."""
    return inputs.entropies(1, moved // 8)


def copy(source: Tensor, *_: Tensor) -> Tensor:
    """Copies into memory from the same allocator."""
    return torch.empty_like(source).copy_(source)


def close_in_completions(present: Tensor, tolerance: float) -> Agree:
    """Compares only the tokens inside the mask: outside of it, the peers return other ratios than ours."""

    def agree(name: str, ours: Tensor, theirs: Tensor) -> None:
        close(tolerance)(name, ours.where(present, 1.0), theirs.where(present, 1.0))

    return agree


def test_entropy_groups(contest: Contest, tokens: Tokens) -> None:
    given = tokens.entropy, tokens.present, tokens.mask
    contest(
        "entropy_groups",
        tokens.size,
        lambda entropy, present, _: d3s.entropy_groups(entropy, present, (QUANTILE,)) == 1,
        inputs=copied(*given, touched=tokens.entropy.nbytes + tokens.present.nbytes),
        peers={"nanquantile": lambda entropy, _, mask: ratio_peers.espo_groups(entropy, mask, QUANTILE) == 1},
        agree=same_kept(0.01),
    )


def test_adaptive_clip(contest: Contest, tokens: Tokens) -> None:
    contest(
        "adaptive_clip",
        tokens.size,
        lambda entropy, groups: d3s.adaptive_clip(entropy, groups, vocab_size=VOCABULARY),
        inputs=(tokens.entropy, tokens.groups),
        peers={"plain PyTorch": lambda entropy, groups: ratio_peers.espo_clip(entropy, groups, GROUPS, VOCABULARY)},
        agree=close(1e-6),
    )
