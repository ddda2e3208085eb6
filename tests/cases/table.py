"""Every op of ``csrc/library.cpp`` once: how to draw its arguments, what it means, and the allowed errors.

``tests/test_table.py``, the fuzzer, torch's opcheck, the emulated and the GPU suites and both sanitizer runs go through
this table. An op that is missing here fails a test; an op of the table is run by all of them that can run it.
``FUNCTIONS`` has the public functions in the same way: most of them are one op, and some are made of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from d3s_kernels import _exact
from d3s_kernels._dispatch.libraries import argument_names
from d3s_kernels._exact import Allowed, equal

from . import allowed, meaning, samples
from .draw import Draw
from .meaning import public, public_arguments, step

ServedBy = Literal["kernels", "composed", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Row(_exact.Row):
    """An op or a public function.

    Attributes:
        draw: draws the arguments, by name, of a call that is not refused.
        served_by: what computes the op: "kernels" of every back-end; code "composed" of other ops, on every device;
            or the "cpu" alone.
    """

    draw: Callable[[Draw], dict[str, Any]]
    served_by: ServedBy = "kernels"


def _row(draw: Callable[[Draw], dict[str, Any]], means: Callable[..., Any], *equals: str, **results: Allowed) -> Row:
    """The row of an op whose results ``equals`` have to be equal."""
    return Row(means=means, results=dict.fromkeys(equals, equal) | results, draw=draw)


def _rule(function: str) -> Allowed:
    """Of the only result of a public function."""
    (rule,) = _exact.FUNCTIONS[function].results.values()
    return rule


_STATISTICS: dict[str, Allowed] = {
    "logprob": _exact.logprob,
    "entropy": _exact.entropy,
    "row_max": allowed.equal_where_known,
    "log_sum": _exact.logprob,
}
_HEAD = {name: allowed.of_head(name) for name in ("logprob", "entropy", "hidden", "weight", "bias")}
_HEAD_RESULTS = {"logprob": _HEAD["logprob"], "entropy": _HEAD["entropy"]}
_HEAD_GRADIENTS = {name: _HEAD[name] for name in ("hidden", "weight", "bias")}
_LOGITS = allowed.gradient_of_logits

_OPS: dict[str, Row] = {
    # vocabulary
    "logprob_entropy": Row(
        means=meaning.logprob_entropy, results=_STATISTICS, gradients={"logits": _LOGITS},
        draw=samples.logprob_entropy_or_kept,
    ),
    "logprob_entropy_backward": _row(
        samples.logprob_entropy_backward, step("logprob_entropy_backward", wide=True), grad=_LOGITS
    ),
    "softmax_state_": _row(samples.softmax_state, step("softmax_state_", wide=True), state=allowed.states),
    "softmax_state_finish": _row(samples.softmax_state_finish, meaning.softmax_state_finish, **_STATISTICS),
    "logprob_entropy_backward_": _row(
        samples.logprob_entropy_backward_in_place, step("logprob_entropy_backward_", wide=True), grad=_LOGITS
    ),
    "linear_logprob_entropy": Row(
        means=meaning.linear_logprob_entropy, results=_HEAD_RESULTS | {"row_max": equal, "log_sum": equal},
        gradients=_HEAD_GRADIENTS, draw=samples.head, served_by="composed",
    ),
    "linear_logprob_entropy_backward": Row(
        means=meaning.linear_logprob_entropy_backward, results=_HEAD_GRADIENTS, draw=samples.head_backward,
        served_by="composed",
    ),
    "kept_logits": _row(samples.kept_logits, step("kept_logits", wide=True), logits=allowed.kept_product),
    "kept_logits_backward": _row(
        samples.kept_logits_backward, step("kept_logits_backward", wide=True),
        grad=allowed.gradient_of_places, rows=equal, tokens=equal, undefined=equal,
    ),
    "kept_hidden_grad_": _row(
        samples.kept_gradient, step("kept_hidden_grad_", wide=True), out=allowed.kept_gradient
    ),
    "kept_weight_grad_": _row(
        samples.kept_weight_grad, step("kept_weight_grad_", wide=True),
        out=allowed.kept_gradient, bias_out=allowed.kept_gradient,
    ),
    "wide_product_": Row(
        means=meaning.wide_product_, results={"out": allowed.product}, draw=samples.wide_product, served_by="cpu"
    ),
    # tokens
    "topk_mask": _row(samples.topk_mask, meaning.topk_mask, "mask"),
    "select_tokens": _row(samples.select_tokens, meaning.select_tokens, "mask", "count", "threshold"),
    "select_tokens_from_logits": Row(
        means=meaning.select_tokens_from_logits, results=_exact.FUNCTIONS["select_tokens_from_logits"].results,
        draw=samples.select_tokens_from_logits, from_found=True,
    ),
    "compact": _row(samples.compact, public("compact"), "indices", "count"),
    "topk_order_keys": _row(samples.topk_order_keys, step("topk_order_keys"), "keys"),
    "topk_count_digit": _row(samples.topk_count_digit, step("topk_count_digit"), counts=allowed.counts),
    "topk_choose_digit_": _row(samples.topk_choose_digit, step("topk_choose_digit_"), "search"),
    "topk_mask_from_key": _row(
        samples.topk_mask_from_key, step("topk_mask_from_key"), "mask", "zeros", "lowest"
    ),
    # rollouts
    "group_advantages": _row(
        samples.group_advantages, public("group_advantages"), advantages=_rule("group_advantages")
    ),
    "max_variance_select": _row(samples.max_variance_select, meaning.max_variance_select, "mask"),
    # ratios
    "importance_ratio": Row(
        means=public("importance_ratio"), results={"ratio": _rule("importance_ratio")},
        gradients={"logprob": allowed.gradient_of_ratios}, draw=samples.importance_ratio,
    ),
    "importance_ratio_backward": _row(
        samples.importance_ratio_backward, step("importance_ratio_backward"),
        grad_logprob=allowed.gradient_of_ratios_from_ratios,
    ),
    "entropy_groups": _row(samples.entropy_groups, public("entropy_groups"), "groups"),
    "adaptive_clip": _row(samples.adaptive_clip, public("adaptive_clip"), epsilon=_rule("adaptive_clip")),
}  # fmt: skip

# Ops over the ranks of a process group: tests/test_vocab_parallel.py draws them.
OF_RANKS = ("vocab_parallel_logprob_entropy",)


def _drawn_for(op: str, draw_some: Callable[[Draw], dict[str, Any]], draw: Draw) -> dict[str, Any]:
    """What is drawn, without what the op does not take."""
    takes = argument_names(op)
    return {name: part for name, part in draw_some(draw).items() if name in takes}


OPS = {op: replace(row, draw=partial(_drawn_for, op, row.draw)) for op, row in _OPS.items()}


# ---- public functions ------------------------------------------------------------------------------------------------


def _public(name: str, draw_some: Callable[[Draw], dict[str, Any]], draw: Draw) -> dict[str, Any]:
    return public_arguments(name, draw_some(draw))


# What draws the arguments of a function, where that is not the draw of the op of its name.
_DRAWN: Mapping[str, Callable[[Draw], dict[str, Any]]] = {
    "entropy": samples.logprob_entropy,
    "logprob_entropy": lambda draw: samples.with_labels(draw, samples.logprob_entropy(draw)),
    "group_advantages": lambda draw: samples.whole_rewards(draw, samples.group_advantages(draw)),
    "groups_without_spread": lambda draw: samples.whole_rewards(draw, samples.group_advantages(draw)),
    "select_tokens": samples.token_rules,
    "select_rollouts": samples.rollout_rules,
}
FUNCTIONS = {
    name: Row(**vars(row), draw=partial(_public, name, _DRAWN.get(name) or OPS[name].draw))
    for name, row in _exact.FUNCTIONS.items()
}
