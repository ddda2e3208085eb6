"""``python -m d3s_kernels``: what was built, what runs here, and every op checked against the reference."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference


def _checks() -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Name, what the library computes, what the reference does, and how far apart they may be."""
    logits = (4 * torch.randn(8, 20_000)).bfloat16()
    labels = torch.randint(0, logits.shape[1], (8,))
    yield "entropy", d3s.entropy(logits), reference.entropy(logits), 1e-5
    for name, ours, exact in zip(
        ("logprob_entropy: logprob", "logprob_entropy: entropy"),
        d3s.logprob_entropy(logits, labels),
        reference.logprob_entropy(logits, labels),
        strict=True,
    ):
        yield name, ours, exact, 1e-5

    leaf, exact_leaf = logits.float().requires_grad_(), logits.double().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.stack(d3s.logprob_entropy(leaf, labels)).sum(), leaf)
    (exact_gradient,) = torch.autograd.grad(
        torch.stack(reference.logprob_entropy(exact_leaf, labels)).sum(), exact_leaf
    )
    yield "logprob_entropy: gradient", gradient, exact_gradient, 1e-5

    hidden, weight = torch.randn(8, 64), torch.randn(20_000, 64) / 4
    for dtype in (torch.float32, torch.bfloat16):
        head = hidden.to(dtype), weight.to(dtype)
        both = torch.stack(d3s.linear_logprob_entropy(*head, labels))
        yield (
            f"linear_logprob_entropy, {dtype}",
            both,
            torch.stack(reference.linear_logprob_entropy(*head, labels)),
            1e-5,
        )

    scores = torch.randint(0, 1000, (4, 5000)).float()
    yield "topk_mask", d3s.topk_mask(scores, 0.1), reference.topk_mask(scores, 0.1), 0
    advantages = torch.randn(4)
    kept, expected = d3s.select_tokens(scores, advantages, 0.1), reference.select_tokens(scores, advantages, 0.1)
    yield "select_tokens", kept.mask, expected.mask, 0
    batch = logits.view(2, 4, -1)
    kept = d3s.select_tokens_from_logits(batch, advantages[:2], 0.5)
    yield "select_tokens_from_logits", kept.entropy, reference.entropy(batch), 1e-5
    yield "compact", d3s.compact(kept.mask, 8)[0], reference.compact(kept.mask, 8)[0], 0

    rewards = torch.randint(0, 2, (16, 8)).float()
    ours, exact = d3s.group_advantages(rewards), reference.group_advantages(rewards)
    yield "group_advantages", ours, exact, 1e-6
    yield "max_variance_select", d3s.max_variance_select(rewards, 4), reference.max_variance_select(rewards, 4), 0
    yield "select_rollouts", d3s.select_rollouts(ours, 4), reference.select_rollouts(ours, 4), 0


def main() -> int:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, value in d3s.build_info().items():
        print(f"{name.replace('_', ' ')}: {value}")
    wrong = 0
    for name, ours, exact, tolerance in _checks():
        error = (ours.double() - exact.double()).abs().max().item()
        wrong += not error <= tolerance
        print(f"{'ok   ' if error <= tolerance else 'WRONG'}  {name}  (error {error:.1e}, {tolerance:.0e} allowed)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
