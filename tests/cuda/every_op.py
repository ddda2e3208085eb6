"""Every op on inputs of moderate size, on the GPU: what the tests of its back-ends call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from helpers import random_labels
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels._ranks import top
from d3s_kernels._ranks.equal_rows import most_varied

GPU = torch.device("cuda")


def logits_like_a_models(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers; every fourth row has one token far above the rest."""
    logits = torch.randn(*shape, device=GPU, dtype=dtype) * 3
    logits.view(-1, shape[-1])[::4, 17] += 30
    return logits


def tensors(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


Call = Callable[[], object]


class Alone:
    """A rank without others, which takes the way of several all the same."""

    rank, size = 0, 2

    def add_(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, torch.zeros_like(values)])


def among_ranks(scores: Tensor, offsets: Tensor | None, **quota: object) -> tuple[Tensor, ...]:
    keys = torch.ops.d3s_kernels.order_keys(scores)
    return tuple(top.select(keys, offsets, top.Quota(**quota), True, Alone()))  # type: ignore[arg-type]


def calls() -> dict[str, Call]:
    """Every op, on inputs that stay where they are."""
    logits = logits_like_a_models(40, 20_000)
    labels = random_labels(40, vocabulary=20_000).to(GPU)
    hidden, weight = torch.randn(40, 64, device=GPU).bfloat16(), torch.randn(20_000, 64, device=GPU).bfloat16()
    scores = torch.randint(0, 1000, (8, 5000), device=GPU).float()
    long = torch.rand(300_000, device=GPU)
    advantages, rewards = torch.randn(8, device=GPU), torch.randint(0, 3, (64, 8), device=GPU).float()
    offsets = torch.arange(0, 512 + 1, 8, device=GPU)
    mask = torch.rand(8, 5000, device=GPU) < 0.5
    ids = torch.randint(-1, 8, (8, 5000), device=GPU, dtype=torch.int8)
    row_mask = torch.rand(40, device=GPU) < 0.5
    ratio, keep = torch.tensor(0.1, device=GPU), torch.tensor(3, device=GPU)
    entropy, row_max, log_sum = torch.ops.d3s_kernels.logprob_entropy(logits, labels)[1:]
    gradient = torch.randn(40, device=GPU)
    backward = torch.ops.d3s_kernels.logprob_entropy_backward
    head_backward = torch.ops.d3s_kernels.linear_logprob_entropy_backward
    head = torch.ops.d3s_kernels.linear_logprob_entropy(hidden, weight, labels)[1:]
    return {
        "entropy": lambda: d3s.entropy(logits),
        "entropy, masked": lambda: d3s.entropy(logits, row_mask=row_mask, temperature=torch.tensor(0.7, device=GPU)),
        "logprob_entropy": lambda: d3s.logprob_entropy(logits, labels),
        "logprob_entropy, one row": lambda: d3s.logprob_entropy(logits[:1], labels[:1]),
        "logprob_entropy_backward": lambda: backward(gradient, gradient, logits, labels, entropy, row_max, log_sum),
        "linear_logprob_entropy": lambda: d3s.linear_logprob_entropy(
            hidden, weight, labels, row_mask=row_mask, max_rows=40, max_grad_rows=40
        ),
        "linear_logprob_entropy_backward": lambda: head_backward(
            gradient * row_mask,
            None,
            hidden,
            weight,
            labels,
            None,
            *head,
            1.0,
            None,
            None,
            None,
            40,
            torch.float32,
            1 << 20,
            [True, True, False],
        )[:2],
        "topk_mask": lambda: d3s.topk_mask(scores, ratio, mask=mask),
        "topk_mask, k": lambda: d3s.topk_mask(scores, k=keep),
        "topk_mask, ragged": lambda: d3s.topk_mask(rewards.flatten(), 0.3, offsets=offsets),
        "topk_mask, long": lambda: d3s.topk_mask(long, 0.1),
        "topk_mask, among ranks": lambda: among_ranks(long, None, ratio_tensor=ratio)[:2],
        "topk_mask, sequences among ranks": lambda: among_ranks(rewards.flatten(), offsets, k_tensor=keep)[:2],
        "select_tokens": lambda: d3s.select_tokens(scores, advantages, 0.1, mask=mask)[::2],
        "select_tokens, sequence": lambda: d3s.select_tokens(scores, advantages, 0.1, scope="sequence"),
        "select_tokens_from_logits": lambda: d3s.select_tokens_from_logits(
            logits.view(8, 5, -1), advantages, 0.3, mask=row_mask.view(8, 5)
        ),
        "compact": lambda: d3s.compact(mask, 6000),
        "group_advantages": lambda: d3s.group_advantages(rewards),
        "group_advantages, batch": lambda: d3s.group_advantages(rewards.flatten(), offsets=offsets, scale="batch"),
        "max_variance_select": lambda: d3s.max_variance_select(rewards, keep),
        "max_variance_select, ragged": lambda: d3s.max_variance_select(rewards.flatten(), 3, offsets=offsets),
        "max_variance_select, long": lambda: d3s.max_variance_select(long, 5000),
        "select_rollouts": lambda: d3s.select_rollouts(rewards, 3),
        "select_rollouts, equal rows": lambda: most_varied(rewards.view(8, 64), keep * 64),
        "importance_ratio": lambda: d3s.importance_ratio(scores, scores + 1, mask),
        "importance_ratio, sequence": lambda: d3s.importance_ratio(
            rewards.flatten(), rewards.flatten() + 1, level="sequence", offsets=offsets
        ),
        "importance_ratio, entropy_group": lambda: d3s.importance_ratio(
            scores / 100, scores / 90, mask, level="entropy_group", groups=ids, denominator="old"
        ),
        "importance_ratio_backward": lambda: torch.ops.d3s_kernels.importance_ratio_backward(scores, scores, mask, ids),
        "entropy_groups": lambda: d3s.entropy_groups(scores, mask, (0.5, 0.8)),
        "adaptive_clip": lambda: d3s.adaptive_clip(scores / 100, ids, vocab_size=1000),
        "select_rollouts, highest": lambda: d3s.select_rollouts(rewards, keep, rule="highest", scope="group"),
        "select_rollouts, percentile": lambda: d3s.select_rollouts(
            rewards.flatten(), keep, rule="percentile", offsets=offsets, scope="group"
        ),
    }


NAMES = (
    "entropy", "entropy, masked", "logprob_entropy", "logprob_entropy, one row", "logprob_entropy_backward",
    "linear_logprob_entropy", "linear_logprob_entropy_backward", "topk_mask", "topk_mask, k", "topk_mask, ragged",
    "topk_mask, long", "topk_mask, among ranks", "topk_mask, sequences among ranks", "select_tokens",
    "select_tokens, sequence", "select_tokens_from_logits", "compact", "group_advantages",
    "group_advantages, batch", "max_variance_select", "max_variance_select, ragged", "max_variance_select, long",
    "select_rollouts, equal rows", "select_rollouts", "select_rollouts, highest", "select_rollouts, percentile",
    "importance_ratio", "importance_ratio, sequence", "importance_ratio, entropy_group",
    "importance_ratio_backward", "entropy_groups", "adaptive_clip",
)  # fmt: skip
