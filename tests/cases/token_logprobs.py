"""The ops for log-probabilities at given ids: of logits, of the LM head, and their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from d3s_kernels.check import tolerances

from .draw import Draw
from .head import head_arguments
from .logprobs import as_tile, merged, rows_of_logits, states, without_supports
from .meaning import public, public_arguments, step
from .row import Arguments, detached, differentiable, op

NAMES = ("logprobs", "tail_logprob", "logprob", "entropy")
_OF_LOGITS, _OF_HEAD = (tolerances.FUNCTIONS[name] for name in ("token_logprobs", "linear_token_logprobs"))


def any_ids(draw: Draw, rows: tuple[int, ...], vocabulary: int) -> Tensor:
    """Draws some ids for each row, with fills and repeated ids; sometimes all ids of the vocabulary."""
    generator = draw.generator()
    if draw.rarely() and math.prod(rows) * vocabulary < 1 << 16:
        ids = torch.randperm(vocabulary, generator=generator).expand(*rows, -1)
    else:
        few = draw.choice((vocabulary, min(vocabulary, 3)))
        ids = torch.randint(-1, few, (*rows, draw.length(0, 12)), generator=generator)
    return draw.laid_out(ids.to(draw.choice((torch.int64, torch.int32))))


def _with_ids(draw: Draw, given: Arguments) -> Arguments:
    rows, vocabulary = tuple(given["logits"].shape[:-1]), given["logits"].shape[-1]
    if given["labels"] is None:
        given["labels"] = torch.full(rows, -100)
    return given | {"token_ids": any_ids(draw, rows, vocabulary)}


def _rows(draw: Draw) -> Arguments:
    return _with_ids(draw, without_supports(rows_of_logits(draw)))


# ---- of logits ------------------------------------------------------------------------------------------------------


def _meaning(**given: Any) -> tuple[Any, ...]:
    """The results of the public function. The op's two others matter only for the gradient, which is compared."""
    return *public("token_logprobs")(**given), None, None


def _shard(given: Arguments) -> Arguments:
    """The arguments of the op that only vocabulary shards have: here, there is one shard."""
    return given | {"first_token": 0, "group_name": None}


@op(
    _meaning,
    "tail_max",
    "tail_log_sum",
    results=_OF_LOGITS.results,
    gradients=_OF_LOGITS.gradients,
    served_by="composed",
)
def token_logprobs(draw: Draw) -> Arguments:
    return _shard(_rows(draw))


def _results(given: Arguments) -> tuple[Tensor, ...]:
    """The six results of each row, in plain PyTorch; masked rows are computed too."""
    flat = _flat(given)
    rows, ids = len(flat["token_ids"]), flat["token_ids"]
    taken = torch.full(ids.shape, math.nan)
    state, taken = step("token_softmax_state_")(**flat, state=merged(rows), taken=taken)
    return step("token_logprobs_finish")(**flat, state=state, taken=taken)


def _flat(given: Arguments) -> Arguments:
    """The same rows in one dimension, without a mask."""
    rows = given["labels"].shape
    names = ("logits", "token_ids", "labels")
    flat = {name: given[name].reshape(rows.numel(), *given[name].shape[len(rows) :]) for name in names}
    each = given.get("temperature_tensor")
    return (
        given
        | flat
        | {"mask": None, "temperature_tensor": each if each is None or each.dim() == 0 else each.reshape(-1)}
    )


def _incoming(draw: Draw, given: Arguments, found: dict[str, Tensor]) -> Arguments:
    """Adds incoming gradients, of which some are None, and some values 0. A logprob of -inf has no gradient."""
    generator = draw.generator()
    for name in NAMES:
        gradient = torch.randn(found[name].shape, generator=generator)
        gradient *= torch.rand(found[name].shape, generator=generator) < draw.choice((0.8, 0.1))
        given[f"grad_{name}"] = draw.choice((gradient, None))
    return given


def _backward(draw: Draw, given: Arguments) -> Arguments:
    shape = given["labels"].shape
    found = zip((*NAMES, "tail_max", "tail_log_sum"), _results(given), strict=True)
    results = {name: result.view((*shape, *result.shape[1:])) for name, result in found}
    results["logprob"] = results["logprob"].masked_fill(given["labels"] == -100, 0)
    return _incoming(draw, given | results, results)


def _with_gradient(given: Arguments) -> Tensor:
    """Returns which rows have an incoming gradient. The gradient of the others is 0, even if their logits are NaN."""
    none = torch.zeros(given["labels"].shape)
    of_ids, of_tail, of_label, of_entropy = (given[f"grad_{name}"] for name in NAMES)
    found = torch.zeros_like(none, dtype=torch.bool)
    if of_ids is not None:
        found |= ((of_ids != 0) & (given["token_ids"] != -1)).any(-1)
    if of_label is not None:
        found |= (of_label != 0) & (given["labels"] != -100)
    return found | ((none if of_tail is None else of_tail) != 0) | ((none if of_entropy is None else of_entropy) != 0)


def _gradient(**given: Any) -> Tensor:
    """The gradient of the public function."""
    logits = given["logits"].detach().double().requires_grad_()
    with torch.enable_grad():
        results = public("token_logprobs")(**given | {"logits": logits})
        some = [(result, given[f"grad_{name}"]) for name, result in zip(NAMES, results, strict=True)]
        some = [(result, grad.double()) for result, grad in some if grad is not None]
    if not some:
        return torch.zeros_like(logits)
    gradient = torch.autograd.grad([result for result, _ in some], logits, [grad for _, grad in some])[0]
    return gradient.masked_fill(~_with_gradient(given).unsqueeze(-1), 0)


def gradient_of_logits(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    incoming = {name: part for name, part in arguments.items() if name.startswith("grad_")}
    return tolerances.gradient_of_logits(exact, public_arguments("token_logprobs", arguments) | incoming)


@op(_gradient, results={"grad_logits": gradient_of_logits}, served_by="composed")
def token_logprobs_backward(draw: Draw) -> Arguments:
    return _shard(_backward(draw, detached(_rows(draw))))


# ---- the steps ------------------------------------------------------------------------------------------------------


@op(step("token_softmax_state_", wide=True), results={"state": states, "taken": tolerances.equal})
def token_softmax_state_(draw: Draw) -> Arguments:
    given = as_tile(draw, detached(_rows(draw)))
    given["token_ids"] = given["token_ids"].reshape(given["labels"].numel(), given["token_ids"].shape[-1])
    taken = torch.randn(given["token_ids"].shape, generator=draw.generator())
    return given | {"taken": taken.masked_fill(taken > 0, math.nan)}


def _of_no_row(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    return torch.zeros(exact.shape).masked_fill(exact.isnan(), math.inf)


def _known(*results: Tensor) -> tuple[Tensor, ...]:
    *others, tail_max, tail_log_sum = results
    return *others, tail_max.masked_fill(tail_log_sum.isnan(), math.nan), tail_log_sum


_FINISHED = {**_OF_LOGITS.results, "tail_max": _of_no_row, "tail_log_sum": tolerances.logprob}


@op(lambda **given: _known(*step("token_logprobs_finish", wide=True)(**given)), results=_FINISHED)
def token_logprobs_finish(draw: Draw) -> Arguments:
    given = _flat(detached(_rows(draw)))
    logits, ids, first = given["logits"], given["token_ids"], 0
    pieces = []
    for part in logits.split(-(-logits.shape[-1] // draw.integer(1, 3)), -1):
        taken = torch.full(ids.shape, math.nan)
        of_part = given | {"logits": part, "first_token": first, "state": merged(len(ids)), "taken": taken}
        pieces.append(step("token_softmax_state_")(**of_part))
        first += part.shape[-1]
    state, taken = (torch.stack(part) for part in zip(*pieces, strict=True))
    if len(pieces) == 1 and draw.flag():
        state, taken = state[0], taken[0]
    return given | {"state": state, "taken": taken}


def _of_rows(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """The allowed error of values that are computed from incoming gradients: a share of them, in each row."""
    grads = [arguments.get(f"grad_{name}") for name in NAMES]
    most = sum(float(part.abs().max()) * part.shape[-1] for part in grads if part is not None and part.numel())
    temperature = torch.as_tensor(public_arguments("entropy", arguments).get("temperature", 1.0))
    coldest = min(1.0, float(temperature.min())) if temperature.numel() else 1.0
    return 2e-6 * exact.double().abs().nan_to_num(posinf=0) + 2e-6 * most / coldest


_GRADIENTS = dict.fromkeys(("tail_grad_logprob", "tail_grad_entropy"), _of_rows) | {
    "tail_entropy": tolerances.logprob, "values": _of_rows
}  # fmt: skip


@op(step("token_logprobs_gradient", wide=True), results=_GRADIENTS)
def token_logprobs_gradient(draw: Draw) -> Arguments:
    given = _backward(draw, _flat(detached(_rows(draw))))
    mask = draw.mask((len(given["token_ids"]),))
    return given | {"mask": mask, "labels": draw.choice((given["labels"], None))}


@op(step("put_token_gradients_"), "gradient")
def put_token_gradients_(draw: Draw) -> Arguments:
    """Equal ids of a row have equal values."""
    given = _flat(detached(_rows(draw)))
    logits, generator = given["logits"], draw.generator()
    gradient = torch.randn(logits.shape, generator=generator).to(logits.dtype)
    ids = torch.cat([given["token_ids"].long(), given["labels"].long().unsqueeze(1)], 1).clamp(min=0)
    given["values"] = torch.randn(logits.shape, generator=generator).gather(1, ids)
    first = draw.integer(0, logits.shape[-1] - 1)
    part = draw.laid_out(gradient[:, first:], turned=False)
    return given | {"gradient": part, "first_token": first or draw.choice((None, 0))}


# ---- of the LM head -------------------------------------------------------------------------------------------------


def _of_head(name: str) -> tolerances.Allowed:
    rule = {**_OF_HEAD.results, **_OF_HEAD.gradients}[name]

    def allowed(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
        incoming = {name: part for name, part in arguments.items() if name.startswith("grad_")}
        return rule(exact, public_arguments("linear_token_logprobs", arguments) | incoming)

    return allowed


def _head(draw: Draw) -> Arguments:
    given = head_arguments(draw)
    return given | {"token_ids": any_ids(draw, tuple(given["labels"].shape), len(given["weight"]))}


def _meaning_of_head(**given: Any) -> tuple[Any, ...]:
    return *public("linear_token_logprobs")(**given), None, None, None


@op(
    _meaning_of_head,
    "tail_max",
    "tail_log_sum",
    "kept_logits",
    results={name: _of_head(name) for name in NAMES},
    gradients={name: _of_head(name) for name in ("hidden", "weight", "bias")},
    served_by="composed",
)
def linear_token_logprobs(draw: Draw) -> Arguments:
    given = _head(draw)
    kept = given["labels"].numel() if given["mask"] is None else int(given["mask"].sum())
    given["max_rows"] = draw.choice((None, kept, kept + 7, max(0, kept - 1)))
    given["keep_logits_bytes"] = draw.choice((None, 1 << 30))
    if given["max_rows"] is not None and given["max_rows"] < kept:  # in that case no result can be differentiated
        return given
    given["max_grad_rows"] = draw.choice((None, kept, kept + 7))
    return differentiable(draw, given, "hidden", "weight", "bias")


def _meaning_of_backward(wanted: Sequence[bool], **given: Any) -> tuple[Tensor | None, ...]:
    leaves = {name: given[name] for name in ("hidden", "weight", "bias")}
    leaves = {name: None if leaf is None else leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        results = public("linear_token_logprobs")(**given | leaves)
    asked = [leaf for leaf, want in zip(leaves.values(), wanted, strict=True) if want]
    some = [(result, given[f"grad_{name}"]) for name, result in zip(NAMES, results, strict=True)]
    some = [(result, grad.double()) for result, grad in some if grad is not None]
    if not some:
        return tuple(
            torch.zeros_like(leaf) if want else None for leaf, want in zip(leaves.values(), wanted, strict=True)
        )
    found = iter(torch.autograd.grad([result for result, _ in some], asked, [grad for _, grad in some]))
    return tuple(next(found) if want else None for want in wanted)


@op(
    _meaning_of_backward,
    results={f"grad_{name}": _of_head(name) for name in ("hidden", "weight", "bias")},
    served_by="composed",
)
def linear_token_logprobs_backward(draw: Draw) -> Arguments:
    given = detached(_head(draw)) | {"max_rows": None, "kept_logits": torch.empty(0, 0)}
    wanted = draw.choice(([True, True, True], [True, False, False], [False, True, False]))
    given["wanted"] = [*wanted[:2], wanted[2] and given["bias"] is not None]
    head = (given[name] for name in ("hidden", "weight", "bias", "logit_softcap"))
    logits = tolerances.reference._head_logits(*head).float()
    return _backward(draw, given | {"logits": logits})
