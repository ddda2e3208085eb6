"""Draws the arguments of each op, by the schema's names. No op refuses them. See :mod:`.draw`."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from d3s_kernels import _torch, reference

from .draw import FLOATS, Draw
from .meaning import step

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
    """Adds labels where they are missing, for calls that require them."""
    logits, rows = given["logits"], tuple(given["logits"].shape[:-1])
    if given.get("labels") is None:
        given["labels"] = draw.labels(rows, logits.shape[-1])
        if "sampling_mask" in given:  # of a public function
            given["label_outside"] = "include"
        if "sampling_ids" in given:
            given["include_label"] = True
    return given


def _with_statistics(draw: Draw, given: Arguments) -> Arguments:
    """Adds a forward's results, and random incoming gradients, of which one may be missing and some are 0."""
    _, *found = step("logprob_entropy")(**given)
    given |= dict(zip(("entropy", "row_max", "log_sum"), found, strict=True))
    rows = given["entropy"].shape
    generator = draw.generator()
    missing = draw.choice(("neither", "logprob", "entropy"))
    for name in ("logprob", "entropy"):
        gradient = torch.randn(rows, generator=generator) * (torch.rand(rows, generator=generator) < 0.8)
        given[f"grad_{name}"] = None if missing == name else gradient
    return given


def logprob_entropy_backward(draw: Draw, masked: bool = True) -> Arguments:
    given = _detached(logprob_entropy(draw))
    if not masked:
        for name in ("mask", "sampling_ids", "sampling_offsets", "include_label", "max_dense_rows"):
            given.pop(name, None)
    given = _with_statistics(draw, given)
    if draw.flag():  # a shard of the vocabulary: the tokens from first_token on
        first = draw.integer(0, given["logits"].shape[-1] - 1)
        given |= {"logits": given["logits"][..., first:], "first_token": first}
    return given


def _detached(given: Arguments) -> Arguments:
    return {name: part.detach() if isinstance(part, Tensor) else part for name, part in given.items()}


def logprob_entropy_backward_in_place(draw: Draw) -> Arguments:
    given = logprob_entropy_backward(draw, masked=False)
    given.setdefault("first_token", 0)
    return given


def no_logits(rows: int) -> Tensor:
    """The initial states (m, S, T, the label's logit), float32 [rows, 4]."""
    return torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0, math.nan]]).repeat(rows, 1)


def _merged(state: Tensor, **tile: Any) -> Tensor:
    (after,) = step("softmax_state_")(state=state, **tile)
    return after  # type: ignore[no-any-return]


def softmax_state(draw: Draw) -> Arguments:
    """A tile, and the states that other tiles of the same rows have left."""
    given = _detached(logprob_entropy(draw, bound=False))
    logits = given["logits"]
    vocabulary, rows = logits.shape[-1], logits.shape[:-1].numel()
    first = draw.integer(0, vocabulary - 1)
    state = no_logits(rows)
    if draw.flag():
        before = {"logits": logits[..., :first], "first_token": 0, "mask": None, "max_dense_rows": None}
        state = _merged(state, **given | before)
    return given | {"state": state, "logits": logits[..., first:], "first_token": first}


def softmax_state_finish(draw: Draw) -> Arguments:
    given = _detached(logprob_entropy(draw))
    logits, labels = given["logits"], given["labels"]
    rows = logits.shape[:-1].numel()
    temperature: Arguments = {name: given[name] for name in ("temperature", "temperature_tensor") if name in given}
    if "temperature_tensor" in temperature and temperature["temperature_tensor"].dim() > 0:
        temperature["temperature_tensor"] = temperature["temperature_tensor"].reshape(-1)
    pieces, first = [], 0
    for tile in logits.split(-(-logits.shape[-1] // draw.integer(1, 3)), -1):
        pieces.append(_merged(no_logits(rows), logits=tile, labels=labels, first_token=first, **temperature))
        first += tile.shape[-1]
    state = torch.stack(pieces) if len(pieces) > 1 or draw.flag() else pieces[0]
    return {"state": state, **temperature}


def head(draw: Draw) -> Arguments:
    """A head whose logits have a deviation of about 3, like a language model's."""
    width = draw.length(1, 16)
    vocabulary = draw.length(1, draw.room(width))
    rows = draw.rows(draw.wide(max(width, vocabulary)))
    dtype, generator = draw.choice((torch.float32, torch.bfloat16)), draw.generator()

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return draw.laid_out((torch.randn(shape, generator=generator) * deviation).to(dtype), turned=False)

    given: Arguments = {
        "hidden": normal(*rows, width),
        "weight": normal(vocabulary, width, deviation=3 / math.sqrt(width)),
        "labels": draw.labels(rows, vocabulary),
        "bias": draw.optional(normal(vocabulary)),
        "mask": draw.mask(rows),
        "logit_softcap": draw.choice((None, 30.0, 2.0)),
        "logits_dtype": draw.choice((torch.float32, dtype)),
        "workspace_bytes": draw.choice((None, 4 * vocabulary, 3000, 1)),
        **draw.temperature(rows),
    }
    kept = math.prod(rows) if given["mask"] is None else int(given["mask"].sum())
    given |= draw.spans(math.prod(rows), vocabulary, given["labels"], given["mask"], bound=False)
    given["max_rows"] = draw.choice((None, kept, kept + 7, max(0, kept - 1)))
    given["max_grad_rows"] = draw.choice((None, kept, kept + 7, max(0, kept // 2)))
    if given["max_rows"] is not None and given["max_rows"] < kept:  # then there is no result to differentiate
        return given
    return _differentiable(draw, given, "hidden", "weight", "bias")


def head_backward(draw: Draw) -> Arguments:
    given = _detached(head(draw))
    given["max_grad_rows"] = draw.choice((None, math.prod(given["labels"].shape)))
    given.setdefault("temperature_tensor", None)
    given.setdefault("temperature", 1.0)
    given.pop("max_rows")
    wanted = draw.choice(([True, True, True], [True, False, False], [False, True, False]))
    given["wanted"] = [*wanted[:2], wanted[2] and given["bias"] is not None]
    logits = reference._head_logits(given["hidden"], given["weight"], given["bias"], given["logit_softcap"]).float()
    return _without(_with_statistics(draw, given | {"logits": logits}), "logits")


def _kept(draw: Draw) -> Arguments:
    """The head of a few rows with a sampling mask."""
    width = draw.length(1, 70)
    vocabulary, rows = draw.length(1, draw.room(width)), draw.length(0, 12)
    generator, dtype = draw.generator(), draw.choice(FLOATS)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return draw.laid_out((torch.randn(shape, generator=generator) * deviation).to(dtype), turned=False)

    labels, mask = draw.labels((rows,), vocabulary), draw.mask((rows,))
    spans = draw.spans(rows, vocabulary, labels, mask, optional=False)
    del spans["max_dense_rows"]
    return {
        "hidden": normal(rows, width),
        "weight": normal(vocabulary, width, deviation=3 / math.sqrt(width)),
        "labels": labels,
        "bias": draw.optional(normal(vocabulary)),
        "mask": mask,
        "logit_softcap": draw.choice((None, 30.0, 2.0)),
        **spans,
    }


def kept_logits(draw: Draw) -> Arguments:
    given = _kept(draw)
    first = draw.choice((0, draw.integer(0, len(given["weight"]) - 1)))
    given |= {"weight": given["weight"][first:], "bias": None if given["bias"] is None else given["bias"][first:]}
    return given | {"first_token": first, "logits_dtype": draw.choice((torch.float32, given["hidden"].dtype))}


def _alone(given: Arguments, logits: Tensor, first: int) -> Arguments:
    """The logits of kept tokens alone, from first on, out of rows of logits. NaN for what is not read."""
    ids, rows = given["sampling_ids"], len(logits)
    flat = torch.full((len(ids) + rows,), math.nan)
    for row, (begin, end) in enumerate(pairwise(given["sampling_offsets"].tolist())):
        places = dict(zip(ids[begin:end].tolist(), range(begin, end), strict=True))
        if places and given.get("include_label") and (label := int(given["labels"][row])) != -100:
            places.setdefault(label, len(ids) + row)
        for token, place in places.items() if len(places) > 1 else ():
            if token >= first:
                flat[place] = logits[row, token]
    return {"logits": flat.expand(rows, -1), "kept_of": logits.shape[1] - first}


def logprob_entropy_or_kept(draw: Draw) -> Arguments:
    given = logprob_entropy(draw)
    if "sampling_ids" not in given or given["logits"].dim() != 2 or draw.flag():
        return given
    return given | _alone(given, given["logits"].detach().float(), 0)


def softmax_state_or_kept(draw: Draw) -> Arguments:
    given = softmax_state(draw)
    if "sampling_ids" not in given or given["logits"].dim() != 2 or draw.flag():
        return given
    first, tile = given["first_token"], given["logits"].float()
    return given | _alone(given, torch.cat([tile.new_zeros(len(tile), first), tile], 1), first)


def kept_logits_backward(draw: Draw) -> Arguments:
    given = _kept(draw)
    cap, rows, vocabulary = given["logit_softcap"], len(given["hidden"]), len(given["weight"])
    logits = 3 * torch.randn(rows, vocabulary, generator=draw.generator())
    given["logits"] = logits if cap is None else (logits / cap).tanh() * cap
    given = _with_statistics(draw, given | draw.temperature((rows,)))
    given = _without(given, "hidden", "weight", "bias")
    first = draw.choice((None, draw.integer(0, vocabulary - 1)))
    return given | _alone(given, given["logits"], first or 0) | {"first_token": first}


def _kept_gradient(draw: Draw) -> Arguments:
    """Hidden states and a weight; and places, some of which have no gradient: of all rows, and then of their labels."""
    width = draw.length(1)
    vocabulary = draw.length(1, draw.room(width))
    counts = torch.tensor([draw.length(0, 9) for _ in range(draw.length(1, 12))])
    generator, dtype = draw.generator(), draw.choice(FLOATS)
    every = torch.arange(len(counts))
    rows = torch.cat([every.repeat_interleave(counts), torch.where(counts > 0, every, -1)])
    none = torch.rand(rows.shape, generator=generator) < draw.choice((0.0, 0.2, 1.0))
    few = min(vocabulary, draw.choice((vocabulary, 3)))

    def normal(*shape: int) -> Tensor:
        return draw.laid_out(torch.randn(shape, generator=generator).to(dtype), turned=False)

    return {
        "hidden": normal(len(counts), width),
        "weight": normal(vocabulary, width),
        "rows": rows.masked_fill(none, -1).int(),
        "tokens": torch.randint(few, rows.shape, generator=generator).int(),
        "offsets": torch.tensor([0, *accumulate(counts.tolist())], dtype=draw.choice((torch.int64, torch.int32))),
        "grad": torch.randn(rows.shape, generator=generator),
        "undefined": (torch.rand(counts.shape, generator=generator) < 0.2) & (counts > 0),
        "out_dtype": draw.choice((dtype, torch.float32)),
    }


def _some(given: Arguments, *names: str) -> Arguments:
    return {name: given[name] for name in names}


def _without(given: Arguments, *names: str) -> Arguments:
    return {name: part for name, part in given.items() if name not in names}


def _written(draw: Draw, given: Arguments, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=draw.generator())
    return draw.laid_out(values.to(given["out_dtype"]), turned=False)


def kept_hidden_grad(draw: Draw) -> Arguments:
    given = _kept_gradient(draw)
    given["out"] = _written(draw, given, len(given["hidden"]), given["weight"].shape[1])
    return _some(given, "grad", "weight", "rows", "tokens", "offsets", "undefined", "out")


def kept_weight_grad(draw: Draw) -> Arguments:
    given = _kept_gradient(draw)
    given["out"] = _written(draw, given, *given["weight"].shape)
    given["bias_out"] = draw.optional(
        torch.randn(len(given["weight"]), generator=draw.generator()).to(given["out_dtype"])
    )
    if draw.rarely():  # the gradient of the bias alone
        given |= {"hidden": given["hidden"][:, :0], "out": given["out"][:, :0]}
    return _some(given, "grad", "hidden", "rows", "tokens", "out", "bias_out")


def wide_product(draw: Draw) -> Arguments:
    width = draw.length(0, 40)
    rows = draw.length(0, draw.room(width))
    columns = draw.length(0, draw.room(max(rows, width)))
    generator = draw.generator()
    hidden, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (rows, columns))
    return {"hidden": hidden, "weight": weight, "out": torch.full((rows, columns), math.nan)}


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _segmented(draw: Draw, name: str, **options: Any) -> Arguments:
    """Values, their offsets, a mask, and a bound on the length of a segment."""
    shape, offsets = draw.segments(least_dims=0 if name != "logprob" else 1)
    longest = shape[-1] if offsets is None else int(offsets.diff().max()) if len(offsets) > 1 else 0
    return {
        name: draw.values(shape, **options),
        "offsets": offsets,
        "mask": draw.mask(shape),
        "max_segment": draw.choice((None, longest, longest + 5)),
    }


def _ratio(draw: Draw) -> Arguments:
    return draw.number_or_tensor(draw.choice(RATIOS), "ratio", (torch.float64, torch.float32))


def topk_mask(draw: Draw) -> Arguments:
    given = _segmented(draw, "scores")
    by_number = draw.number_or_tensor(draw.length(1), "k", (torch.int64, torch.int32))
    quota = draw.choice((_ratio(draw), by_number))
    return given | quota | {"drop_zeros": draw.flag(), "pooled": draw.flag()}


def _advantages(draw: Draw, tokens: tuple[int, ...], offsets: Tensor | None) -> Tensor:
    """One for all, one for each sequence, or one for each token; float32, as the op takes them."""
    sequences = tokens[:-1] if offsets is None else (len(offsets) - 1,)
    return draw.values(draw.choice(((), sequences, tokens)), dtypes=(torch.float32,))


def select_tokens(draw: Draw) -> Arguments:
    given = _segmented(draw, "entropy")
    given["advantages"] = _advantages(draw, tuple(given["entropy"].shape), given["offsets"])
    return given | _ratio(draw) | {"pooled": draw.flag(), "drop_zeros": draw.flag()}


def token_rules(draw: Draw, rule: str | None = None) -> Arguments:
    """Arguments of the public function, with any rule or this one, and with those that only some rules take."""
    rule = rule or draw.choice(reference.TOKEN_RULES)
    given = select_tokens(draw)
    ratio = given.pop("ratio_tensor", None)
    given |= {"rule": rule, "scope": "batch" if given.pop("pooled") else "sequence"}
    given["ratio"] = ratio if ratio is not None else given["ratio"]
    if rule == "entropy_quantile":  # pools the batch, and keeps no exact number
        given |= {"scope": "batch", "drop_zeros": False}
    if rule == "random":
        given["generator"] = torch.Generator().manual_seed(draw.integer(0, 2**31))
    return given


def select_tokens_from_logits(draw: Draw) -> Arguments:
    vocabulary = draw.length(1)
    if draw.flag():
        offsets: Tensor | None = draw.offsets(draw.wide(vocabulary))
        assert offsets is not None
        logits = draw.values((int(offsets[-1]), vocabulary), special=(-math.inf,), turned=False)
    else:
        offsets, logits = None, draw.logits(vocabulary, least_dims=1)
    tokens = tuple(logits.shape[:-1])
    mask = draw.mask(tokens)
    return {
        "logits": logits,
        "advantages": _advantages(draw, tokens, offsets),
        "offsets": offsets,
        "mask": mask,
        **draw.spans(math.prod(tokens), vocabulary, None, mask),
        "pooled": draw.flag(),
        "drop_zeros": draw.flag(),
        **_ratio(draw),
        **draw.temperature(tokens),
    }


def compact(draw: Draw) -> Arguments:
    shape, _ = draw.segments()
    share = draw.choice((0.5, 0.1, 0.0, 1.0))
    mask = torch.rand(shape, generator=draw.generator()) < share
    return {"mask": draw.laid_out(mask), "capacity": draw.length(0, 2 * draw.most)}


def topk_order_keys(draw: Draw) -> Arguments:
    given = _segmented(draw, "scores")
    given.pop("max_segment")
    advantages = _advantages(draw, tuple(given["scores"].shape), given["offsets"])
    return given | {"advantages": draw.optional(advantages)}


def _keys(draw: Draw, all_digits: bool = False) -> tuple[Arguments, Arguments, Arguments]:
    """Keys with their offsets and the search after some digits, the next digit, and how many keys are kept."""
    given = topk_order_keys(draw)
    quota = draw.choice((_ratio(draw), draw.number_or_tensor(draw.length(1), "k", (torch.int64, torch.int32))))
    keys, offsets = _torch.KERNELS["topk_order_keys"](**given).contiguous(), given["offsets"]
    if keys.dim() > 1 and keys[..., :1].numel() > draw.room(_COUNTS):
        keys = keys.flatten(0, -2)[: draw.room(_COUNTS)]
    digits = _DIGITS[0] if all_digits else draw.choice(_DIGITS)
    known = len(digits) if all_digits else draw.integer(0, len(digits) - 1)
    search = torch.zeros(keys.shape[:-1].numel() if offsets is None else len(offsets) - 1, 3, dtype=torch.int64)
    for shift, bits in digits[:known]:
        counts = _torch.KERNELS["topk_count_digit"](keys, search, shift, bits, offsets)
        _torch.KERNELS["topk_choose_digit_"](search, counts, shift, **quota)
    digit = {} if all_digits else dict(zip(("shift", "bits"), digits[known], strict=True))
    return {"keys": keys, "search": search, "offsets": offsets}, digit, quota


def topk_count_digit(draw: Draw) -> Arguments:
    given, digit, _ = _keys(draw)
    return given | digit


def topk_choose_digit(draw: Draw) -> Arguments:
    given, digit, quota = _keys(draw)
    counts = _torch.KERNELS["topk_count_digit"](**given, **digit)
    return {"search": given["search"], "counts": counts, "shift": digit["shift"], **quota}


def topk_mask_from_key(draw: Draw) -> Arguments:
    """A finished search, and any number of ties that a rank keeps, including none and too many."""
    given, _, _ = _keys(draw, all_digits=True)
    return given | {"ties": given["search"][:, 1] + draw.integer(-2, 2), "drop_zeros": draw.flag()}


# ---- rollouts -------------------------------------------------------------------------------------------------------


def _rewards(draw: Draw) -> Arguments:
    """Rewards and their offsets. Sometimes the finite ones are 1 up to rounding."""
    given = _segmented(draw, "rewards", dtypes=(*FLOATS, torch.float64))
    rewards = given["rewards"]
    if draw.rarely():
        below = 1 - torch.finfo(rewards.dtype).eps / 2  # the largest number below 1
        rewards = torch.where(rewards.isfinite(), torch.where(rewards > 0, 1.0, below).to(rewards.dtype), rewards)
    return {"rewards": rewards, "offsets": given["offsets"]}


def whole_rewards(draw: Draw, given: Arguments) -> Arguments:
    """Sometimes makes the rewards flags or integers."""
    dtype = draw.choice((None, torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64))
    if dtype is not None:
        given["rewards"] = given["rewards"].nan_to_num(posinf=3, neginf=-3).abs().to(dtype)
    return given


def group_advantages(draw: Draw) -> Arguments:
    return _rewards(draw) | {
        "scale": draw.choice(("group", "batch", "none")),
        "eps": draw.choice((1e-4, 1e-6, 0.0)),
        "ddof": draw.choice((1, 0)),
    }


def groups_without_spread(draw: Draw) -> Arguments:
    return whole_rewards(draw, _rewards(draw)) | {"tolerance": draw.choice((None, 0.0, 0.3))}


def max_variance_select(draw: Draw) -> Arguments:
    given = _segmented(draw, "values")
    return given | draw.number_or_tensor(draw.length(1), "keep", (torch.int64, torch.int32)) | {"pooled": draw.flag()}


def rollout_rules(draw: Draw, rule: str | None = None) -> Arguments:
    """Arguments of the public function, with any rule or this one."""
    rule = rule or draw.choice(reference.ROLLOUT_RULES)
    given = max_variance_select(draw)
    given.pop("max_segment")
    keep = given.pop("keep_tensor", None)
    given |= {"advantages": given.pop("values"), "keep": keep if keep is not None else given["keep"]}
    given |= {"rule": rule, "scope": "batch" if given.pop("pooled") else "group"}
    if rule == "random":
        given["generator"] = torch.Generator().manual_seed(draw.integer(0, 2**31))
    return given


# ---- ratios ---------------------------------------------------------------------------------------------------------


def _groups(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """int8 from -2 to 15; a number below 0 means no group."""
    ids = torch.randint(-2, draw.integer(1, 16), shape, generator=draw.generator(), dtype=torch.int8)
    return draw.laid_out(ids)


def importance_ratio(draw: Draw) -> Arguments:
    """Log-probabilities of a policy that has moved, mostly by little."""
    shape, offsets = draw.segments()
    generator, level = draw.generator(), draw.choice(("token", "sequence", "entropy_group"))
    old = -20 * torch.rand(shape, generator=generator)
    steps = torch.tensor([0.0, 1e-3, 0.1, 1.0])
    step = steps[torch.randint(len(steps), shape, generator=generator)]
    logprob = old + step * torch.randn(shape, generator=generator)
    low, high = draw.choice(((-20.0, 20.0), (-math.inf, 10.0), (-0.5, 0.25), (-math.inf, math.inf)))
    given = {
        "logprob": draw.laid_out(logprob),
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
    shape = tuple(given["logprob"].shape)
    far = draw.choice((0.0, 100.0))  # where a ratio is infinite
    return {
        "grad_ratio": draw.values(shape, dtypes=(torch.float32,), special=()),
        "ratio": (given["logprob"].detach() - given["old_logprob"] + far).exp(),
        **{name: given[name] for name in ("mask", "groups", "low", "high")},
    }


def entropy_groups(draw: Draw) -> Arguments:
    given = _segmented(draw, "entropy", dtypes=(torch.float32,))
    quantiles = draw.choice(([0.8], [0.2, 0.5], [0.3, 0.5, 0.7, 0.8, 0.9], []))
    return given | {"quantiles": quantiles, "pooled": draw.flag()}


def adaptive_clip(draw: Draw) -> Arguments:
    shape, offsets = draw.segments()
    entropy = 5 * torch.rand(shape, generator=draw.generator())
    return {
        "entropy": draw.laid_out(entropy),
        "groups": _groups(draw, shape),
        "mask": draw.mask(shape),
        "offsets": offsets,
        "vocab_size": draw.choice((1000, 2, 151_936)),
        "alpha": draw.choice((0.02, 0.5)),
    }
