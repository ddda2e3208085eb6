"""Runs single ops on a benchmark's inputs, for a profiler.

ncu --profile-from-start off --set full python -m benchmarks.one_call topk_mask compact
python -m benchmarks.one_call --timeline sparse_head
"""

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

import d3s_kernels as d3s

from . import inputs
from .sizes import Sizes, sizes_for
from .targets import SMALL_MODEL
from .withdrawn import FULL_COMPLETIONS

WARM_UP, MANY = 2, 20


def logprob_entropy(sizes: Sizes) -> Callable[[], Any]:
    logits, labels = inputs.logits_and_labels(sizes)
    return lambda: d3s.logprob_entropy(logits, labels)


def logprob_entropy_backward(sizes: Sizes) -> Callable[[], Any]:
    logits, labels = inputs.logits_and_labels(sizes)
    leaf = logits.requires_grad_()
    gradients = inputs.advantages(*labels.shape), inputs.entropies(*labels.shape)
    return lambda: torch.autograd.grad(d3s.logprob_entropy(leaf, labels), leaf, gradients)


def head(sizes: Sizes) -> Callable[[], Any]:
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    return lambda: d3s.linear_logprob_entropy(hidden, weight, labels, logits_dtype=torch.bfloat16)


def head_both_ways(sizes: Sizes) -> Callable[[], Any]:
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    leaves, gradient = (hidden.requires_grad_(), weight.requires_grad_()), inputs.advantages(len(labels))
    options = {"logits_dtype": torch.bfloat16, "max_grad_rows": len(labels)}
    return lambda: torch.autograd.grad(d3s.linear_logprob_entropy(*leaves, labels, **options)[0], leaves, gradient)


def few_gradients(sizes: Sizes) -> Callable[[], Any]:
    """A tenth of the rows have a gradient, but the caller does not say so."""
    hidden, weight, labels = inputs.lm_head(sizes, "wide", torch.bfloat16)
    gradient = inputs.advantages(len(labels)) * (torch.arange(len(labels), device=inputs.device) % 10 == 0)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    head = partial(d3s.linear_logprob_entropy, *leaves, labels, logits_dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(head()[0], leaves, gradient)


def narrow_gradient(sizes: Sizes) -> Callable[[], Any]:
    """A bfloat16 gradient over float32 logits, whose values change with each call; this changes no time."""
    logits = torch.randn(sizes.head_tokens, sizes.vocabulary, device=inputs.device)
    labels = torch.randint(sizes.vocabulary, (len(logits),), device=inputs.device)
    grads, statistics = (inputs.advantages(len(labels)),) * 2, (inputs.entropies(len(labels)),) * 3
    op = torch.ops.d3s_kernels.logprob_entropy_backward_
    return lambda: op(*grads, logits, labels, *statistics, 0, grad_dtype=torch.bfloat16)


def sparse_head(sizes: Sizes, into: bool = True) -> Callable[[], Any]:
    """Forward and backward with a sampling mask. If `into`, the weight's gradient is added to an existing tensor."""
    hidden, weight, _ = inputs.lm_head(sizes, "wide", torch.bfloat16)
    kept = inputs.draw_kept(sizes.vocabulary, sizes.head_tokens)
    gradients = inputs.advantages(len(hidden)), inputs.entropies(len(hidden))
    options = {"sampling_mask": kept.mask, "max_dense_rows": 0, "max_grad_rows": len(hidden)}
    options |= {"logits_dtype": torch.bfloat16, "weight_grad_into": torch.zeros_like(weight) if into else None}
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    of = leaves[:1] if into else leaves
    return lambda: torch.autograd.grad(d3s.linear_logprob_entropy(*leaves, kept.labels, **options), of, gradients)


def sparse_head_own(sizes: Sizes) -> Callable[[], Any]:
    return sparse_head(sizes, into=False)


def topk_mask(sizes: Sizes) -> Callable[[], Any]:
    scores = inputs.advantages(*sizes.batch).abs() * inputs.entropies(*sizes.batch)
    return lambda: d3s.topk_mask(scores, 0.1)


def topk_mask_segment(sizes: Sizes) -> Callable[[], Any]:
    scores = inputs.advantages(sizes.segment).abs() * inputs.entropies(sizes.segment)
    return lambda: d3s.topk_mask(scores, 0.1)


def max_variance(sizes: Sizes) -> Callable[[], Any]:
    values = inputs.advantages(*sizes.groups)
    return lambda: d3s.max_variance_select(values, sizes.keep)


def max_variance_pool(sizes: Sizes) -> Callable[[], Any]:
    values = inputs.advantages(sizes.pool)
    return lambda: d3s.max_variance_select(values, sizes.pool_keep)


def compact(sizes: Sizes) -> Callable[[], Any]:
    mask = inputs.entropies(*sizes.batch) > 8 * 0.9**4
    capacity = int(mask.sum())
    return lambda: d3s.compact(mask, capacity)


def _ratio(sizes: Sizes, **of: Any) -> Callable[[], Any]:
    old = -inputs.entropies(*sizes.batch)
    logprob = old + 0.01 * inputs.advantages(*sizes.batch)
    return lambda: d3s.importance_ratio(logprob, old, **of)


def importance_ratio(sizes: Sizes) -> Callable[[], Any]:
    """The ratios of sequences."""
    return _ratio(sizes, mask=inputs.right_padded(*sizes.batch), level="sequence")


def _groups(sizes: Sizes, *quantiles: float) -> torch.Tensor:
    return d3s.entropy_groups(inputs.entropies(*sizes.batch), inputs.right_padded(*sizes.batch), quantiles)


def importance_ratio_groups(sizes: Sizes) -> Callable[[], Any]:
    return _ratio(sizes, groups=_groups(sizes, 0.8), level="entropy_group")


def importance_ratio_six_groups(sizes: Sizes) -> Callable[[], Any]:
    return _ratio(sizes, groups=_groups(sizes, 0.2, 0.4, 0.6, 0.8, 0.9), level="entropy_group")


def adaptive_clip(sizes: Sizes) -> Callable[[], Any]:
    entropy, groups = inputs.entropies(*sizes.batch), _groups(sizes, 0.8)
    return lambda: d3s.adaptive_clip(entropy, groups=groups, vocab_size=sizes.vocabulary)


def trl_update(sizes: Sizes, name: str = "d3s_kernels") -> Callable[[], Any]:
    """An update with half of the rollouts and a tenth of their tokens; all completions are full."""
    from . import trl_step

    return trl_step.Update(name, sizes, "0.5B" if inputs.device.type == "cuda" else SMALL_MODEL, FULL_COMPLETIONS)


def grpo_update(sizes: Sizes) -> Callable[[], Any]:
    return trl_update(sizes, "GRPOTrainer")


OPS = {
    made.__name__: made
    for made in (
        logprob_entropy, logprob_entropy_backward, narrow_gradient, head, head_both_ways, few_gradients, sparse_head,
        sparse_head_own, topk_mask, topk_mask_segment, max_variance, max_variance_pool, compact, importance_ratio,
        importance_ratio_groups, importance_ratio_six_groups, adaptive_clip, trl_update, grpo_update,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="+", choices=OPS, metavar="op", help=", ".join(OPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--short", action="store_true", help="small inputs")
    parser.add_argument("--timeline", action="store_true", help="by torch's profiler: each kernel, and the host")
    given = parser.parse_args()
    inputs.device = torch.device(given.device)
    for op in given.ops:
        call = OPS[op](sizes_for("cuda", given.short))
        for _ in range(WARM_UP):
            call()
        (timeline if given.timeline else profiled)(op, call)


def profiled(op: str, call: Callable[[], Any]) -> None:
    """Makes one call, and tells the profiler to record only this call. Start the profiler with
    `--profile-from-start off`.
    """
    if inputs.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    call()
    if inputs.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    print(f"{op}: a call", flush=True)


def timeline(op: str, call: Callable[[], Any]) -> None:
    start, synchronize = perf_counter(), torch.cuda.synchronize if inputs.device.type == "cuda" else lambda: None
    for _ in range(MANY):
        call()
    queued = perf_counter() - start
    synchronize()
    took = perf_counter() - start
    print(f"{op}: {1e6 * took / MANY:.0f} us a call, of which the host {1e6 * queued / MANY:.0f} us", flush=True)
    with torch.profiler.profile() as profile:
        call()
        synchronize()
    of_device = "self_device_time_total"
    kernels = (event for event in profile.events() if event.device_type.name != "CPU")
    busy = sum(getattr(event, of_device) for event in kernels)
    print(f"{op}: kernels take {busy:.0f} us of it")
    rows = sorted(profile.key_averages(), key=lambda row: (-getattr(row, of_device), -row.self_cpu_time_total))
    for row in rows[:40]:
        print(f"{getattr(row, of_device):10.1f} us {row.self_cpu_time_total:10.1f} us {row.count:5} {row.key[:150]}")


if __name__ == "__main__":
    main()
