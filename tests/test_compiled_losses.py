"""Whole losses under torch.compile: one graph, the gradients of eager PyTorch, and no recompilation while sizes and
budgets change."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import compiled_once, random_labels, random_logits, rounds, slow
from torch import Tensor, nn

import d3s_kernels as d3s

VOCABULARY, HIDDEN = 50, 16


def clipped_surrogate(
    logprob: Tensor, entropy: Tensor, labels: Tensor, old: Tensor, rewards: Tensor, keep: Any, ratio: Any, room: int
) -> tuple[Tensor, ...]:
    """The losses of GSPO and ESPO over the tokens that D3S keeps, and every selection on the way to them."""
    advantages, mask = d3s.group_advantages(rewards), labels != -100
    rollouts = d3s.select_rollouts(advantages, keep).view(-1, 1)
    kept = d3s.select_tokens(entropy.detach(), advantages.flatten(), ratio, mask=mask & rollouts)
    highest = d3s.topk_mask(entropy, k=room, mask=mask.long())
    indices, count = d3s.compact(kept.mask, room)
    groups = d3s.entropy_groups(entropy.detach(), mask)
    epsilon = d3s.adaptive_clip(entropy.detach(), groups, mask, vocab_size=VOCABULARY)
    policy, each = torch.where(kept.mask, logprob, logprob.detach()), advantages.view(-1, 1)
    gain = 0.01 * entropy * highest
    for level, given, clip in (("sequence", None, 0.2), ("entropy_group", groups, 10 * epsilon)):
        weight = d3s.importance_ratio(policy, old, mask.int(), level=level, groups=given)
        gain = gain + torch.minimum(weight * each, torch.clamp(weight, 1 - clip, 1 + clip) * each)
    return -(gain * kept.mask).sum() / kept.count.clamp(min=1), rollouts, kept.mask, kept.threshold, indices, count


def of_logits(logits: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return clipped_surrogate(*d3s.logprob_entropy(logits, labels), labels, *rest)


def including(kept: d3s.SamplingMask, labels: Tensor) -> dict[str, Any]:
    return {"sampling_mask": kept, "label_outside": "include", "max_dense_rows": labels.numel()}


def of_sampled_logits(logits: Tensor, labels: Tensor, kept: d3s.SamplingMask, *rest: Any) -> tuple[Tensor, ...]:
    return clipped_surrogate(*d3s.logprob_entropy(logits, labels, **including(kept, labels)), labels, *rest)


class Model(nn.Module):
    """A layer and an LM head with bounds on the rows and on the rows that have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, hidden: Tensor, labels: Tensor, max_rows: int, **spans: Any) -> tuple[Tensor, Tensor]:
        return d3s.linear_logprob_entropy(
            torch.tanh(self.layer(hidden)), self.head.weight, labels, bias=self.head.bias, mask=(labels != -100).long(),
            max_rows=max_rows, max_grad_rows=max_rows, **spans,
        )  # fmt: skip


def of_a_head(model: Model, hidden: Tensor, labels: Tensor, max_rows: int, *rest: Any) -> tuple[Tensor, ...]:
    return clipped_surrogate(*model(hidden, labels, max_rows), labels, *rest)


def of_a_sampled_head(
    model: Model, hidden: Tensor, labels: Tensor, max_rows: int, kept: d3s.SamplingMask, *rest: Any
) -> tuple[Tensor, ...]:
    return clipped_surrogate(*model(hidden, labels, max_rows, **including(kept, labels)), labels, *rest)


def assert_same_gradients(compiled: Callable, eager: Callable, leaves: Sequence[Tensor], *arguments: Any) -> None:
    """Compares values and gradients. `arguments` may hold the leaves, or objects that hold them."""
    results = []
    for function in (compiled, eager):
        loss, *others = function(*arguments)
        results.append((loss.detach(), *others, *torch.autograd.grad(loss, leaves)))
    assert all(gradient.any() for gradient in results[1][-len(leaves) :])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


# ---- twenty steps ----------------------------------------------------------------------------------------------------

# All sizes and budgets are dynamic at once; or, as torch.compile does by default, constant in the first compilation and
# dynamic in the second. Budgets are tensors or numbers.
FORMS = pytest.mark.parametrize(
    ("backend", "dynamic", "calls", "as_tensors"),
    [
        ("aot_eager", True, 1, True),
        slow("inductor", True, 1, True, shows="what Inductor makes of it"),
        slow("inductor", None, 2, False, shows="that two compilations do where nothing was said to be dynamic"),
    ],
)


def labels_and_budgets(i: int, as_tensors: bool) -> tuple[Any, ...]:
    """Labels, rewards and budgets of step i. They all differ, because torch.compile treats equal sizes as one."""
    labels = random_labels((2 + i % 5) * 4, 6 + i, vocabulary=VOCABULARY)
    rewards = torch.rand(2 + i % 5, 4)
    keep, ratio = 3 - i % 2, 0.05 + 0.04 * i
    budgets = (torch.tensor(keep), torch.tensor(ratio)) if as_tensors else (keep, ratio)
    return labels, rewards, *budgets, 10 + 3 * i


def some_spans(labels: Tensor) -> d3s.SamplingMask:
    """Of 0, 2, 4 and 6 tokens."""
    return d3s.SamplingMask.from_lists([list(range(row % 4, 3 * (row % 4))) for row in range(labels.numel())])


def older(logprob: Tensor) -> Tensor:
    return logprob.detach() + 0.05 * torch.randn(logprob.shape)


@FORMS
@pytest.mark.parametrize("loss", [of_logits, of_sampled_logits])
def test_a_loss_of_logits(
    loss: Callable[..., Any], backend: str, dynamic: bool | None, calls: int, as_tensors: bool
) -> None:
    """A sampling mask is an argument of the compiled function. Its number of ids changes too."""
    compiled = compiled_once(loss, backend, dynamic, calls)
    for i in range(rounds(20)):
        labels, *rest = labels_and_budgets(i, as_tensors)
        kept = [some_spans(labels)] if loss is of_sampled_logits else []
        logits = random_logits(*labels.shape, VOCABULARY).requires_grad_()
        old = older(d3s.logprob_entropy(logits, labels)[0])
        assert_same_gradients(compiled, loss, [logits], logits, labels, *kept, old, *rest)


@FORMS
@pytest.mark.parametrize("loss", [of_a_head, of_a_sampled_head])
def test_a_loss_of_a_head(
    loss: Callable[..., Any], backend: str, dynamic: bool | None, calls: int, as_tensors: bool
) -> None:
    compiled, model = compiled_once(loss, backend, dynamic, calls), Model()
    for i in range(rounds(20)):
        labels, *rest = labels_and_budgets(i, as_tensors)
        hidden, max_rows = torch.randn(*labels.shape, HIDDEN), labels.numel() - i % 3 - 1
        old = older(model(hidden, labels, max_rows)[0])
        kept = [some_spans(labels)] if loss is of_a_sampled_head else []
        given = model, hidden, labels, max_rows, *kept, old, *rest
        assert_same_gradients(compiled, loss, list(model.parameters()), *given)


@pytest.mark.parametrize(
    ("function", "bad", "message"),
    [
        (lambda ratio: d3s.topk_mask(torch.randn(9), ratio), 1.5, "ratio: got 1.5"),
        (lambda t: d3s.entropy(torch.randn(2, 9), temperature=t), 0.0, "temperature: got 0"),
    ],
)
def test_a_bad_number_is_named_in_a_graph_too(
    function: Callable, bad: float, message: str, request: pytest.FixtureRequest
) -> None:
    from torch._dynamo.symbolic_convert import TensorifyState  # not at the top, because this import takes seconds

    compiled = torch.compile(function, backend="aot_eager", dynamic=True)
    request.addfinalizer(TensorifyState.clear)  # otherwise the next compilation treats its first float as a constant
    with pytest.raises((ValueError, RuntimeError), match=message):  # RuntimeError from torch 2.15 on
        compiled(bad)
