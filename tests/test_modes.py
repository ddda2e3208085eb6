"""The ops in torch's modes: autocast, inference mode, and hooks on the tensors saved for the backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import random_labels, random_logits
from test_invariance import assert_same
from torch import Tensor
from torch.autograd import forward_ad

import d3s_kernels as d3s

LABELS = random_labels(4, 9, vocabulary=300)


def of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    return d3s.logprob_entropy(logits, LABELS, temperature=0.7)


def of_hidden(hidden: Tensor, **spans: Any) -> tuple[Tensor, Tensor]:
    weight = torch.linspace(-1, 1, 300 * 16, dtype=hidden.dtype).view(300, 16)
    return d3s.linear_logprob_entropy(hidden, weight, LABELS, max_grad_rows=36, **spans)


def of_kept_tokens(hidden: Tensor) -> tuple[Tensor, Tensor]:
    kept = d3s.SamplingMask.from_lists([list(range(row, 7 * row)) for row in range(LABELS.numel())])
    return of_hidden(hidden, sampling_mask=kept, label_outside="include")


def of_ratios(logprob: Tensor) -> tuple[Tensor, Tensor]:
    groups = d3s.entropy_groups(logprob.detach().abs())
    of_sequences = d3s.importance_ratio(logprob, logprob.detach() / 2, level="sequence")
    return of_sequences, d3s.importance_ratio(logprob, logprob.detach() / 2, level="entropy_group", groups=groups)


FORMS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[], Tensor]]] = {
    "logits": (of_logits, lambda: random_logits(4, 9, 300)),
    "bfloat16 logits": (of_logits, lambda: random_logits(4, 9, 300, dtype=torch.bfloat16)),
    "hidden states": (of_hidden, lambda: torch.randn(4, 9, 16)),
    "hidden states, kept tokens": (of_kept_tokens, lambda: torch.randn(4, 9, 16)),
    "ratios": (of_ratios, lambda: -torch.rand(4, 9)),
}
forms = pytest.mark.parametrize("form", FORMS)


def results(function: Callable[[Tensor], tuple[Tensor, Tensor]], values: Tensor) -> list[Tensor]:
    """The results of the forward and of the backward."""
    leaf = values.clone().requires_grad_()
    outputs = function(leaf)
    (gradient,) = torch.autograd.grad(outputs, leaf, [torch.ones_like(output) for output in outputs])
    return [*(output.detach() for output in outputs), gradient]


@forms
def test_autocast_changes_nothing(form: str) -> None:
    """The arguments of these ops determine what they compute; autocast is for layers."""
    function, make = FORMS[form]
    values = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = results(function, values)
    assert_same(actual, results(function, values))


@forms
def test_what_the_backward_needs_may_be_moved(form: str) -> None:
    """As with activation offloading: tensors are moved in the forward and come back as new ones in the backward."""
    function, make = FORMS[form]
    values, moved, returned = make(), [], []

    def away(tensor: Tensor) -> int:
        moved.append(tensor.clone())
        return len(moved) - 1

    def back(place: int) -> Tensor:
        returned.append(place)
        return moved[place]

    with torch.autograd.graph.saved_tensors_hooks(away, back):
        actual = results(function, values)
    assert sorted(returned) == list(range(len(moved)))
    assert_same(actual, results(function, values))


def test_a_selection_made_in_inference_mode() -> None:
    """A pass over the policy without a graph makes the selection, and the update uses it."""
    logits, advantages = torch.randn(4, 9, 300), torch.randn(4)
    with torch.inference_mode():
        old, entropy = of_logits(logits)
        kept = d3s.select_tokens(entropy, advantages, 0.3, mask=LABELS != -100)
    assert kept.mask.is_inference()
    leaf = logits.clone().requires_grad_()
    ratio = d3s.importance_ratio(of_logits(leaf)[0], old)
    (gradient,) = torch.autograd.grad(ratio, leaf, kept.mask.float())
    assert torch.equal(ratio, torch.ones(4, 9))
    assert torch.equal(gradient.any(-1), kept.mask)


@forms
def test_forward_mode_is_refused(form: str) -> None:
    """Torch's forward mode would treat the results of the ops as constants."""
    function, make = FORMS[form]
    values = make()
    with pytest.raises(NotImplementedError, match="has a forward-mode tangent"):
        torch.func.jvp(function, (values,), (torch.ones_like(values),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(values, torch.ones_like(values))
        assert d3s.topk_mask(dual[0], k=2).sum() == 2 * dual[0].numel() // dual.shape[-1]  # a selection is a constant
        with pytest.raises(NotImplementedError, match="has a forward-mode tangent"):
            function(dual)
        assert_same([*function(values)], [*function(values)])


@forms
def test_a_tensor_that_a_transform_has_left(form: str) -> None:
    """Functorch has wrapped it, and autograd knows only the tensor within."""
    function, make = FORMS[form]
    values, left = make().requires_grad_(), []

    def leave(one: Tensor) -> Tensor:
        left.append(one * values)
        return one.sum()

    torch.func.grad(leave)(torch.ones_like(values))
    actual = torch.autograd.grad(sum(result.sum() for result in function(left[0])), values)
    assert_same(actual, torch.autograd.grad(sum(result.sum() for result in function(values)), values))


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_forward_mode_is_refused_of_the_head(name: str) -> None:
    head = {"hidden": torch.randn(4, 9, 16), "weight": torch.randn(300, 16), "bias": torch.randn(300)}
    with forward_ad.dual_level():
        head[name] = forward_ad.make_dual(head[name], torch.ones_like(head[name]))
        with pytest.raises(NotImplementedError, match=f"^{name}: has a forward-mode tangent"):
            d3s.linear_logprob_entropy(**head, labels=LABELS)
