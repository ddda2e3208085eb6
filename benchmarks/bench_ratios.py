"""Importance ratios of tokens, sequences and groups, forward and with gradient; and ESPO's groups and clip ranges.

Trainers' masks are int64, and the peers use them directly. Ours takes bool masks, which a trainer makes once for all
calls on a batch; the yardstick `mask.bool()` measures that cost.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import d3s_kernels as d3s

from . import inputs, ratio_peers
from .harness import Contest, close, describe, same_kept
from .sizes import Sizes

VOCABULARY = 151_936
# Bytes read and written per element: two log-probabilities, a ratio, and a mask or group.
FORWARD_BYTES = {"token": 12, "sequence": 13, "entropy_group": 13}
# The bytes of the forward, and also the ratio, the incoming and the outgoing gradient, and a mask or group.
GRADIENT_BYTES = {"token": 24, "sequence": 26, "entropy_group": 26}
QUANTILE, GROUPS = 0.8, 2
ONE_EACH = "TRL's formula, one for each sequence"
Ratio = Callable[[Tensor], Tensor]


class Tokens:
    """A batch of completions of different lengths, and a policy that differs a little from the old one."""

    def __init__(self, sizes: Sizes) -> None:
        shape = sizes.batch
        self.size = describe(*shape)
        self.old = -inputs.entropies(*shape)
        self.logprob = self.old + 0.01 * inputs.advantages(*shape)
        self.present = inputs.right_padded(*shape)
        self.mask = self.present.long()
        self.entropy = inputs.entropies(*shape)
        self.groups = d3s.entropy_groups(self.entropy, self.present, (QUANTILE,))


@pytest.fixture(scope="module")
def tokens(sizes: Sizes) -> Tokens:
    return Tokens(sizes)


def ratios(tokens: Tokens, level: str) -> tuple[Ratio, dict[str, Ratio]]:
    """Our ratio and the peers' ratios."""
    old, mask, present, groups = tokens.old, tokens.mask, tokens.present, tokens.groups
    if level == "token":
        return lambda logprob: d3s.importance_ratio(logprob, old), {
            "TRL's formula": lambda logprob: ratio_peers.trl_token(logprob, old),
            "verl's formula": lambda logprob: ratio_peers.verl_token(logprob, old),
        }
    if level == "sequence":
        return lambda logprob: d3s.importance_ratio(logprob, old, present, level="sequence"), {
            "verl's formula": lambda logprob: ratio_peers.verl_sequence(logprob, old, mask),
            ONE_EACH: lambda logprob: ratio_peers.trl_sequence(logprob, old, mask).expand_as(logprob),
        }
    return lambda logprob: d3s.importance_ratio(logprob, old, level="entropy_group", groups=groups), {
        "plain PyTorch": lambda logprob: ratio_peers.espo_ratio(logprob, old, groups, GROUPS),
    }


@pytest.mark.parametrize("level", ["token", "sequence", "entropy_group"])
def test_forward(contest: Contest, tokens: Tokens, level: str) -> None:
    ours, peers = ratios(tokens, level)

    def of_completions(ratio: Ratio) -> Ratio:  # outside the mask peers differ from ours
        return lambda logprob: torch.where(tokens.present, ratio(logprob), 1.0)

    for name, peer in peers.items():
        close(1e-5)(name, of_completions(ours)(tokens.logprob), of_completions(peer)(tokens.logprob))
    contest(
        f"importance_ratio, {level}",
        tokens.size,
        ours,
        inputs=(tokens.logprob,),
        peers=peers,
        yardsticks={
            "copy": copy_of(FORWARD_BYTES[level] * tokens.logprob.numel()),
            **({"mask.bool()": lambda _: tokens.mask.bool()} if level == "sequence" else {}),
        },
    )


@pytest.mark.parametrize("level", ["token", "sequence", "entropy_group"])
def test_forward_and_backward(contest: Contest, tokens: Tokens, level: str) -> None:
    ours, peers = ratios(tokens, level)
    leaf = tokens.logprob.clone().requires_grad_()
    cotangent = tokens.entropy * tokens.mask

    def with_gradient(ratio: Ratio) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(ratio(leaf), leaf, cotangent)[0]

    contest(
        f"importance_ratio with its gradient, {level}",
        tokens.size,
        with_gradient(ours),
        peers={name: with_gradient(peer) for name, peer in peers.items() if name != ONE_EACH},
        yardsticks={"copy": copy_of(GRADIENT_BYTES[level] * tokens.logprob.numel())},
        agree=close(1e-4),
    )


def copy_of(moved: int) -> Callable[..., Tensor]:
    """A copy that moves this number of bytes, into memory from the same allocator."""
    source = inputs.entropies(1, moved // 8)
    return lambda *_: torch.empty_like(source).copy_(source)


def test_entropy_groups(contest: Contest, tokens: Tokens) -> None:
    contest(
        "entropy_groups",
        tokens.size,
        lambda entropy: d3s.entropy_groups(entropy, tokens.present, (QUANTILE,)) == 1,
        inputs=(tokens.entropy,),
        peers={"nanquantile": lambda entropy: ratio_peers.espo_groups(entropy, tokens.mask, QUANTILE) == 1},
        agree=same_kept(0.01),
    )


def test_adaptive_clip(contest: Contest, tokens: Tokens) -> None:
    groups = tokens.groups
    contest(
        "adaptive_clip",
        tokens.size,
        lambda entropy: d3s.adaptive_clip(entropy, groups, vocab_size=VOCABULARY),
        inputs=(tokens.entropy,),
        peers={"plain PyTorch": lambda entropy: ratio_peers.espo_clip(entropy, groups, GROUPS, VOCABULARY)},
        agree=close(1e-6),
    )
