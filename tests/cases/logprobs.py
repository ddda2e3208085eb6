"""The ops on logits: log-probability and entropy, their gradients, and the steps that compute both tile by tile."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from d3s_kernels.check import tolerances

from .draw import FLOATS, Draw
from .meaning import public, public_arguments, step, with_incoming
from .row import Arguments, detached, differentiable, op

STATISTICS = {
    "logprob": tolerances.logprob,
    "entropy": tolerances.entropy,
    "row_max": lambda exact, _: torch.zeros(exact.shape).masked_fill(exact.isnan(), math.inf),  # NaN: any value passes
    "log_sum": tolerances.logprob,
}


def gradient_of_logits(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    return tolerances.gradient_of_logits(exact, with_incoming("logprob_entropy", arguments))


def states(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """Of states (m, S, T, the label's logit): m and the label's logit are copies of logits, so they must be exact."""
    total, dot = exact[..., 1].abs(), exact[..., 2].abs()
    most = total.nan_to_num() + dot.nan_to_num()
    unknown = torch.zeros_like(most).masked_fill(exact[..., 2].isnan(), math.inf)  # rows with NaN or infinity
    return torch.stack([unknown, 3e-6 * (1 + most) + unknown, 3e-6 * (1 + most), torch.zeros_like(most)], -1)


def rows_of_logits(draw: Draw, bound: bool = True, optional: bool = True) -> Arguments:
    """The arguments of the public function; those of a sampling mask only sometimes, if it is ``optional``."""
    vocabulary = draw.length(1)
    logits = draw.logits(vocabulary)
    rows = tuple(logits.shape[:-1])
    labels = draw.optional(draw.labels(rows, vocabulary))
    given = {"logits": logits, "labels": labels, "mask": draw.mask(rows), **draw.temperature(rows)}
    given |= draw.spans(math.prod(rows), vocabulary, labels, given["mask"], bound, optional)
    return differentiable(draw, given, "logits")


def without_supports(given: Arguments) -> Arguments:
    return {name: part for name, part in given.items() if not name.startswith("support_")}


def with_labels(draw: Draw, given: Arguments) -> Arguments:
    """Adds labels if there are none, because the public function requires labels."""
    if given.get("labels") is None:
        given["labels"] = draw.labels(tuple(given["logits"].shape[:-1]), given["logits"].shape[-1])
        given["include_label"] = True
    return given


def any_logits(draw: Draw, *special: float) -> Arguments:
    """The arguments of the public function without a sampling mask, with some special values among the logits, and a
    temperature that may have a shape which only broadcasts to the rows.
    """
    given = public_arguments("logprob_entropy", with_labels(draw, detached(rows_of_logits(draw))))
    given = {name: given.get(name) for name in ("logits", "labels", "mask", "temperature")}
    logits = given["logits"] = given["logits"].contiguous().clone()
    for _ in range(draw.integer(0, 12) if logits.numel() else 0):
        logits.view(-1)[draw.integer(0, logits.numel() - 1)] = draw.choice(special)
    heat = given["temperature"]
    if isinstance(heat, Tensor) and heat.dim() == 2:
        given["temperature"] = draw.choice((heat, heat[:, :1], heat[:1], heat.double()))
    return given


def statistics(given: Arguments, wide: bool = False) -> tuple[Tensor, ...]:
    """The results of each row, over its support, in plain PyTorch: of the dense rows, and of the others among them."""
    if given.get("support_ids") is None:
        found: tuple[Tensor, ...] = step("logprob_entropy", wide)(**without_supports(given))
        return found
    dense, exceeded = step("support_rows")(**given, values=given["logits"])
    results = step("logprob_entropy", wide)(**given | {"mask": dense})
    bound = given.get("max_dense_rows") is not None
    written = dict(zip(STATISTICS, results, strict=True)) | {"exceeded": exceeded if bound else None}
    return *step("support_logprob_entropy_", wide)(**given | written), dense


def with_statistics(draw: Draw, given: Arguments) -> Arguments:
    """Adds a forward's results, and random incoming gradients; one of the two may be None, and some values are 0."""
    _, *found = statistics(given)
    given |= dict(zip(("entropy", "row_max", "log_sum", "dense"), found, strict=False))
    shape, generator = given["entropy"].shape, draw.generator()
    missing = draw.choice(("neither", "logprob", "entropy"))
    for name in ("logprob", "entropy"):
        gradient = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.8)
        given[f"grad_{name}"] = None if missing == name else gradient
    return given


def listed(given: Arguments, logits: Tensor) -> Arguments:
    """With a list of the logits of the supports, from ``first_token`` on; what is not read in it is NaN."""
    ids, rows, first = given["support_ids"], len(logits), given.get("first_token") or 0
    flat = torch.full((len(ids) + rows,), math.nan)
    for row, (begin, end) in enumerate(pairwise(given["support_offsets"].tolist())):
        places = dict(zip(ids[begin:end].tolist(), range(begin, end), strict=True))
        if places and given.get("include_label") and (label := int(given["labels"][row])) != -100:
            places.setdefault(label, len(ids) + row)
        for token, place in places.items() if len(places) > 1 else ():
            if token >= first:
                flat[place] = logits[row, token]
    return given | {"logits": flat.expand(rows, -1), "support_of": logits.shape[1] - first}


def _or_listed(draw: Draw, given: Arguments, logits: Tensor) -> Arguments:
    if logits.dim() != 2 or draw.flag():
        return given
    return listed(given, logits)


def merged(rows: int, **tile: Any) -> Tensor:
    """The states (m, S, T, the label's logit) after one tile, or before the first one; float32 ``[rows, 4]``."""
    if "logits" in tile:
        return step("softmax_state_")(state=merged(rows), **tile)[0]
    return torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, math.nan]]).repeat(rows, 1)


def _known(logprob: Tensor, entropy: Tensor, top: Tensor, log_sum: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The maximum of a row with NaN or infinity becomes NaN, because any maximum is right for such a row."""
    return logprob, entropy, top.masked_fill(log_sum.isnan(), torch.nan), log_sum, *rest


def _values(**given: Any) -> tuple[Any, ...]:
    """The results of the public function."""
    if given.get("labels") is None:
        given["labels"] = torch.full(given["logits"].shape[:-1], -100)
    results: tuple[Any, ...] = public("logprob_entropy")(**given)
    return results


def _meaning(**given: Any) -> tuple[Any, ...]:
    """The results of the public function, and the others in plain PyTorch."""
    _, _, *rest = _known(*statistics(given, wide=True))
    return *_values(**given), *rest


@op(_meaning, results=STATISTICS, gradients={"logits": gradient_of_logits})
def logprob_entropy(draw: Draw) -> Arguments:
    return rows_of_logits(draw)


@op(_values, results={name: STATISTICS[name] for name in ("logprob", "entropy")})
def logprob_entropy_no_grad(draw: Draw) -> Arguments:
    return detached(rows_of_logits(draw))


@op(_meaning, "dense", results=STATISTICS, gradients={"logits": gradient_of_logits}, served_by="composed")
def support_logprob_entropy(draw: Draw) -> Arguments:
    return rows_of_logits(draw, optional=False)


@op(step("support_rows"), "dense", "exceeded")
def support_rows(draw: Draw) -> Arguments:
    given = rows_of_logits(draw, optional=False)
    return given | {"values": given["logits"].detach()}


def _exceeded(draw: Draw) -> Arguments:
    return {"exceeded": draw.choice((None, torch.tensor([False]), torch.tensor([True])))}


@op(lambda **given: _known(*step("support_logprob_entropy_", wide=True)(**given)), results=STATISTICS)
def support_logprob_entropy_(draw: Draw) -> Arguments:
    """The results of other ops, of which those of the dense rows stay."""
    given = detached(rows_of_logits(draw, optional=False)) | _exceeded(draw)
    generator = draw.generator()
    given |= {name: torch.randn(given["logits"].shape[:-1], generator=generator) for name in STATISTICS}
    return _or_listed(draw, given, given["logits"].float())


def _of_backward(draw: Draw, given: Arguments) -> Arguments:
    given = with_statistics(draw, detached(given))
    if draw.flag():  # a shard of the vocabulary: the tokens from first_token on
        first = draw.integer(0, given["logits"].shape[-1] - 1)
        given |= {"logits": given["logits"][..., first:], "first_token": first}
    return given


@op(step("logprob_entropy_backward", wide=True), results={"grad": gradient_of_logits})
def logprob_entropy_backward(draw: Draw) -> Arguments:
    return _of_backward(draw, without_supports(rows_of_logits(draw)))


@op(step("logprob_entropy_backward_", wide=True), results={"grad": gradient_of_logits})
def logprob_entropy_backward_(draw: Draw) -> Arguments:
    given = without_supports(rows_of_logits(draw)) | {"mask": None}
    return {"first_token": draw.choice((None, 0))} | _of_backward(draw, given)


def gradient_of_packed(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """The gradient may be in a narrower dtype than the logits."""
    return gradient_of_logits(exact, {**arguments, "logits": arguments["grad_logits"]})


@op(step("logprob_entropy_backward_rows_", wide=True), results={"grad_logits": gradient_of_packed})
def logprob_entropy_backward_rows_(draw: Draw) -> Arguments:
    """Some of the kept logits, in any order; some come twice. What was in the gradient before does not matter."""
    given = detached(without_supports(rows_of_logits(draw))) | {"mask": None}
    kept = given["logits"].reshape(-1, given["logits"].shape[-1])
    rows = torch.randint(max(1, len(kept)), (draw.integer(0, len(kept)),), generator=draw.generator())
    for name in ("labels", "temperature_tensor"):
        if (values := given.get(name)) is not None and (name == "labels" or values.dim() > 0):
            given[name] = values.flatten()[rows]
    given = _of_backward(draw, given | {"logits": kept[rows]})
    dtypes = FLOATS if kept.dtype == torch.float32 else (kept.dtype,)
    gradient = draw.normal(draw.generator(), draw.choice(dtypes), *given["logits"].shape)
    return given | {"logits": kept[:, given.get("first_token") or 0 :], "rows": rows, "grad_logits": gradient}


def _gradient_over_supports(**given: Any) -> Tensor:
    gradient = step("logprob_entropy_backward", wide=True)(**given | {"mask": given["dense"]})[0]
    written: Tensor = step("support_logprob_entropy_backward_", wide=True)(**given, grad_logits=gradient)[0]
    return written


@op(_gradient_over_supports, results={"grad_logits": gradient_of_logits}, served_by="composed")
def support_logprob_entropy_backward(draw: Draw) -> Arguments:
    return _of_backward(draw, rows_of_logits(draw, optional=False))


@op(step("support_logprob_entropy_backward_", wide=True), results={"grad_logits": gradient_of_logits})
def support_logprob_entropy_backward_(draw: Draw) -> Arguments:
    """A gradient that is 0 in the rows with a support; what other rows have stays."""
    given = _of_backward(draw, rows_of_logits(draw, optional=False))
    shape, dtype = given["logits"].shape, given["logits"].dtype
    empty = (given["support_offsets"].diff() == 0).view(*shape[:-1], 1)
    gradient = torch.randn(shape, generator=draw.generator()).to(dtype)
    return given | {"grad_logits": torch.where(empty, gradient, gradient.new_zeros(()))}


def as_tile(draw: Draw, given: Arguments) -> Arguments:
    """Draws a tile, and the states of its rows after the tiles before it."""
    logits, rows = given["logits"], given["logits"].shape[:-1].numel()
    first = draw.integer(0, logits.shape[-1] - 1)
    before = {"logits": logits[..., :first], "first_token": 0, "mask": None}
    given["state"] = merged(rows, **given | before) if draw.flag() else merged(rows)
    return given | {"logits": logits[..., first:], "first_token": first or draw.choice((None, 0))}


@op(step("softmax_state_", wide=True), results={"state": states})
def softmax_state_(draw: Draw) -> Arguments:
    return as_tile(draw, detached(without_supports(rows_of_logits(draw))))


@op(step("support_softmax_state_", wide=True), results={"state": states})
def support_softmax_state_(draw: Draw) -> Arguments:
    given = as_tile(draw, detached(rows_of_logits(draw, optional=False))) | _exceeded(draw)
    tile, first = given["logits"].float(), given["first_token"] or 0
    return _or_listed(draw, given, torch.cat([tile.new_zeros(*tile.shape[:-1], first), tile], -1))


@op(lambda **given: _known(*step("softmax_state_finish", wide=True)(**given)), results=STATISTICS)
def softmax_state_finish(draw: Draw) -> Arguments:
    given = with_labels(draw, detached(rows_of_logits(draw)))
    logits, rows = given["logits"], given["logits"].shape[:-1].numel()
    if given.get("temperature_tensor") is not None and given["temperature_tensor"].dim() > 0:
        given["temperature_tensor"] = given["temperature_tensor"].reshape(-1)
    of_tiles = {name: part for name, part in given.items() if name.startswith(("temperature", "labels"))}
    pieces, first = [], 0
    for tile in logits.split(-(-logits.shape[-1] // draw.integer(1, 3)), -1):
        pieces.append(merged(rows, logits=tile, first_token=first, **of_tiles))
        first += tile.shape[-1]
    state = torch.stack(pieces) if len(pieces) > 1 or draw.flag() else pieces[0]
    if draw.flag():
        state[..., :1, :] = merged(1)  # the state of a row in which all logits are -inf
    return given | {"state": state}
