"""The ops on segments of scores: the selection of tokens, in one process and in steps across ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from d3s_kernels import reference
from d3s_kernels.check import tolerances

from .draw import Draw
from .meaning import public, public_arguments, step
from .row import Arguments, op

RATIOS = (0.3, 1.0, 0.1, 0.07, 1e-6, 0.999)
PREFIX_RATIOS = (0.5, 0.55, 0.7, 0.75, 1.0)
_COUNTS = 2048  # the largest number of counts of a segment: one for each value of a digit
_DIGITS = (((24, 8), (16, 8), (8, 8), (0, 8)), ((21, 11), (10, 11), (0, 10)))


def segmented(draw: Draw, name: str, **options: Any) -> Arguments:
    """Draws values, their offsets, a mask, and an upper bound on the length of a segment."""
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


def number(draw: Draw, name: str) -> Arguments:
    return draw.number_or_tensor(draw.length(1), name, (torch.int64, torch.int32))


def _advantages(draw: Draw, tokens: tuple[int, ...], offsets: Tensor | None) -> Tensor:
    """Draws float32 advantages: one for all tokens, one for each sequence, or one for each token."""
    sequences = tokens[:-1] if offsets is None else (len(offsets) - 1,)
    return draw.values(draw.choice(((), sequences, tokens)), dtypes=(torch.float32,))


def with_rule(draw: Draw, given: Arguments, rule: str) -> Arguments:
    draws = rule == "random" or rule.startswith("prefix")
    generator = {"generator": torch.Generator().manual_seed(draw.integer(0, 2**31))} if draws else {}
    return given | {"rule": rule} | generator


def shared_tokens(draw: Draw) -> Arguments:
    """Draws ids of few kinds, so that responses share some, in groups of one size or with labels."""
    shape, offsets = draw.segments()
    shape = shape if offsets is not None else (math.prod(shape[:-1]), shape[-1])
    number, n = shape[0] if offsets is None else len(offsets) - 1, draw.integer(1, 4)
    ids = torch.randint(draw.choice((2, 1, 5)), shape, generator=draw.generator())
    given: Arguments = {"token_ids": draw.laid_out(ids), "offsets": offsets, "mask": draw.mask(shape)}
    advantages = draw.values((number,))
    if number % n == 0 and draw.flag():
        return given | {"advantages": advantages.view(-1, n), "groups": None}
    return given | {
        "advantages": advantages,
        "groups": torch.randint(max(1, number // n), (number,), generator=draw.generator()).tolist(),
    }


def _topk_mask(pooled: bool = False, **given: Any) -> Tensor:
    if not pooled:
        return public("topk_mask")(**given)
    # All segments are pooled into one. ``k`` tokens of each segment are as many times that together.
    scores, mask, offsets = given["scores"], given.get("mask"), given.get("offsets")
    options = public_arguments("topk_mask", given) | {"scores": scores.flatten(), "offsets": None}
    options["mask"] = None if mask is None else mask.flatten()
    if options.get("k") is not None:
        options["k"] = int(options["k"]) * len(reference._segments(scores, offsets))
    return reference.topk_mask(**options).view(scores.shape)


@op(_topk_mask, "mask")
def topk_mask(draw: Draw) -> Arguments:
    quota = draw.choice((_ratio(draw), number(draw, "k")))
    return segmented(draw, "scores") | quota | {"drop_zeros": draw.flag(), "pooled": draw.flag()}


def _select_tokens(**given: Any) -> tuple[Tensor, ...]:
    found = public("select_tokens")(**given)
    return found.mask, found.count, found.threshold


@op(_select_tokens, "mask", "count", "threshold")
def select_tokens(draw: Draw) -> Arguments:
    given = segmented(draw, "entropy")
    given["advantages"] = _advantages(draw, tuple(given["entropy"].shape), given["offsets"])
    return given | _ratio(draw) | {"pooled": draw.flag(), "drop_zeros": draw.flag()}


def token_rules(draw: Draw, rule: str | None = None) -> Arguments:
    """The arguments of the public function select_tokens, with the given rule, or with a random one."""
    rule = rule or draw.choice(reference.TOKEN_RULES)
    given = with_rule(draw, public_arguments("select_tokens", select_tokens(draw)), rule)
    if rule == "prefix":
        given["ratio"] = draw.choice(PREFIX_RATIOS)
    # This rule takes the quantile over the whole batch, and does not keep an exact number of tokens.
    fixed = {"entropy_quantile": {"scope": "batch", "drop_zeros": False}, "random": {"drop_zeros": False}}
    return given | fixed.get(rule, {})


def random_prefixes(draw: Draw) -> Arguments:
    """The arguments of the public function of this name."""
    shape, offsets = draw.segments()
    sequences = math.prod(shape[:-1]) if offsets is None else len(offsets) - 1
    mask = torch.rand(shape, generator=draw.generator()) < draw.choice((0.5, 0.9, 0.0, 1.0))
    given = {"mask": draw.laid_out(mask), "offsets": offsets, "ratio": draw.choice(PREFIX_RATIOS)}
    return given | {"draws": torch.rand(sequences, generator=draw.generator())}


@op(
    lambda **given: tolerances.from_logits(**public_arguments("select_tokens_from_logits", given))[:4],
    results=dict(list(tolerances.FUNCTIONS["select_tokens_from_logits"].results.items())[:4]),  # the op has no weights
    from_found=True,
)
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


@op(public("compact"), "indices", "count")
def compact(draw: Draw) -> Arguments:
    shape, _ = draw.segments()
    mask = torch.rand(shape, generator=draw.generator()) < draw.choice((0.5, 0.1, 0.0, 1.0))
    return {"mask": draw.laid_out(mask), "capacity": draw.length(0, 2 * draw.most)}


# ---- in steps --------------------------------------------------------------------------------------------------------


@op(step("topk_order_keys"), "keys")
def topk_order_keys(draw: Draw) -> Arguments:
    given = segmented(draw, "scores")
    advantages = _advantages(draw, tuple(given["scores"].shape), given["offsets"])
    return given | {"advantages": draw.optional(advantages)}


def _searched(draw: Draw, all_digits: bool = False) -> Arguments:
    """Draws keys, the state of a search after some or all digits, the next digit, and how many keys to keep."""
    given = topk_order_keys(draw)
    quota = draw.choice((_ratio(draw), number(draw, "k")))
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


def _counts(exact: Tensor, arguments: tolerances.Arguments) -> Tensor:
    """0, except for the digit value 0: masked values have the key 0 and may be counted, as no search reaches it."""
    limit = torch.zeros(exact.shape, dtype=torch.float64)
    limit[:, 0] = int((arguments["keys"] == 0).sum())
    return limit


@op(step("topk_count_digit"), results={"counts": _counts})
def topk_count_digit(draw: Draw) -> Arguments:
    return _searched(draw)


@op(step("topk_choose_digit_"), "search")
def topk_choose_digit_(draw: Draw) -> Arguments:
    given = _searched(draw)
    return given | {"counts": step("topk_count_digit")(**given)[0]}


@op(step("topk_mask_from_key"), "mask", "zeros", "lowest")
def topk_mask_from_key(draw: Draw) -> Arguments:
    """Draws a finished search, and the number of ties that a rank keeps, which may also be too small or too large."""
    given = _searched(draw, all_digits=True)
    return given | {"ties": given["search"][:, 1] + draw.integer(-2, 2), "drop_zeros": draw.flag()}
