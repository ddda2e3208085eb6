"""torch sees every op: fake kernels, autograd, torch.compile, and numbers that change from step to step. Whole losses:
test_compiled_losses.py."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import assert_identical, compiled_once, random_labels, random_logits, whole_number_product
from torch import Tensor

import d3s_kernels as d3s

OPS = torch.ops.d3s_kernels
REGISTERED = {
    name.removeprefix("d3s_kernels::").partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("d3s_kernels::")
}

# ---- opcheck ---------------------------------------------------------------------------------------------------------


def logits_samples() -> list[Tensor]:
    """Packed, strided, of half precision, of no rows."""
    base = random_logits(3, 4, 40)
    return [
        base,
        base[:, 1:, :33].transpose(0, 1),
        random_logits(5, 40, dtype=torch.bfloat16),
        base[:0],
        base.clone().requires_grad_(),
    ]


def samples_of_logits() -> list[tuple]:
    samples = []
    for logits in logits_samples():
        rows = logits.shape[:-1]
        labels = random_labels(*rows, vocabulary=logits.shape[-1])
        mask = torch.rand(rows) < 0.7
        samples += [(logits, None), (logits, labels), (logits, labels, 0.7, 0.5 + torch.rand(rows), mask)]
    return samples


def samples_of_the_backward() -> list[tuple]:
    samples = []
    for logits, labels, *options in samples_of_logits():
        rows = logits.shape[:-1]
        _, *state = OPS.logprob_entropy(logits.detach(), labels, *options)
        gradient = None if labels is None else torch.randn(rows)
        samples.append((gradient, torch.randn(rows), logits.detach(), labels, *state, *options))
    *gradients, logits, labels, entropy, row_max, log_sum = samples[1]
    elsewhere = labels + 10 * (labels != -100)
    return [*samples, (*gradients, logits, elsewhere, entropy, row_max, log_sum, 1.0, None, None, 10)]


def states(rows: int) -> Tensor:
    return torch.tensor([torch.finfo().min, 0.0, 0.0, -torch.inf]).repeat(rows, 1)


def samples_of_tiles() -> list[tuple]:
    strided, mask = random_logits(3, 4, 20)[:, 1:3].transpose(0, 1), torch.rand(2, 3) < 0.7
    return [
        *((states(5), random_logits(5, 20), labels, 10, 0.7) for labels in (None, torch.full((5,), 12))),
        (states(6), strided, torch.full((2, 3), 12), 10, 1.0, 0.5 + torch.rand(2, 3), mask),
    ]


def samples_of_finished_states() -> list[tuple]:
    state = states(5)
    OPS.softmax_state_(state, random_logits(5, 20), torch.arange(5), 0)
    each = 0.5 + torch.rand(5)
    return [(state, 0.7), (state, 1.0, each), (torch.stack([state, states(5)]), 1.0, each)]


def samples_of_the_tile_backward() -> list[tuple]:
    logits, labels = random_logits(5, 20), torch.arange(5)
    _, *state = OPS.logprob_entropy(logits, labels)
    return [
        (torch.randn(5), torch.randn(5), logits, labels, *state, 0),
        (None, torch.randn(5), logits, None, *state, 0),
    ]


def random_head() -> tuple[Tensor, ...]:
    return torch.randn(2, 3, 8), torch.randn(30, 8), random_labels(2, 3, vocabulary=30), torch.randn(30)


def samples_of_the_head() -> list[tuple]:
    hidden, weight, labels, bias = random_head()
    temperature, mask = 0.5 + torch.rand(2, 3), torch.rand(2, 3) < 0.7
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    return [
        (hidden, weight, labels),
        (hidden, weight, labels, bias, 1.0, temperature, 30.0, mask, 6, 6, torch.float32, 500),
        (hidden[:, :0], weight, labels[:, :0]),
        (leaves[0], leaves[1], labels, leaves[2]),
        (hidden.transpose(0, 1), leaves[1], labels.T),
    ]


def samples_of_the_head_backward() -> list[tuple]:
    hidden, weight, labels, bias = random_head()
    options = 0.7, None, 30.0, None, 6, torch.float32, 500
    _, *state = OPS.linear_logprob_entropy(hidden, weight, labels, bias, *options[:3])
    saved = hidden, weight, labels, bias, *state, *options
    g_logprob, g_entropy = torch.randn(2, 2, 3)
    return [
        (g_logprob, g_entropy, *saved, [True, True, True]),
        (g_logprob, None, *saved, [True, False, False]),
        (None, g_entropy, *saved, [False, True, False]),
    ]


OFFSETS = torch.tensor([0, 5, 5, 24])


def value_samples() -> list[tuple[Tensor, Tensor | None]]:
    values = torch.randn(4, 6)
    return [
        (values, None),
        (values.T, None),
        (values.bfloat16(), None),
        (values.flatten(), OFFSETS),
        (values[:0], None),
    ]


def samples_of_scores() -> list[tuple]:
    samples = []
    for values, offsets in value_samples():
        mask = torch.rand(values.shape) < 0.7
        samples += [
            (values, 0.3, None, None, None, mask, offsets),
            (values, None, torch.tensor(0.3), None, None, None, offsets, 24, True),
            (values, None, None, 3, None, mask, offsets),
            (values, None, None, None, torch.tensor(3), mask, offsets, None, False, True),
        ]
    return samples


def samples_of_entropies() -> list[tuple]:
    samples = []
    for values, offsets in value_samples():
        each = torch.randn(values.shape[:-1] if offsets is None else (3,))
        for pooled in (True, False):
            samples.append((values, each, 0.3, None, None, offsets, None, pooled))
            samples.append(
                (values, torch.randn(values.shape), None, torch.tensor(0.3), None, offsets, 24, pooled, True)
            )
    return samples


def samples_of_logits_to_select() -> list[tuple]:
    samples = []
    for logits in logits_samples():
        tokens = logits.shape[:-1]
        for pooled in (True, False):
            samples.append((logits.detach(), torch.randn(tokens), 0.3, None, None, None, None, 0.7, None, pooled))
    return samples


def samples_of_groups() -> list[tuple]:
    samples = []
    for values, offsets in value_samples():
        entropy, mask = values.float().abs(), torch.rand(values.shape) < 0.7
        samples += [(entropy, [0.8], mask, offsets), (entropy, [0.2, 0.5], None, offsets, 24, True)]
    return samples


def samples_of_clips() -> list[tuple]:
    samples = []
    for entropy, quantiles, mask, offsets, *_ in samples_of_groups():
        groups = OPS.entropy_groups(entropy, quantiles, mask, offsets)
        samples.append((entropy, groups, mask, offsets, 1000, 0.02))
    return samples


def samples_of_ratios() -> list[tuple]:
    samples = []
    for entropy, groups, mask, offsets, *_ in samples_of_clips():
        leaf = (entropy + 0.1 * torch.randn(entropy.shape)).requires_grad_()
        samples += [
            (leaf, entropy, mask, None, offsets),
            (leaf, entropy, mask, None, offsets, "sequence", "self", -torch.inf, 10.0),
            (leaf.detach(), entropy, None, groups, offsets, "entropy_group", "old", -1.0, 1.0),
        ]
    return samples


def samples_of_keys() -> list[tuple]:
    samples: list[tuple] = []
    for values, offsets in value_samples():
        each = torch.randn(values.shape[:-1] if offsets is None else (3,))
        samples += [(values,), (values, each, torch.rand(values.shape) < 0.7, offsets)]
    return samples


def searches(last: tuple) -> list[tuple]:
    """Of rows and of segments: keys, the cut as it is before the last digit, that digit, and offsets."""
    samples = []
    for values, offsets in value_samples():
        keys = OPS.order_keys(values)
        cut = torch.zeros(values.shape[:-1].numel() if offsets is None else 3, 3, dtype=torch.int64)
        for shift, bits in ((24, 8), (16, 8), (8, 8)):
            OPS.narrow_cut_(cut, OPS.key_histogram(keys, cut, shift, bits, offsets), shift, k=2)
        samples.append((keys, cut, *last, offsets))
    return samples


def samples_of_cuts() -> list[tuple]:
    samples: list[tuple] = []
    for keys, cut, shift, bits, offsets in searches((0, 8)):
        counts = OPS.key_histogram(keys, cut, shift, bits, offsets)
        samples += [(cut, counts, shift, None, None, 2), (cut, counts, shift, None, torch.tensor(0.5))]
    return samples


SAMPLES: dict[str, Callable[[], list[tuple]]] = {
    "logprob_entropy": samples_of_logits,
    "logprob_entropy_backward": samples_of_the_backward,
    "softmax_state_": samples_of_tiles,
    "softmax_state_finish": samples_of_finished_states,
    "logprob_entropy_backward_": samples_of_the_tile_backward,
    "linear_logprob_entropy": samples_of_the_head,
    "linear_logprob_entropy_backward": samples_of_the_head_backward,
    "wide_product_": lambda: [(torch.randn(5, 8).bfloat16(), torch.randn(30, 8).bfloat16(), torch.empty(5, 30))],
    "topk_mask": samples_of_scores,
    "select_tokens": samples_of_entropies,
    "select_tokens_from_logits": samples_of_logits_to_select,
    "order_keys": samples_of_keys,
    "key_histogram": lambda: searches((0, 8)),
    "narrow_cut_": samples_of_cuts,
    "mask_at_cut": lambda: [
        (keys, cut, torch.ones(len(cut), dtype=torch.int64), offsets, True) for keys, cut, offsets in searches(())
    ],
    "compact": lambda: [(torch.rand(4, 6) < 0.5, 7), ((torch.rand(4, 6) < 0.5).T, 30), (torch.ones(0).bool(), 2)],
    "group_advantages": lambda: [(values, offsets, "batch") for values, offsets in value_samples()],
    "max_variance_select": lambda: [
        sample
        for values, offsets in value_samples()
        for sample in (
            (values, 3, None, torch.rand(values.shape) < 0.8, offsets),
            (values, None, torch.tensor(3), None, offsets, 24, True),
        )
    ],
    "importance_ratio": samples_of_ratios,
    "importance_ratio_backward": lambda: [
        (torch.randn(old.shape), old.exp(), mask, groups) for _, old, mask, groups, *_ in samples_of_ratios()
    ],
    "entropy_groups": samples_of_groups,
    "adaptive_clip": samples_of_clips,
}


# Checked where there are ranks: test_vocab_parallel.py.
OF_RANKS = {
    "vocab_parallel_logprob_entropy",
    "vocab_parallel_linear_logprob_entropy",
    "vocab_parallel_linear_logprob_entropy_backward",
}


def test_every_op_has_samples() -> None:
    assert set(SAMPLES) | OF_RANKS == REGISTERED


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    for sample in SAMPLES[name]():
        torch.library.opcheck(getattr(OPS, name).default, sample)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def chosen_by_rules(values: Tensor, keep: int | Tensor, ratio: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Every rule that does not wait for the device and draws nothing, of rows and of ragged groups."""
    length = values.shape[-1]
    offsets = torch.arange(0, values.numel() + 1, length)
    results = [
        d3s.select_rollouts(values, keep, rule=rule, scope=scope, mask=mask)
        for rule in ("max_variance", "highest", "largest_abs", "percentile")
        for scope in ("batch", "group")
    ]
    results.append(d3s.select_rollouts(values.flatten(), keep, rule="percentile", offsets=offsets, scope="group"))
    for rule in ("entropy", "advantage"):
        results += d3s.select_tokens(values.abs(), values[:, 0], ratio, rule=rule, mask=mask)[::2]
    return tuple(results)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_rules_compile_whole_for_every_shape(backend: str) -> None:
    compiled = torch.compile(chosen_by_rules, backend=backend, fullgraph=True, dynamic=True)
    for rows, length in ((2, 7), (3, 9), (5, 11)):
        values, keep, mask = torch.randn(rows, length), torch.tensor(rows), torch.rand(rows, length) < 0.7
        arguments = values, keep, torch.tensor(0.3), mask
        for actual, expected in zip(compiled(*arguments), chosen_by_rules(*arguments), strict=True):
            assert_identical(actual, expected)


def test_random_choices_compile_whole() -> None:
    def draw(values: Tensor, keep: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
        rollouts = d3s.select_rollouts(values, keep, rule="random", scope="group")
        return rollouts, d3s.select_tokens(values, None, ratio, rule="random").mask

    compiled = compiled_once(draw)
    for i in range(5):
        rollouts, tokens = compiled(torch.randn(3 + i, 10 + i), torch.tensor(1 + i), torch.tensor(0.5))
        assert (rollouts.sum(-1) == 1 + i).all()
        assert tokens.sum() == -(-(3 + i) * (10 + i) // 2)


SCORES, MASK, LOGITS, LABELS = torch.randn(6, 40), torch.rand(6, 40) < 0.5, random_logits(6, 30), torch.arange(6)
HIDDEN, WEIGHT = whole_number_product(6, vocabulary=30)

# What a schedule changes from step to step: the function, and its number at step i = 0..19.
CHANGING: dict[str, tuple[Callable, Callable[[int], object]]] = {
    "k": (lambda k: d3s.topk_mask(SCORES, k=k), lambda i: 2 + i),
    "k as a tensor": (lambda k: d3s.topk_mask(SCORES, k=k), lambda i: torch.tensor(1 + i)),
    "ratio": (lambda ratio: d3s.topk_mask(SCORES, ratio), lambda i: 0.07 + 0.04 * i),
    "ratio as a tensor": (lambda ratio: d3s.topk_mask(SCORES, ratio), lambda i: torch.tensor(0.05 + 0.04 * i)),
    "ratio of tokens": (
        lambda ratio: d3s.select_tokens(SCORES.abs(), SCORES[:, 0], ratio),
        lambda i: torch.tensor(0.05 + 0.04 * i, dtype=torch.float64),
    ),
    "keep": (lambda keep: d3s.max_variance_select(SCORES, keep), lambda i: 2 + i),
    "keep as a tensor": (lambda keep: d3s.max_variance_select(SCORES, keep), lambda i: torch.tensor(1 + i)),
    "keep of rollouts": (lambda keep: d3s.select_rollouts(SCORES, keep), lambda i: 2 + i),
    **{
        f"keep of the rule {rule}{as_tensor}": (
            partial(d3s.select_rollouts, SCORES, rule=rule),
            (lambda i: torch.tensor(1 + i)) if as_tensor else lambda i: 2 + i,
        )
        for rule in ("highest", "percentile")
        for as_tensor in ("", ", a tensor")
    },
    "capacity": (lambda capacity: d3s.compact(MASK, capacity), lambda i: 2 + 5 * i),
    "temperature": (
        lambda temperature: d3s.logprob_entropy(LOGITS, LABELS, temperature=temperature),
        lambda i: 0.5 + 0.1 * i,
    ),
    "temperature as a tensor": (
        lambda temperature: d3s.logprob_entropy(LOGITS, LABELS, temperature=temperature),
        lambda i: torch.tensor(0.5 + 0.1 * i),
    ),
    "temperature of a selection": (
        lambda temperature: d3s.select_tokens_from_logits(LOGITS, LABELS.float(), 0.5, temperature=temperature),
        lambda i: torch.tensor(0.5 + 0.1 * i),
    ),
    "max_rows": (
        lambda rows: d3s.linear_logprob_entropy(HIDDEN, WEIGHT, LABELS, max_rows=rows, max_grad_rows=rows),
        lambda i: 7 + i,  # not the number of rows: torch.compile takes equal sizes for one
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_number_compiles_once(name: str) -> None:
    function, number = CHANGING[name]
    compiled = compiled_once(function)
    for i in range(20):
        actual, expected = compiled(number(i)), function(number(i))
        if isinstance(actual, Tensor):
            actual, expected = (actual,), (expected,)
        for one, other in zip(actual, expected, strict=True):
            assert_identical(one, other)


def test_changing_bounds_of_the_gradient_compile_once() -> None:
    weight = WEIGHT.clone().requires_grad_()

    def loss(rows: int) -> Tensor:
        return sum(d3s.linear_logprob_entropy(HIDDEN, weight, LABELS, max_grad_rows=rows)).sum()

    compiled = compiled_once(loss)
    (expected,) = torch.autograd.grad(loss(6), weight)
    for rows in range(7, 27):
        torch.testing.assert_close(torch.autograd.grad(compiled(rows), weight)[0], expected, rtol=1e-5, atol=1e-6)
