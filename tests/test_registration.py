"""torch sees every op: fake kernels, autograd, torch.compile, and numbers that change between steps. For whole losses
see test_compiled_losses.py."""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from itertools import count
from typing import Any

import pytest
import torch
from cases.coverage import served_by
from cases.draw import Draw
from cases.table import OPS as OPS_TABLE
from helpers import assert_identical, compiled_once, random_logits, rounds, slow, whole_number_product
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import d3s_kernels as d3s
from d3s_kernels._dispatch import ops
from d3s_kernels._dispatch.libraries import registered, schema_of
from d3s_kernels._lm_head.op import arguments_of, problem_of
from d3s_kernels._lm_head.problem import WHOLE
from d3s_kernels.check.compare import called

OPS = torch.ops.d3s_kernels


def has_nan(call: Callable, arguments: dict[str, Any]) -> bool:
    """Whether a result or a gradient has NaN."""
    results = [result for result in called(call, arguments) if result is not None]
    leaves = [part for part in arguments.values() if isinstance(part, Tensor) and part.requires_grad]
    asked = [result.sum() for result in results if result.requires_grad]
    gradients = torch.autograd.grad(asked, leaves, allow_unused=True) if asked else ()
    return any(bool(part.isnan().any()) for part in (*results, *gradients) if part is not None)


# test_vocab_parallel.py checks the ops that need ranks.
@pytest.mark.parametrize("name", sorted(served_by("kernels", "composed", "cpu")))
def test_opcheck(name: str) -> None:
    op, row, seeds = getattr(OPS, name).default, OPS_TABLE[name], count()

    def drawn(seed: int) -> dict[str, Any]:
        given = row.draw(Draw(seed))
        return given | ({"keep_logits_bytes": None} if "keep_logits_bytes" in given else {})

    for _ in range(rounds(3)):
        # opcheck treats NaN as different from NaN. It also compares memory for kept logits that nothing has written.
        seed = next(i for i in seeds if not has_nan(op, drawn(i)))
        torch.library.opcheck(op, (), drawn(seed))


@pytest.mark.parametrize("name", ["linear_logprob_entropy", "linear_token_logprobs"])
def test_the_fake_of_kept_logits_has_their_shape(name: str) -> None:
    op = getattr(OPS, name).default
    for seed in range(6):
        given = OPS_TABLE[name].draw(Draw(seed)) | {"keep_logits_bytes": 10_000}
        with FakeTensorMode() as mode:
            fakes = {key: mode.from_tensor(part) if isinstance(part, Tensor) else part for key, part in given.items()}
            fake = op(**fakes)[-1]
        assert fake.shape == op(**given)[-1].shape


def test_the_arguments_of_the_head_are_those_of_its_op() -> None:
    """In the same order, and with the same defaults."""
    tensors = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.long)
    assert problem_of(*tensors).shard == WHOLE
    schema = schema_of("linear_logprob_entropy").arguments
    values = dict(zip([argument.name for argument in schema], arguments_of(problem_of(*tensors)), strict=True))
    for argument in schema[3:]:
        default = values[argument.name]
        assert argument.default_value == (6 if default == torch.float32 else default)  # torch's number of float32
    before_shard = len(schema) - 3  # the arguments of a shard are the last three; without a group, they have no effect
    numbered = arguments_of(problem_of(*tensors, *range(before_shard - 3), 0, None))
    assert [*numbered[3:-3]] == [*range(before_shard - 3)]


def test_the_functions_of_ops_call_the_ops_of_their_names() -> None:
    functions = {name: getattr(ops, name) for name in registered() if hasattr(ops, name)}
    assert {"topk_mask", "logprob_entropy"} < functions.keys()
    for name, function in functions.items():
        assert unwrap(function) is getattr(torch.ops.d3s_kernels, name).default


def test_what_warns_of_faults_goes_past_torchs_autograd() -> None:
    """With a CUDA library, the functions have a wrapper, which has the attributes of the op."""
    function = ops._with_usual_errors(ops.logprob_entropy)
    results = function(torch.randn(2, 5, requires_grad=True), None, 1.0, None, None)
    assert [result.requires_grad for result in results] == [True, True]  # torch's autograd kernel returns all four


def test_every_op_has_a_gradient_or_says_that_it_has_none() -> None:
    """Else torch would say, for example of the op of a gradient, that its derivative is not implemented."""
    without = [op for op in registered() if "\nAutograd" not in torch._C._dispatch_dump(f"d3s_kernels::{op}")]
    assert not without


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def chosen_by_rules(values: Tensor, keep: int | Tensor, ratio: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Every rule that neither waits for the device nor draws, on rows and on ragged groups."""
    offsets = torch.arange(0, values.numel() + 1, values.shape[-1])
    results = [
        d3s.select_rollouts(values, keep, rule=rule, scope=scope, mask=mask)
        for rule in ("max_variance", "highest", "largest_abs", "percentile")
        for scope in ("batch", "group")
    ]
    results.append(d3s.select_rollouts(values.flatten(), keep, rule="percentile", offsets=offsets, scope="group"))
    for rule in ("entropy", "advantage"):
        results += d3s.select_tokens(values.abs(), values[:, 0], ratio, rule=rule, mask=mask)[::2]
    return tuple(results)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor", shows="what Inductor makes of every rule")])
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

# What a schedule changes between steps, as a number and as a tensor: the function, and its number at step i = 0..19.
NUMBERS: dict[str, tuple[Callable, Callable[[int], float]]] = {
    "k": (lambda k: d3s.topk_mask(SCORES, k=k), lambda i: 2 + i),
    "ratio": (lambda ratio: d3s.topk_mask(SCORES, ratio), lambda i: 0.07 + 0.04 * i),
    "keep": (lambda keep: d3s.max_variance_select(SCORES, keep), lambda i: 2 + i),
    **{
        f"keep of the rule {rule}": (partial(d3s.select_rollouts, SCORES, rule=rule), lambda i: 2 + i)
        for rule in ("highest", "percentile")
    },
    "temperature": (
        lambda temperature: d3s.logprob_entropy(LOGITS, LABELS, temperature=temperature),
        lambda i: 0.5 + 0.1 * i,
    ),
}
CHANGING: dict[str, tuple[Callable, Callable[[int], object]]] = {
    **NUMBERS,
    **{
        f"{name} as a tensor": (function, lambda i, number=number: torch.tensor(number(i)))
        for name, (function, number) in NUMBERS.items()
    },
    "temperature of a selection": (
        lambda temperature: d3s.select_tokens_from_logits(LOGITS, LABELS.float(), 0.5, temperature=temperature),
        lambda i: torch.tensor(0.5 + 0.1 * i),
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_number_compiles_once(name: str) -> None:
    function, number = CHANGING[name]
    compiled = compiled_once(function)
    for i in range(rounds(20)):
        results = compiled(number(i)), function(number(i))
        for one, other in zip(*((of,) if isinstance(of, Tensor) else of for of in results), strict=True):
            assert_identical(one, other)
