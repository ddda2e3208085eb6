"""What ``python -m d3s_kernels`` looks at: every op, on small inputs, beside its reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import reference


def checks(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Name, what the library computes, what the reference does, and how far apart they may be."""
    torch.manual_seed(0)  # the same inputs in every report
    logits = (4 * torch.randn(8, 20_000)).bfloat16().to(device)
    labels = torch.randint(0, logits.shape[1], (8,)).to(device)
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

    hidden, weight = torch.randn(8, 64).to(device), torch.randn(20_000, 64).to(device) / 4
    for dtype in (torch.float32, torch.bfloat16):
        head = hidden.to(dtype), weight.to(dtype)
        both = torch.stack(d3s.linear_logprob_entropy(*head, labels))
        exact = torch.stack(reference.linear_logprob_entropy(*head, labels))
        yield f"linear_logprob_entropy, {dtype}", both, exact, 1e-5
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    exact_leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
    gradients = torch.autograd.grad(torch.stack(d3s.linear_logprob_entropy(*leaves, labels)).sum(), leaves)
    exact_gradients = torch.autograd.grad(
        torch.stack(reference.linear_logprob_entropy(*exact_leaves, labels)).sum(), exact_leaves
    )
    for name, ours, exact in zip(("hidden", "weight"), gradients, exact_gradients, strict=True):
        yield f"linear_logprob_entropy: gradient of {name}", ours, exact, 1e-5

    scores = torch.randint(0, 1000, (4, 5000)).float().to(device)
    yield "topk_mask", d3s.topk_mask(scores, 0.1), reference.topk_mask(scores, 0.1), 0
    long = torch.randint(0, 1000, (100_000,)).float().to(device)
    yield "topk_mask, a long segment", d3s.topk_mask(long, 0.1), reference.topk_mask(long, 0.1), 0
    advantages = torch.randn(4).to(device)
    kept, expected = d3s.select_tokens(scores, advantages, 0.1), reference.select_tokens(scores, advantages, 0.1)
    yield "select_tokens", kept.mask, expected.mask, 0
    batch = logits.view(2, 4, -1)
    kept = d3s.select_tokens_from_logits(batch, advantages[:2], 0.5)
    yield "select_tokens_from_logits", kept.entropy, reference.entropy(batch), 1e-5
    yield "compact", d3s.compact(kept.mask, 8)[0], reference.compact(kept.mask, 8)[0], 0

    rewards = torch.randint(0, 2, (16, 8)).float().to(device)
    ours, exact = d3s.group_advantages(rewards), reference.group_advantages(rewards)
    yield "group_advantages", ours, exact, 1e-6
    yield "max_variance_select", d3s.max_variance_select(rewards, 4), reference.max_variance_select(rewards, 4), 0
    chosen, expected_mask = d3s.max_variance_select(long[:9000], 900), reference.max_variance_select(long[:9000], 900)
    yield "max_variance_select, a long segment", chosen, expected_mask, 0
    for rule in ("max_variance", "highest", "largest_abs", "percentile"):
        chosen, expected_mask = d3s.select_rollouts(ours, 4, rule=rule), reference.select_rollouts(ours, 4, rule=rule)
        yield f"select_rollouts, {rule}", chosen, expected_mask, 0

    entropy = scores / 100
    groups = d3s.entropy_groups(entropy)
    yield "entropy_groups", groups, reference.entropy_groups(entropy), 0
    clip = d3s.adaptive_clip(entropy, groups, vocab_size=20_000)
    yield "adaptive_clip", clip, reference.adaptive_clip(entropy, groups, vocab_size=20_000), 1e-8
    moved = entropy + torch.randn(4, 5000).to(device) / 10
    for level in ("token", "sequence", "entropy_group"):
        ids = groups if level == "entropy_group" else None
        ratio = d3s.importance_ratio(moved, entropy, level=level, groups=ids)
        exact = reference.importance_ratio(moved, entropy, level=level, groups=ids)
        yield f"importance_ratio, {level}", ratio, exact, 1e-5
    leaf, exact_leaf = moved.clone().requires_grad_(), moved.double().requires_grad_()
    (gradient,) = torch.autograd.grad(d3s.importance_ratio(leaf, entropy).sum(), leaf)
    (exact_gradient,) = torch.autograd.grad(reference.importance_ratio(exact_leaf, entropy).sum(), exact_leaf)
    yield "importance_ratio: gradient", gradient, exact_gradient, 1e-5
