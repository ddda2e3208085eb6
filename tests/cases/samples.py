"""Draws the arguments of each op, by the schema's names. No op refuses them. See :mod:`.draw`.

The table leaves out what an op does not take, so that one draw may serve several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from d3s_kernels import reference

from .draw import FLOATS, Draw
from .meaning import public_arguments, step

Arguments = dict[str, Any]
RATIOS = (0.3, 1.0, 0.1, 0.07, 1e-6, 0.999)
_COUNTS = 2048  # of each segment, by digit
_DIGITS = (((24, 8), (16, 8), (8, 8), (0, 8)), ((21, 11), (10, 11), (0, 10)))


def _differentiable(draw: Draw, arguments: Arguments, *names: str) -> Arguments:
    """Sometimes makes the named tensors require a gradient. Not with NaN or infinity: the gradient would be NaN."""
    for name in names:
        tensor = arguments.get(name)
        if tensor is not None and not (tensor.isnan() | (tensor == math.inf)).any():
            tensor.requires_grad_(draw.flag())
    return arguments


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def logprob_entropy(draw: Draw, bound: bool = True) -> Arguments:
    vocabulary = draw.length(1)
    logits = draw.logits(vocabulary)
    rows = tuple(logits.shape[:-1])
    labels = draw.optional(draw.labels(rows, vocabulary))
    given = {"logits": logits, "labels": labels, "mask": draw.mask(rows), **draw.temperature(rows)}
    given |= draw.spans(math.prod(rows), vocabulary, labels, given["mask"], bound)
    return _differentiable(draw, given, "logits")


def with_labels(draw: Draw, given: Arguments) -> Arguments:
    """Adds labels where they are missing, for the public function, which requires them."""
    if given.get("labels") is None:
        given["labels"] = draw.labels(tuple(given["logits"].shape[:-1]), given["logits"].shape[-1])
        given["include_label"] = True
    return given


def _with_statistics(draw: Draw, given: Arguments) -> Arguments:
    """Adds a forward's results, and random incoming gradients, of which one may be missing and some are 0."""
    _, *found = step("logprob_entropy")(**given)
    given |= dict(zip(("entropy", "row_max", "log_sum"), found, strict=True))
    shape, generator = given["entropy"].shape, draw.generator()
    missing = draw.choice(("neither", "logprob", "entropy"))
    for name in ("logprob", "entropy"):
        gradient = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.8)
        given[f"grad_{name}"] = None if missing == name else gradient
    return given


def logprob_entropy_backward(draw: Draw, masked: bool = True) -> Arguments:
    given = _detached(logprob_entropy(draw))
    if not masked:
        given = {name: part for name, part in given.items() if name != "mask" and not name.startswith("sampling")}
    given = _with_statistics(draw, given)
    if draw.flag():  # a shard of the vocabulary: the tokens from first_token on
        first = draw.integer(0, given["logits"].shape[-1] - 1)
        given |= {"logits": given["logits"][..., first:], "first_token": first}
    return given


def _detached(given: Arguments) -> Arguments:
    return {name: part.detach() if isinstance(part, Tensor) else part for name, part in given.items()}


def logprob_entropy_backward_in_place(draw: Draw) -> Arguments:
    return {"first_token": 0} | logprob_entropy_backward(draw, masked=False)


def _merged(rows: int, **tile: Any) -> Tensor:
    """The states (m, S, T, the label's logit) after one tile, float32 [rows, 4]."""
    if "logits" in tile:
        return step("softmax_state_")(state=_merged(rows), **tile)[0]  # type: ignore[no-any-return]
    return torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, math.nan]]).repeat(rows, 1)


def softmax_state(draw: Draw) -> Arguments:
    """A tile, and the states that other tiles of the same rows have left."""
    given = _detached(logprob_entropy(draw, bound=False))
    logits, rows = given["logits"], given["logits"].shape[:-1].numel()
    first = draw.integer(0, logits.shape[-1] - 1)
    before = {"logits": logits[..., :first], "first_token": 0, "mask": None, "max_dense_rows": None}
    given["state"] = _merged(rows, **given | before) if draw.flag() else _merged(rows)
    given |= {"logits": logits[..., first:], "first_token": first}
    tile = given["logits"].float()
    return _or_kept(draw, given, torch.cat([tile.new_zeros(*tile.shape[:-1], first), tile], -1))


def softmax_state_finish(draw: Draw) -> Arguments:
    given = with_labels(draw, _detached(logprob_entropy(draw)))
    logits, rows = given["logits"], given["logits"].shape[:-1].numel()
    if given.get("temperature_tensor") is not None and given["temperature_tensor"].dim() > 0:
        given["temperature_tensor"] = given["temperature_tensor"].reshape(-1)
    of_tiles = {name: part for name, part in given.items() if name.startswith(("temperature", "labels"))}
    pieces, first = [], 0
    for tile in logits.split(-(-logits.shape[-1] // draw.integer(1, 3)), -1):
        pieces.append(_merged(rows, logits=tile, first_token=first, **of_tiles))
        first += tile.shape[-1]
    state = torch.stack(pieces) if len(pieces) > 1 or draw.flag() else pieces[0]
    if draw.flag():
        state[..., :1, :] = _merged(1)  # a row of nothing but -inf
    return given | {"state": state}


def _head(draw: Draw, width: int, vocabulary: int, rows: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Arguments:
    """A head whose logits have a deviation of about 3, like a language model's."""
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


def head(draw: Draw) -> Arguments:
    width = draw.length(1, 16)
    vocabulary = draw.length(1, draw.room(width))
    rows = draw.rows(draw.wide(max(width, vocabulary)))
    given = _head(draw, width, vocabulary, rows, (torch.float32, torch.bfloat16)) | draw.temperature(rows)
    given["workspace_bytes"] = draw.choice((None, 4 * vocabulary, 3000, 1))
    kept = math.prod(rows) if given["mask"] is None else int(given["mask"].sum())
    given |= draw.spans(math.prod(rows), vocabulary, given["labels"], given["mask"], bound=False)
    given["max_rows"] = draw.choice((None, kept, kept + 7, max(0, kept - 1)))
    given["max_grad_rows"] = draw.choice((None, kept, kept + 7, max(0, kept // 2)))
    if given["max_rows"] is not None and given["max_rows"] < kept:  # then there is no result to differentiate
        return given
    return _differentiable(draw, given, "hidden", "weight", "bias")


def head_backward(draw: Draw) -> Arguments:
    given = {"temperature": 1.0, "temperature_tensor": None} | _detached(head(draw))
    given["max_rows"] = None  # the bound of the forward
    given["max_grad_rows"] = draw.choice((None, math.prod(given["labels"].shape)))
    wanted = draw.choice(([True, True, True], [True, False, False], [False, True, False]))
    given["wanted"] = [*wanted[:2], wanted[2] and given["bias"] is not None]
    return _with_statistics(draw, given | {"logits": _logits(given)})


def _logits(given: Arguments) -> Tensor:
    head = (given[name] for name in ("hidden", "weight", "bias", "logit_softcap"))
    return reference._head_logits(*head).float()


def _kept(draw: Draw) -> Arguments:
    """The head of a few rows with a sampling mask."""
    width = draw.length(1, 70)
    vocabulary, rows = draw.length(1, draw.room(width)), draw.length(0, 12)
    given = _head(draw, width, vocabulary, (rows,), FLOATS)
    return given | draw.spans(rows, vocabulary, given["labels"], given["mask"], optional=False)


def kept_logits(draw: Draw) -> Arguments:
    given = _kept(draw)
    first = draw.choice((0, draw.integer(0, len(given["weight"]) - 1)))
    shard = {name: given[name] if given[name] is None else given[name][first:] for name in ("weight", "bias")}
    return given | shard | {"first_token": first}


def kept_logits_backward(draw: Draw) -> Arguments:
    given = _kept(draw) | {"max_dense_rows": None}
    given = _with_statistics(draw, given | {"logits": _logits(given)} | draw.temperature((len(given["hidden"]),)))
    first = draw.choice((None, draw.integer(0, len(given["weight"]) - 1)))
    return _alone(given | {"first_token": first}, given["logits"])


def _alone(given: Arguments, logits: Tensor) -> Arguments:
    """With the logits of kept tokens alone, from first_token on, out of rows of logits. NaN for what is not read."""
    ids, rows, first = given["sampling_ids"], len(logits), given.get("first_token") or 0
    flat = torch.full((len(ids) + rows,), math.nan)
    for row, (begin, end) in enumerate(pairwise(given["sampling_offsets"].tolist())):
        places = dict(zip(ids[begin:end].tolist(), range(begin, end), strict=True))
        if places and given.get("include_label") and (label := int(given["labels"][row])) != -100:
            places.setdefault(label, len(ids) + row)
        for token, place in places.items() if len(places) > 1 else ():
            if token >= first:
                flat[place] = logits[row, token]
    return given | {"logits": flat.expand(rows, -1), "kept_of": logits.shape[1] - first}


def _or_kept(draw: Draw, given: Arguments, logits: Tensor) -> Arguments:
    if "sampling_ids" not in given or logits.dim() != 2 or draw.flag():
        return given
    return _alone(given, logits)


def logprob_entropy_or_kept(draw: Draw) -> Arguments:
    given = logprob_entropy(draw)
    return _or_kept(draw, given, given["logits"].detach().float())


def kept_gradient(draw: Draw) -> Arguments:
    """Hidden states and a weight; and places, some of which have no gradient: of all rows, and then of their labels."""
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
        "undefined": (torch.rand(counts.shape, generator=generator) < 0.2) & (counts > 0),
        "out": draw.normal(generator, draw.choice((dtype, torch.float32)), len(counts), width),
    }


def kept_weight_grad(draw: Draw) -> Arguments:
    given = kept_gradient(draw)
    generator, dtype = draw.generator(), given["out"].dtype
    given["out"] = draw.normal(generator, dtype, *given["weight"].shape)
    given["bias_out"] = draw.optional(torch.randn(len(given["weight"]), generator=generator).to(dtype))
    if draw.rarely():  # the gradient of the bias alone
        given |= {"hidden": given["hidden"][:, :0], "out": given["out"][:, :0]}
    return given


def wide_product(draw: Draw) -> Arguments:
    width = draw.length(0, 40)
    rows = draw.length(0, draw.room(width))
    columns = draw.length(0, draw.room(max(rows, width)))
    generator = draw.generator()
    hidden, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (rows, columns))
    return {"hidden": hidden, "weight": weight, "out": torch.full((rows, columns), math.nan)}


# ---- tokens ----------------------------------------------------------------------------------------------------------


def _segmented(draw: Draw, name: str, **options: Any) -> Arguments:
    """Values, their offsets, a mask, and a bound on the length of a segment."""
    shape, offsets = draw.segments()
    longest = shape[-1] if offsets is None else int(offsets.diff().max()) if len(offsets) > 1 else 0
    return {
        name: draw.values(shape, **options),
        "offsets": offsets,
        "mask": draw.mask(shape),
        "max_segment": draw.choice((None, longest, longest + 5)),
    }


def _ratio(draw: Draw) -> Arguments:
    return draw.number_or_tensor(draw.choice(RATIOS), "ratio", (torch.float64, torch.float32))


def _number(draw: Draw, name: str) -> Arguments:
    return draw.number_or_tensor(draw.length(1), name, (torch.int64, torch.int32))


def _advantages(draw: Draw, tokens: tuple[int, ...], offsets: Tensor | None) -> Tensor:
    """One for all, one for each sequence, or one for each token; float32, as the op takes them."""
    sequences = tokens[:-1] if offsets is None else (len(offsets) - 1,)
    return draw.values(draw.choice(((), sequences, tokens)), dtypes=(torch.float32,))


def _with_rule(draw: Draw, given: Arguments, rule: str) -> Arguments:
    generator = {"generator": torch.Generator().manual_seed(draw.integer(0, 2**31))} if rule == "random" else {}
    return given | {"rule": rule} | generator


def topk_mask(draw: Draw) -> Arguments:
    quota = draw.choice((_ratio(draw), _number(draw, "k")))
    return _segmented(draw, "scores") | quota | {"drop_zeros": draw.flag(), "pooled": draw.flag()}


def select_tokens(draw: Draw) -> Arguments:
    given = _segmented(draw, "entropy")
    given["advantages"] = _advantages(draw, tuple(given["entropy"].shape), given["offsets"])
    return given | _ratio(draw) | {"pooled": draw.flag(), "drop_zeros": draw.flag()}


def token_rules(draw: Draw, rule: str | None = None) -> Arguments:
    """Arguments of the public function, with any rule or this one."""
    rule = rule or draw.choice(reference.TOKEN_RULES)
    given = _with_rule(draw, public_arguments("select_tokens", select_tokens(draw)), rule)
    # A quantile pools the batch, and keeps no exact number.
    return given | ({"scope": "batch", "drop_zeros": False} if rule == "entropy_quantile" else {})


def select_tokens_from_logits(draw: Draw) -> Arguments:
    vocabulary = draw.length(1)
    offsets = draw.offsets(draw.wide(vocabulary)) if draw.flag() else None
    if offsets is None:
        logits = draw.logits(vocabulary, least_dims=1)
    else:
        logits = draw.values((int(offsets[-1]), vocabulary), special=(-math.inf,), turned=False)
    tokens = tuple(logits.shape[:-1])
    given = {"logits": logits, "offsets": offsets, "mask": draw.mask(tokens)}
    given |= draw.spans(math.prod(tokens), vocabulary, None, given["mask"]) | _ratio(draw) | draw.temperature(tokens)
    given["advantages"] = _advantages(draw, tokens, offsets)
    return given | {"pooled": draw.flag(), "drop_zeros": draw.flag()}


def compact(draw: Draw) -> Arguments:
    shape, _ = draw.segments()
    mask = torch.rand(shape, generator=draw.generator()) < draw.choice((0.5, 0.1, 0.0, 1.0))
    return {"mask": draw.laid_out(mask), "capacity": draw.length(0, 2 * draw.most)}


def topk_order_keys(draw: Draw) -> Arguments:
    given = _segmented(draw, "scores")
    advantages = _advantages(draw, tuple(given["scores"].shape), given["offsets"])
    return given | {"advantages": draw.optional(advantages)}


def topk_count_digit(draw: Draw, all_digits: bool = False) -> Arguments:
    """Keys, the search after some digits or all, the next digit, and how many keys are kept."""
    given = topk_order_keys(draw)
    quota = draw.choice((_ratio(draw), _number(draw, "k")))
    keys, offsets = step("topk_order_keys")(**given)[0].contiguous(), given["offsets"]
    if keys.dim() > 1 and keys[..., :1].numel() > draw.room(_COUNTS):
        keys = keys.flatten(0, -2)[: draw.room(_COUNTS)]
    digits = _DIGITS[0] if all_digits else draw.choice(_DIGITS)
    search = torch.zeros(keys.shape[:-1].numel() if offsets is None else len(offsets) - 1, 3, dtype=torch.int64)
    known = len(digits) - 1 if all_digits else draw.integer(0, len(digits) - 1)
    for shift, bits in digits if all_digits else digits[:known]:
        (counts,) = step("topk_count_digit")(keys=keys, search=search, shift=shift, bits=bits, offsets=offsets)
        (search,) = step("topk_choose_digit_")(search=search, counts=counts, shift=shift, **quota)
    shift, bits = digits[known]
    return {"keys": keys, "search": search, "offsets": offsets, "shift": shift, "bits": bits, **quota}


def topk_choose_digit(draw: Draw) -> Arguments:
    given = topk_count_digit(draw)
    return given | {"counts": step("topk_count_digit")(**given)[0]}


def topk_mask_from_key(draw: Draw) -> Arguments:
    """A finished search, and any number of ties that a rank keeps, including none and too many."""
    given = topk_count_digit(draw, all_digits=True)
    return given | {"ties": given["search"][:, 1] + draw.integer(-2, 2), "drop_zeros": draw.flag()}


# ---- rollouts --------------------------------------------------------------------------------------------------------


def group_advantages(draw: Draw) -> Arguments:
    """Rewards and their offsets. Sometimes all finite rewards are equal except for rounding: 1, or the next number
    below it.
    """
    given = _segmented(draw, "rewards", dtypes=(*FLOATS, torch.float64))
    rewards = given["rewards"]
    if draw.integer(0, 2) == 2:
        below = 1 - torch.finfo(rewards.dtype).eps / 2  # the largest number below 1
        given["rewards"] = torch.where(rewards > 0, 1.0, below).to(rewards.dtype).where(rewards.isfinite(), rewards)
    return given | {
        "scale": draw.choice(("group", "batch", "none")),
        "eps": draw.choice((1e-4, 1e-6, 0.0)),
        "ddof": draw.choice((1, 0)),
        "tolerance": draw.choice((None, 0.0, 0.3)),  # of groups_without_spread
    }


def whole_rewards(draw: Draw, given: Arguments) -> Arguments:
    """Sometimes makes the rewards flags or integers."""
    dtype = draw.choice((None, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64))
    if dtype is not None:
        given["rewards"] = given["rewards"].nan_to_num(posinf=3, neginf=-3).abs().to(dtype)
    return given


def max_variance_select(draw: Draw) -> Arguments:
    return _segmented(draw, "values") | _number(draw, "keep") | {"pooled": draw.flag()}


def rollout_rules(draw: Draw, rule: str | None = None) -> Arguments:
    """Arguments of the public function, with any rule or this one."""
    given = max_variance_select(draw)
    given = public_arguments("select_rollouts", given | {"advantages": given["values"]})
    return _with_rule(draw, given, rule or draw.choice(reference.ROLLOUT_RULES))


# ---- ratios ----------------------------------------------------------------------------------------------------------


def _groups(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """int8 from -2 to 15; a number below 0 means no group."""
    ids = torch.randint(-2, draw.integer(1, 16), shape, generator=draw.generator(), dtype=torch.int8)
    return draw.laid_out(ids)


def importance_ratio(draw: Draw) -> Arguments:
    """Log-probabilities of a policy that has moved, mostly by little."""
    shape, offsets = draw.segments()
    generator, level = draw.generator(), draw.choice(("token", "sequence", "entropy_group"))
    old = -20 * torch.rand(shape, generator=generator)
    moves = torch.tensor([0.0, 1e-3, 0.1, 1.0])[torch.randint(4, shape, generator=generator)]
    low, high = draw.choice(((-20.0, 20.0), (-math.inf, 10.0), (-0.5, 0.25), (-math.inf, math.inf)))
    given = {
        "logprob": draw.laid_out(old + moves * torch.randn(shape, generator=generator)),
        "old_logprob": draw.laid_out(old),
        "mask": draw.mask(shape),
        "groups": _groups(draw, shape) if level == "entropy_group" else None,
        "offsets": offsets,
        "level": level,
        "denominator": draw.choice(("self", "old")),
        "low": low,
        "high": high,
    }
    return _differentiable(draw, given, "logprob")


def importance_ratio_backward(draw: Draw) -> Arguments:
    given = importance_ratio(draw)
    far = draw.choice((0.0, 100.0))  # where a ratio is infinite
    return given | {
        "grad_ratio": draw.values(tuple(given["logprob"].shape), dtypes=(torch.float32,), special=()),
        "ratio": (given["logprob"].detach() - given["old_logprob"] + far).exp(),
    }


def entropy_groups(draw: Draw) -> Arguments:
    given = _segmented(draw, "entropy", dtypes=(torch.float32,))
    quantiles = draw.choice(([0.8], [0.2, 0.5], [0.3, 0.5, 0.7, 0.8, 0.9], []))
    return given | {"quantiles": quantiles, "pooled": draw.flag()}


def adaptive_clip(draw: Draw) -> Arguments:
    shape, offsets = draw.segments()
    return {
        "entropy": draw.laid_out(5 * torch.rand(shape, generator=draw.generator())),
        "groups": _groups(draw, shape),
        "mask": draw.mask(shape),
        "offsets": offsets,
        "vocab_size": draw.choice((1000, 2, 151_936)),
        "alpha": draw.choice((0.02, 0.5)),
    }
