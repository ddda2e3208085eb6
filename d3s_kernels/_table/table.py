"""Every op of ``csrc/library.cpp`` once: how to draw its arguments, what it means, and the allowed errors.

The self-check, ``compare``, the fuzzer, torch's opcheck, the emulated and the GPU suites and both sanitizer runs go
through this table. An op that is missing here fails a test; an op of the table is run by all of them that can run it.
(An op of several ranks needs ranks.)
``FUNCTIONS`` has the public functions in the same way: most of them are one op, and some are made of several.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from .. import reference
from ..sampling import SamplingMask
from . import allowed, meaning, samples
from .allowed import Allowed
from .draw import Draw

ServedBy = Literal["kernels", "composed", "cpu", "ranks"]


@dataclass(frozen=True)
class Row:
    """An op or a public function.

    Attributes:
        draw: draws the arguments, by name, of a call that is not refused.
        means: computes the results of the same arguments in float64. A tensor that an op writes is a result. A result
            that is None is not compared.
        results: the names of the results, and how far each may be off.
        gradients: the arguments that have a gradient, and how far it may be off.
        served_by: what computes the op: "kernels" of every back-end; code "composed" of other ops, on every device;
            the "cpu" alone; or the "ranks" of a process group.
        from_found: whether some results depend on the result of the call, which ``means`` then takes as ``found``. For
            example, which tokens are kept follows to the bit from the call's entropies, which have rounding errors.
    """

    draw: Callable[[Draw], dict[str, Any]]
    means: Callable[..., Any]
    results: Mapping[str, Allowed]
    gradients: Mapping[str, Allowed] = field(default_factory=dict)
    served_by: ServedBy = "kernels"
    from_found: bool = False


_STATISTICS = {
    "logprob": allowed.logprob,
    "entropy": allowed.entropy,
    "row_max": allowed.equal_where_known,
    "log_sum": allowed.logprob,
}
_BOTH = ("logprob", "entropy")
_SELECTION = dict.fromkeys(("mask", "count", "threshold"), allowed.equal)
_WITH_ENTROPY = _SELECTION | {"entropy": allowed.entropy}
_WITH_ENTROPY = {name: _WITH_ENTROPY[name] for name in ("mask", "entropy", "count", "threshold")}
_FROM_LOGITS = "select_tokens_from_logits"
_HEAD_STATISTICS = {name: allowed.of_head(name) for name in _STATISTICS}
_HEAD_GRADIENTS = {name: allowed.of_head(name) for name in ("hidden", "weight", "bias")}
_LOGITS = {"logits": allowed.gradient_of_logits}


def _one(name: str, rule: Allowed = allowed.equal) -> dict[str, Allowed]:
    return {name: rule}


def _public(name: str) -> Callable[..., Any]:
    """The reference's function of that name, called with an op's samples."""

    def call(**given: Any) -> Any:
        return getattr(reference, name)(**public_arguments(name, given))

    return call


def public_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """An op's arguments as those of the public function: a number and its tensor are one, ``pooled`` is a scope."""
    takes = inspect.signature(getattr(reference, name)).parameters
    merged = {
        argument.removesuffix("_tensor"): value
        for argument, value in given.items()
        if value is not None or not argument.endswith("_tensor")
    }
    if "scope" in takes and "pooled" in given:
        merged["scope"] = "batch" if given["pooled"] else "group" if name == "select_rollouts" else "sequence"
    if "low" in given:
        merged["log_bounds"] = (given["low"], given["high"])
    if given.get("sampling_ids") is not None:
        merged["sampling_mask"] = SamplingMask(given["sampling_ids"], given["sampling_offsets"])
        merged["label_outside"] = "include" if given.get("include_label") else "nan"
    return {argument: value for argument, value in merged.items() if argument in takes or argument == "found"}


# ---- the ops --------------------------------------------------------------------------------------------------------


def _topk_mask(pooled: bool = False, **given: Any) -> Any:
    if not pooled:
        return _public("topk_mask")(**given)
    # All segments as one; the number k is for each of them.
    scores, mask, offsets = given["scores"], given.get("mask"), given.get("offsets")
    segments = len(reference._segments(scores, offsets))
    options = public_arguments("topk_mask", given) | {"scores": scores.flatten(), "offsets": None}
    options["mask"] = None if mask is None else mask.flatten()
    if options.get("k") is not None:
        options["k"] = int(options["k"]) * segments
    return reference.topk_mask(**options).view(scores.shape)


def _max_variance_select(pooled: bool = False, **given: Any) -> Any:
    if not pooled:
        return _public("max_variance_select")(**given)
    return _public("select_rollouts")(advantages=given.pop("values"), pooled=True, **given)


def _from_logits(
    found: Mapping[str, Tensor], logits: Tensor, temperature: Any = 1.0, **options: Any
) -> tuple[Any, ...]:
    """The selection from the entropies that the call returned, and the exact entropies."""
    spans = {name: options.pop(name) for name in ("sampling_mask", "max_dense_rows") if name in options}
    entropy = reference.entropy(logits, temperature=temperature, mask=options.get("mask"), **spans)
    chosen = reference.select_tokens(found["entropy"], **options)
    return chosen.mask, entropy, chosen.count, chosen.threshold


def _selection(found: reference.TokenSelection) -> tuple[Tensor, ...]:
    return found.mask, found.count, found.threshold


OPS: dict[str, Row] = {
    # vocabulary
    "logprob_entropy": Row(samples.logprob_entropy_or_kept, meaning.logprob_entropy, _STATISTICS, _LOGITS),
    "logprob_entropy_backward": Row(
        samples.logprob_entropy_backward, meaning.logprob_entropy_backward, _one("grad", allowed.gradient_of_logits)
    ),
    "softmax_state_": Row(samples.softmax_state_or_kept, meaning.softmax_state_, _one("state", allowed.states)),
    "softmax_state_finish": Row(samples.softmax_state_finish, meaning.softmax_state_finish, _STATISTICS),
    "logprob_entropy_backward_": Row(
        samples.logprob_entropy_backward_in_place,
        meaning.logprob_entropy_backward_,
        _one("grad", allowed.gradient_of_logits),
    ),
    "linear_logprob_entropy": Row(
        samples.head, meaning.head_statistics, _HEAD_STATISTICS, _HEAD_GRADIENTS, "composed"
    ),
    "linear_logprob_entropy_backward": Row(
        samples.head_backward, meaning.linear_logprob_entropy_backward, _HEAD_GRADIENTS, served_by="composed"
    ),
    "vocab_parallel_logprob_entropy": Row(
        samples.of_one_rank(samples.logprob_entropy), meaning.row_statistics, _STATISTICS, _LOGITS, "ranks"
    ),
    "kept_logits": Row(samples.kept_logits, meaning.kept_logits, _one("logits", allowed.kept_product)),
    "kept_logits_backward": Row(
        samples.kept_logits_backward,
        meaning.kept_logits_backward,
        _one("grad", allowed.gradient_of_places) | dict.fromkeys(("rows", "tokens", "undefined"), allowed.equal),
    ),
    "kept_hidden_grad_": Row(
        samples.kept_hidden_grad, meaning.kept_hidden_grad_, _one("out", allowed.kept_gradient)
    ),
    "kept_weight_grad_": Row(
        samples.kept_weight_grad,
        meaning.kept_weight_grad_,
        dict.fromkeys(("out", "bias_out"), allowed.kept_gradient),
    ),
    "wide_product_": Row(
        samples.wide_product, meaning.wide_product_, _one("out", allowed.product), served_by="cpu"
    ),
    # tokens
    "topk_mask": Row(samples.topk_mask, _topk_mask, _one("mask")),
    "select_tokens": Row(
        samples.select_tokens, lambda **given: _selection(_public("select_tokens")(**given)), _SELECTION
    ),
    "select_tokens_from_logits": Row(
        samples.select_tokens_from_logits, lambda **given: _from_logits(**public_arguments(_FROM_LOGITS, given)),
        _WITH_ENTROPY, from_found=True,
    ),
    "compact": Row(samples.compact, _public("compact"), dict.fromkeys(("indices", "count"), allowed.equal)),
    "topk_order_keys": Row(samples.topk_order_keys, meaning.topk_order_keys, _one("keys")),
    "topk_count_digit": Row(samples.topk_count_digit, meaning.topk_count_digit, _one("counts", allowed.counts)),
    "topk_choose_digit_": Row(samples.topk_choose_digit, meaning.topk_choose_digit_, _one("search")),
    "topk_mask_from_key": Row(
        samples.topk_mask_from_key,
        meaning.topk_mask_from_key,
        dict.fromkeys(("mask", "zeros", "lowest"), allowed.equal),
    ),
    # rollouts
    "group_advantages": Row(
        samples.group_advantages, _public("group_advantages"), _one("advantages", allowed.near(1e-9, 2**-22))
    ),
    "max_variance_select": Row(samples.max_variance_select, _max_variance_select, _one("mask")),
    # ratios
    "importance_ratio": Row(
        samples.importance_ratio, _public("importance_ratio"), _one("ratio", allowed.ratio),
        {"logprob": allowed.gradient_of_ratios},
    ),
    "importance_ratio_backward": Row(
        samples.importance_ratio_backward,
        meaning.importance_ratio_backward,
        _one("grad_logprob", allowed.gradient_of_ratios),
    ),
    "entropy_groups": Row(samples.entropy_groups, _public("entropy_groups"), _one("groups")),
    "adaptive_clip": Row(samples.adaptive_clip, _public("adaptive_clip"), _one("epsilon", allowed.near(1e-10, 1e-6))),
}  # fmt: skip


# ---- the public functions -------------------------------------------------------------------------------------------


def _as(name: str, op: str, extra: Callable[[Draw, dict[str, Any]], dict[str, Any]] | None = None) -> Row:
    """The row of a function whose arguments are drawn as those of the op; ``extra`` adds what else it takes."""
    row = OPS[op]
    draw_op = samples.logprob_entropy if op == "logprob_entropy" else row.draw  # no logits of kept tokens alone

    def draw(source: Draw) -> dict[str, Any]:
        given = public_arguments(name, draw_op(source))
        return given if extra is None else extra(source, given)

    means = _from_logits if row.from_found else getattr(reference, name)
    return Row(draw, means, row.results, row.gradients, from_found=row.from_found)


def _results_of(row: Row, *names: str) -> Row:
    return Row(row.draw, row.means, {name: row.results[name] for name in names}, row.gradients)


FUNCTIONS: dict[str, Row] = {
    "entropy": _results_of(_as("entropy", "logprob_entropy"), "entropy"),
    "logprob_entropy": _results_of(_as("logprob_entropy", "logprob_entropy", samples.with_labels), *_BOTH),
    "linear_logprob_entropy": _results_of(_as("linear_logprob_entropy", "linear_logprob_entropy"), *_BOTH),
    "topk_mask": _as("topk_mask", "topk_mask"),
    "select_tokens": Row(
        samples.token_rules, reference.select_tokens,
        _WITH_ENTROPY,
    ),
    "select_tokens_from_logits": _as("select_tokens_from_logits", "select_tokens_from_logits"),
    "compact": _as("compact", "compact"),
    "group_advantages": _as("group_advantages", "group_advantages", samples.whole_rewards),
    "groups_without_spread": Row(samples.groups_without_spread, reference.groups_without_spread, _one("same")),
    "max_variance_select": _as("max_variance_select", "max_variance_select"),
    "select_rollouts": Row(samples.rollout_rules, reference.select_rollouts, _one("mask")),
    "importance_ratio": _as("importance_ratio", "importance_ratio"),
    "entropy_groups": _as("entropy_groups", "entropy_groups"),
    "adaptive_clip": _as("adaptive_clip", "adaptive_clip"),
}  # fmt: skip
