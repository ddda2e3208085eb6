"""Activation checkpointing: gradients are bit-identical, selections are the same again, and ops that the policy saves
run only once."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_same, compiled_once, random_labels, require_inductor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import d3s_kernels as d3s

OPS = torch.ops.d3s_kernels
SAVED = OPS.logprob_entropy.default, OPS.linear_logprob_entropy.default
# In a reentrant checkpoint, the first forward needs no gradient.
WITHOUT_GRADIENT = {OPS.logprob_entropy.default: OPS.logprob_entropy_no_grad.default}
CHOOSE = OPS.select_tokens.default, OPS.importance_ratio.default


def loss(hidden: Tensor, weight: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
    """A loss of both forms of the head. The selection decides which tokens have a gradient."""
    hidden = torch.tanh(hidden)
    from_hidden, entropy = d3s.linear_logprob_entropy(hidden, weight, labels, max_grad_rows=labels.numel())
    from_logits, _ = d3s.logprob_entropy(hidden @ weight.T, labels)
    kept = d3s.select_tokens(entropy.detach(), advantages, 0.3)
    ratio = d3s.importance_ratio(from_hidden, from_hidden.detach() - 0.1, level="sequence")
    return ((ratio + from_logits) * advantages.unsqueeze(-1) * kept.mask).sum() / kept.count


def must_save(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


selective = partial(create_selective_checkpoint_contexts, must_save)
# For each kind of checkpoint: how often the forward of the ops in SAVED runs, and that of other ops.
WAYS: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "reentrant": (partial(checkpoint, loss, use_reentrant=True), 2, 2),
    "not reentrant": (partial(checkpoint, loss, use_reentrant=False), 2, 2),
    "selective": (partial(checkpoint, loss, use_reentrant=False, context_fn=selective), 1, 2),
}


class Count(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[op] += 1
        return op(*args, **(kwargs or {}))


def gradients(function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, *rest: Tensor) -> list[Tensor]:
    """Uses backward(), because a reentrant checkpoint supports nothing else."""
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    result = function(*leaves, *rest)
    result.backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def inputs() -> tuple[Tensor, ...]:
    return torch.randn(4, 8, 16), torch.randn(50, 16), random_labels(4, 8, vocabulary=50), torch.randn(4)


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_changes_no_bit(way: str) -> None:
    function, runs_of_saved, runs_of_others = WAYS[way]
    arguments = inputs()
    expected = gradients(loss, *arguments)
    with Count() as count:
        actual = gradients(function, *arguments)
    assert_same(actual, expected)
    calls = [count.calls[op] + count.calls[WITHOUT_GRADIENT.get(op)] for op in SAVED]
    assert calls == [runs_of_saved] * len(SAVED)
    assert [count.calls[op] for op in CHOOSE] == [runs_of_others] * len(CHOOSE)


def test_a_random_choice_is_the_same_again() -> None:
    """The gradient is that of the tokens drawn in the forward, because a checkpoint restores torch's generator."""

    def of_a_random_half(entropy: Tensor) -> Tensor:
        return (entropy * d3s.select_tokens(entropy.detach(), None, 0.5, rule="random").mask).square().sum()

    entropy = torch.rand(20, 30)
    for use_reentrant in (True, False):
        leaf = entropy.clone().requires_grad_()
        value = checkpoint(of_a_random_half, leaf, use_reentrant=use_reentrant)
        value.backward()
        torch.testing.assert_close((leaf.grad / 2).square().sum(), value)


@pytest.mark.slow("that Inductor recomputes what the policy says, and no more")
@pytest.mark.parametrize("way", ["not reentrant", "selective"])
def test_a_compiled_checkpoint(way: str) -> None:
    """Inductor splits forward and backward as the policy says. Torch's profiler counts the ops that its code calls."""
    require_inductor()
    function, runs_of_saved, runs_of_others = WAYS[way]
    compiled, arguments = compiled_once(lambda *tensors: function(*tensors), "inductor", dynamic=None), inputs()
    torch.testing.assert_close(gradients(compiled, *arguments), gradients(loss, *arguments), rtol=1e-5, atol=1e-6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        gradients(compiled, *arguments)
    calls = Counter(event.name for event in profile.events())
    assert [calls[op.name()] for op in SAVED] == [runs_of_saved] * len(SAVED)
    assert [calls[op.name()] for op in CHOOSE] == [runs_of_others] * len(CHOOSE)
