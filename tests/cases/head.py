"""The ops of the LM head, and of its matrix products for only the kept tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from d3s_kernels import reference
from d3s_kernels.check import tolerances
from d3s_kernels.check.tolerances import Allowed

from .draw import FLOATS, Draw
from .logprobs import listed, with_statistics
from .meaning import public, public_arguments, step, with_incoming
from .row import Arguments, detached, differentiable, op

_RULES = tolerances.FUNCTIONS["linear_logprob_entropy"]


def _rule(name: str) -> Allowed:
    """The allowed error of the head's result or gradient ``name``. (tests/test_head.py has a tighter rule.)"""
    rule = {**_RULES.results, **_RULES.gradients}[name]
    return lambda exact, arguments: rule(exact, with_incoming("linear_logprob_entropy", arguments))


_RESULTS = {name: _rule(name) for name in ("logprob", "entropy")}
_GRADIENTS = {name: _rule(name) for name in ("hidden", "weight", "bias")}


def _head(draw: Draw, width: int, vocabulary: int, rows: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Arguments:
    """Draws the arguments of a head. Its logits have a standard deviation of about 3, as in a language model."""
    dtype, generator = draw.choice(dtypes), draw.generator()
    return {
        "hidden": draw.normal(generator, dtype, *rows, width),
        "weight": draw.normal(generator, dtype, vocabulary, width, deviation=3 / math.sqrt(width)),
        "labels": draw.labels(rows, vocabulary),
        "bias": draw.optional(draw.normal(generator, dtype, vocabulary)),
        "mask": draw.mask(rows),
        "logit_softcap": draw.choice((None, 30.0, 2.0)),
        "logits_dtype": draw.choice((torch.float32, dtype)),
    }


def _meaning(**given: Any) -> tuple[Any, ...]:
    """The results of the public function. The op's others matter only for the gradient, which is compared."""
    return *public("linear_logprob_entropy")(**given), None, None, None


def head_arguments(draw: Draw) -> Arguments:
    """Draws the arguments of a head that all its ops take."""
    width = draw.length(1, 16)
    vocabulary = draw.length(1, draw.room(width))
    rows = draw.rows(draw.wide(max(width, vocabulary)))
    given = _head(draw, width, vocabulary, rows, (torch.float32, torch.bfloat16)) | draw.temperature(rows)
    given["workspace_bytes"] = draw.choice((None, 4 * vocabulary, 3000, 1))
    return given


@op(_meaning, "row_max", "log_sum", "kept_logits", results=_RESULTS, gradients=_GRADIENTS, served_by="composed")
def linear_logprob_entropy(draw: Draw) -> Arguments:
    given = head_arguments(draw)
    rows, vocabulary = tuple(given["labels"].shape), len(given["weight"])
    kept = math.prod(rows) if given["mask"] is None else int(given["mask"].sum())
    given |= draw.spans(math.prod(rows), vocabulary, given["labels"], given["mask"], bound=False)
    given["max_rows"] = draw.choice((None, kept, kept + 7, max(0, kept - 1)))
    given["keep_logits_bytes"] = draw.choice((None, 1 << 30))
    given["max_grad_rows"] = draw.choice((None, kept, kept + 7, max(0, kept // 2)))
    if given["max_rows"] is not None and given["max_rows"] < kept:  # in that case no result can be differentiated
        return given
    return differentiable(draw, given, "hidden", "weight", "bias")


def _meaning_of_backward(wanted: Sequence[bool], **given: Any) -> tuple[Tensor | None, ...]:
    """Computes the gradients of the public function. A gradient that is not wanted is None."""
    leaves = {name: given[name] for name in ("hidden", "weight", "bias")}
    leaves = {name: None if leaf is None else leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        results = public("linear_logprob_entropy")(**given | leaves)
    asked = [leaf for leaf, want in zip(leaves.values(), wanted, strict=True) if want]
    incoming = [given["grad_logprob"], given["grad_entropy"]]
    some = [(result, grad.double()) for result, grad in zip(results, incoming, strict=True) if grad is not None]
    found = iter(torch.autograd.grad([result for result, _ in some], asked, [grad for _, grad in some]))
    return tuple(next(found) if want else None for want in wanted)


def _logits(given: Arguments) -> Tensor:
    head = (given[name] for name in ("hidden", "weight", "bias", "logit_softcap"))
    return reference._head_logits(*head).float()


@op(_meaning_of_backward, results=_GRADIENTS, served_by="composed")
def linear_logprob_entropy_backward(draw: Draw) -> Arguments:
    given: Arguments = {"temperature": 1.0, "temperature_tensor": None} | detached(linear_logprob_entropy(draw))
    given |= {"max_rows": None, "kept_logits": torch.empty(0, 0)}  # a bound and logits that only the forward has
    given["max_grad_rows"] = draw.choice((None, math.prod(given["labels"].shape)))
    wanted = draw.choice(([True, True, True], [True, False, False], [False, True, False]))
    given["wanted"] = [*wanted[:2], wanted[2] and given["bias"] is not None]
    return with_statistics(draw, given | {"logits": _logits(given)})


# ---- only the kept tokens --------------------------------------------------------------------------------------------


def _kept(draw: Draw) -> Arguments:
    """Draws the arguments of a head for a few rows with a sampling mask."""
    width = draw.length(1, 70)
    vocabulary, rows = draw.length(1, draw.room(width)), draw.length(0, 12)
    given = _head(draw, width, vocabulary, (rows,), FLOATS)
    return given | draw.spans(rows, vocabulary, given["labels"], given["mask"], optional=False)


def _near_product(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """The allowed error: rounding steps, in float32 and in the logits' dtype, of the sum of the terms' magnitudes."""
    hidden, weight = (arguments[name].double().abs() for name in ("hidden", "weight"))
    terms = float((hidden @ weight.T).max()) if len(hidden) and len(weight) else 0.0
    if arguments.get("bias") is not None and len(weight):
        terms += float(arguments["bias"].double().abs().max())
    steps = 2**-21 + 8 * torch.finfo(arguments["logits_dtype"]).eps
    return torch.where(exact.isfinite(), steps * terms, 0.0)


@op(step("support_logits", wide=True), results={"logits": _near_product})
def support_logits(draw: Draw) -> Arguments:
    given = _kept(draw)
    first = draw.choice((None, draw.integer(0, len(given["weight"]) - 1)))
    shard = {name: given[name] if given[name] is None else given[name][first:] for name in ("weight", "bias")}
    return given | shard | {"first_token": first}


def _gradient_of_places(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """The allowed error of a gradient of logits, with some rounding steps for a soft cap's slope."""
    temperature = torch.as_tensor(public_arguments("entropy", arguments).get("temperature", 1.0))
    coldest = float(temperature.min()) if temperature.numel() else 1.0
    given = [arguments.get(f"grad_{name}") for name in ("logprob", "entropy")]
    most = sum(float(part.abs().max()) for part in given if part is not None and part.numel())
    return torch.full(exact.shape, 2**-16 * most / coldest)


@op(step("support_logits_backward", wide=True), "rows", "tokens", "undefined", results={"grad": _gradient_of_places})
def support_logits_backward(draw: Draw) -> Arguments:
    given = _kept(draw) | {"max_dense_rows": None}
    given = with_statistics(draw, given | {"logits": _logits(given)} | draw.temperature((len(given["hidden"]),)))
    first = draw.choice((None, draw.integer(0, len(given["weight"]) - 1)))
    return listed(given | {"first_token": first}, given["logits"])


def _near_sum(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """The allowed error: float32 rounding steps of the sum of magnitudes, and steps of the total in ``out``'s dtype."""
    matrix = arguments["weight"] if "weight" in arguments else arguments["hidden"]
    most = max(1.0, float(matrix.double().abs().max()) if matrix.numel() else 0.0)  # 1 is the factor of the bias
    limit = 2**-21 * most * arguments["grad"].double().abs().sum() * torch.ones(exact.shape)
    return limit + 2 * torch.finfo(arguments["out"].dtype).eps * (exact.abs().nan_to_num() + limit)


def _places(draw: Draw) -> Arguments:
    """Hidden states, a weight, and places, the entries of the flat list of kept logits: place i is of row ``rows[i]``
    and token ``tokens[i]``. The kept tokens of all rows come first, then each row's label. A place without a gradient
    has the row -1.
    """
    width = draw.length(1)
    vocabulary = draw.length(1, draw.room(width))
    counts = torch.tensor([draw.length(0, 9) for _ in range(draw.length(1, 12))])
    generator, dtype = draw.generator(), draw.choice(FLOATS)
    every = torch.arange(len(counts))
    rows = torch.cat([every.repeat_interleave(counts), torch.where(counts > 0, every, -1)])
    none = torch.rand(rows.shape, generator=generator) < draw.choice((0.0, 0.2, 1.0))
    few = min(vocabulary, draw.choice((vocabulary, 3)))
    return {
        "hidden": draw.normal(generator, dtype, len(counts), width),
        "weight": draw.normal(generator, dtype, vocabulary, width),
        "rows": rows.masked_fill(none, -1).int(),
        "tokens": torch.randint(few, rows.shape, generator=generator).int(),
        "offsets": torch.tensor([0, *accumulate(counts.tolist())], dtype=draw.choice((torch.int64, torch.int32))),
        "grad": torch.randn(rows.shape, generator=generator),
        "undefined": torch.rand(counts.shape, generator=generator) < 0.2,
        "out": draw.normal(generator, draw.choice((dtype, torch.float32)), len(counts), width),
    }


@op(step("support_hidden_grad_", wide=True), results={"out": _near_sum})
def support_hidden_grad_(draw: Draw) -> Arguments:
    return _places(draw)


@op(step("support_weight_grad_", wide=True), results={"out": _near_sum, "bias_out": _near_sum})
def support_weight_grad_(draw: Draw) -> Arguments:
    given = _places(draw)
    generator, dtype = draw.generator(), given["out"].dtype
    given["out"] = draw.normal(generator, dtype, *given["weight"].shape)
    given["bias_out"] = draw.optional(torch.randn(len(given["weight"]), generator=generator).to(dtype))
    if draw.rarely():  # only the bias gets a gradient
        given |= {"hidden": given["hidden"][:, :0], "out": given["out"][:, :0]}
    return given


def _near_wide_product(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    hidden, weight = (arguments[name].double().abs() for name in ("hidden", "weight"))
    return 2**-21 * (hidden @ weight.T)


def _wide_product(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    return hidden.double() @ weight.double().T


@op(_wide_product, results={"out": _near_wide_product}, served_by="cpu")
def wide_product_(draw: Draw) -> Arguments:
    width = draw.length(0, 40)
    rows = draw.length(0, draw.room(width))
    columns = draw.length(0, draw.room(max(rows, width)))
    generator = draw.generator()
    hidden, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (rows, columns))
    return {"hidden": hidden, "weight": weight, "out": torch.full((rows, columns), math.nan)}
