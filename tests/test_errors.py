"""Every bad argument is refused, by name: "ratio: got 1.5; takes a number in (0, 1]"."""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import NAN

from d3s_kernels import (
    adaptive_clip,
    compact,
    entropy,
    entropy_groups,
    group_advantages,
    groups_without_spread,
    importance_ratio,
    linear_logprob_entropy,
    logprob_entropy,
    max_variance_select,
    select_rollouts,
    select_tokens,
    select_tokens_from_logits,
    topk_mask,
)
from d3s_kernels._dispatch import ops
from d3s_kernels._rules.rules import ROLLOUT_RULES, TOKEN_RULES

LOGITS, LABELS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
SCORES, FLAT = torch.zeros(2, 6), torch.zeros(12)
HIDDEN, WEIGHT, TARGETS = torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.long)
EACH = torch.zeros(2)
ELSEWHERE = torch.device("meta")


def bad(argument: str, function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return pytest.param(argument, function, args, kwargs)


def each(argument: str, values: Iterable[object], function: Callable[..., object], *args: object, **kwargs: object):
    """A case for each of these bad values of a named argument."""
    return [bad(argument, function, *args, **kwargs, **{argument: value}) for value in values]


def trues(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool, **options)


def logits_cases() -> list[object]:
    """What every function of logits refuses."""
    logits = [LOGITS.double(), LOGITS.long(), LOGITS.tolist(), torch.zeros(())]
    logits += [torch.zeros(2, 3, 10)[..., ::2], torch.zeros(2, 5, 3).mT]
    temperatures = [0.0, -1.0, NAN, math.inf, "hot", torch.tensor(0.0), torch.tensor(1), torch.tensor([1.0, -1.0, 1.0])]
    temperatures += [torch.full((2, 3), NAN), torch.ones(4), torch.ones(2, 3, 1)]
    masks = [torch.ones(2, 3), torch.ones(3, 2, dtype=torch.int32), trues(3), trues(2, 3, 5)]
    masks += [trues(2, 3, device=ELSEWHERE)]
    cases = []
    for function, rest in ((entropy, ()), (logprob_entropy, (LABELS,)), (select_tokens_from_logits, (EACH, 0.5))):
        cases += [bad("logits", function, wrong, *rest) for wrong in logits]
        cases += each("temperature", temperatures, function, LOGITS, *rest)
        cases += each("mask", masks, function, LOGITS, *rest)
    return cases


def label_cases() -> list[object]:
    cases = []
    for function, inputs, labels, vocabulary in (
        (logprob_entropy, (LOGITS,), LABELS, 5),
        (linear_logprob_entropy, (HIDDEN, WEIGHT), TARGETS, 7),
    ):
        last = torch.arange(labels.numel()).view(labels.shape) == labels.numel() - 1
        wrong = [labels.masked_fill(last, label) for label in (vocabulary, 2**40, -1, -99, -101)]
        wrong += [labels.float(), labels[1:], labels.unsqueeze(-1), labels.to(ELSEWHERE), None]
        cases += each("labels", wrong, function, *inputs)
    return cases


def linear_cases() -> list[object]:
    """What the LM head refuses, but for dtypes, which test_forms_of_arguments.py has."""
    temperatures = [0.0, NAN, torch.tensor(-1.0), torch.tensor([1.0, 0.0, 1.0]), torch.ones(4)]
    return [
        bad(argument, linear_logprob_entropy, **{"hidden": HIDDEN, "weight": WEIGHT, "labels": TARGETS, **changes})
        for argument, changes in (
            ("hidden", {"hidden": torch.zeros(()), "labels": TARGETS[0]}),
            *(("weight", {"weight": weight}) for weight in (WEIGHT[:, :3], WEIGHT[0], WEIGHT.to(ELSEWHERE))),
            ("bias", {"bias": torch.zeros(4)}),
            *(("mask", {"mask": mask}) for mask in (torch.ones(3), trues(2))),
            *(("temperature", {"temperature": temperature}) for temperature in temperatures),
            *(("logit_softcap", {"logit_softcap": cap}) for cap in (0.0, -30.0, NAN)),
            *(("logits_dtype", {"logits_dtype": dtype}) for dtype in (torch.float64, torch.int32)),
            *((name, {name: -1}) for name in ("max_rows", "max_grad_rows")),
            ("workspace_bytes", {"workspace_bytes": 0}),
        )
    ]


def segment_cases() -> list[object]:
    """What every function of segments refuses."""
    offsets = [
        *map(torch.tensor, ([1, 12], [0, 8, 6, 12], [0, -3, 12], [0, 11], [0, 13], [0, 2**40, 12], [[0, 12]])),
        torch.tensor([], dtype=torch.long),
        torch.tensor([0.0, 12.0]),
        torch.tensor([0, 12], dtype=torch.int16),
        torch.tensor([0, 12], device=ELSEWHERE),
        [0, 12],
    ]
    one, cases = torch.tensor(1.0), []
    for name, function, rest in (
        ("scores", topk_mask, (0.5,)),
        ("entropy", select_tokens, (one, 0.5)),
        ("rewards", group_advantages, ()),
        ("values", max_variance_select, (2,)),
        *(("advantages|values", partial(select_rollouts, rule=rule), (2,)) for rule in ROLLOUT_RULES),
        *(("entropy", partial(select_tokens, rule=rule), (one, 0.5)) for rule in TOKEN_RULES),
    ):
        dtypes = (torch.cfloat, torch.float8_e5m2) if function is group_advantages else (torch.double, torch.cfloat)
        dtypes += (torch.long,) if name in ("scores", "entropy") else ()
        wrong = [*map(SCORES.to, dtypes), torch.zeros(()), [0.0, 1.0]]
        cases += [bad(name, function, values, *rest) for values in wrong]
        cases += [bad(f"{name}|offsets", function, SCORES, *rest, offsets=torch.tensor([0, 12]))]
        cases += each("offsets", offsets, function, FLAT, *rest)
        if function is not group_advantages:
            masks = torch.ones(2, 6), trues(6), trues(2, 6, device=ELSEWHERE)
            cases += each("mask", masks, function, SCORES, *rest)
        if function is not group_advantages and name != "advantages|values":
            cases += each("max_segment", (-1, 1.5), function, SCORES, *rest)
    return cases


def quota_cases() -> list[object]:
    """Ratio, k and keep."""
    ratios = [0.0, -0.1, 1.0 + 1e-9, 20, NAN, math.inf, None, "half", True]
    ratios += [*map(torch.tensor, (0.0, -0.1, 1.5, NAN, [0.5, 0.5], 1)), torch.tensor(0.5, device=ELSEWHERE)]
    tensors = [torch.tensor(number) for number in (0, -1, 2.5, [2, 2])]
    cases = []
    for function, args in (
        (topk_mask, (SCORES,)),
        (select_tokens, (SCORES, EACH)),
        (partial(select_tokens, rule="entropy_quantile"), (SCORES, None)),
        (select_tokens_from_logits, (LOGITS, EACH)),
    ):
        cases += [bad("ratio", function, *args, ratio) for ratio in ratios]
    for function in (max_variance_select, *(partial(select_rollouts, rule=rule) for rule in ROLLOUT_RULES)):
        cases += [bad("keep", function, SCORES, keep) for keep in (0, -1, 2.5, None, "two", True, *tensors)]
    return [
        *cases,
        *each("k", (0, -3, 1.5, *tensors, torch.tensor(2, device=ELSEWHERE)), topk_mask, SCORES),
        bad("ratio|k", topk_mask, SCORES),
        *(bad("ratio|k", topk_mask, SCORES, 0.5, k=k) for k in (3, torch.tensor(3))),
    ]


def other_cases() -> list[object]:
    tokens, rollouts, seeded = (select_tokens, SCORES), (select_rollouts, SCORES, 2), torch.Generator()
    return [
        *each("advantages", (torch.zeros(3), torch.zeros(6), torch.zeros(2, 1), 1.0), *tokens, ratio=0.5),
        *each("advantages", (EACH.to(ELSEWHERE), None), *tokens, ratio=0.5),
        *each("advantages", (None, torch.zeros(3)), *tokens, ratio=0.5, rule="advantage"),
        bad("advantages", select_tokens, FLAT, torch.zeros(3), 0.5, offsets=torch.tensor([0, 5, 12])),
        bad("advantages", select_tokens_from_logits, LOGITS, torch.zeros(3), 0.5),
        bad("offsets", select_tokens_from_logits, LOGITS[0], torch.zeros(1), 0.5, offsets=torch.tensor([0, 4])),
        *each("scope", ("token", "group"), *tokens, EACH, 0.5),
        bad("scope", *tokens, None, 0.5, rule="entropy_quantile", scope="sequence"),
        bad("scope", select_tokens_from_logits, LOGITS, EACH, 0.5, scope=None),
        bad("scope", *rollouts, scope="sequence"),
        *each("rule", ("best", "entropy", None, ["random"]), *rollouts),
        *each("rule", ("best", "percentile", None, ["prefix"]), *tokens, EACH, 0.5),
        bad("generator", *rollouts, generator=seeded),
        bad("generator", *rollouts, rule="percentile", generator=seeded),
        bad("generator", *rollouts, rule="random", generator=7),
        bad("generator", select_rollouts, SCORES.to(ELSEWHERE), 2, rule="random", generator=seeded),
        bad("generator", *tokens, EACH, 0.5, generator=seeded),
        bad("generator", *tokens, None, 0.5, rule="random", generator="a seed"),
        *(bad("drop_zeros", *tokens, None, 0.5, rule=rule, drop_zeros=True) for rule in ("entropy_quantile", "random")),
        *each("mask", (torch.ones(3), [True]), compact, capacity=2),
        *each("capacity", (-1, 1.5, None), compact, trues(3)),
        *each("scale", ("std", True), group_advantages, SCORES),
        *each("eps", (-1e-4, NAN, math.inf, None), group_advantages, SCORES),
        *each("ddof", (None, -1, 0.5), group_advantages, SCORES),
    ]


def ratio_cases() -> list[object]:
    groups = torch.zeros(2, 6, dtype=torch.int8)
    ratio, clip = (importance_ratio, SCORES, SCORES), partial(adaptive_clip, vocab_size=9)
    quantiles = [(0.0,), (0.5, 1.0), (0.5, 0.5), (NAN,), 0.8, ("high",), (None,), [i / 20 for i in range(1, 17)]]
    return [
        *(
            bad(name, function, values, *rest)
            for name, function, rest in (
                ("logprob", importance_ratio, (SCORES,)),
                ("entropy", entropy_groups, ()),
                ("entropy", clip, (groups,)),
            )
            for values in (SCORES.double(), SCORES.long(), torch.zeros(()), [0.0, 1.0])
        ),
        *(
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor(offsets))
            for function, rest in ((importance_ratio, (FLAT,)), (entropy_groups, ()), (clip, (groups.flatten(),)))
            for offsets in ([1, 12], [0, 8, 6, 12], [0, 11], [[0, 12]], [0.0, 12.0])
        ),
        *each("old_logprob", (torch.zeros(6), SCORES.double(), SCORES.to(ELSEWHERE)), *ratio[:2]),
        *each("mask", (torch.ones(2, 6), trues(6)), *ratio),
        *each("level", ("word", None), *ratio),
        *each("denominator", ("new", 1), *ratio),
        bad("groups", *ratio, groups=groups),
        bad("groups", *ratio, level="sequence", groups=groups),
        *each("groups", (None, groups.long(), groups[0], groups + 16), *ratio, level="entropy_group"),
        *each("log_bounds", ((0.0, 1.0), (-1.0, NAN), (-1.0, -0.5), 20.0, ("low", "high")), *ratio),
        *each("quantiles", quantiles, entropy_groups, SCORES),
        bad("mask", entropy_groups, SCORES, torch.ones(2, 6)),
        bad("scope", entropy_groups, SCORES, scope="group"),
        bad("max_segment", entropy_groups, SCORES, max_segment=-1),
        *each("groups", (groups + 16, groups.int(), None), clip, SCORES),
        bad("mask", clip, SCORES, groups, torch.ones(2, 6)),
        *each("vocab_size", (1, 9.5, None), adaptive_clip, SCORES, groups),
        *each("alpha", (0.0, math.inf, "wide", None), clip, SCORES, groups),
    ]


@pytest.mark.parametrize(
    ("argument", "function", "args", "kwargs"),
    ratio_cases() + logits_cases() + label_cases() + linear_cases() + segment_cases() + quota_cases() + other_cases(),
)
def test_bad_argument(argument: str, function: Callable[..., object], args: tuple, kwargs: dict) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        function(*args, **kwargs)
    assert re.search(rf"\b({argument})\b", str(error.value)), f"does not name {argument}: {error.value}"


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("ratio: got 1.5; takes a number in (0, 1]", lambda: topk_mask(SCORES, 1.5)),
        ("groups: got 16; takes at most 15", lambda: adaptive_clip(FLAT, torch.full((12,), 16).char(), vocab_size=9)),
        ("quantiles: got 0.5 after 0.5", lambda: entropy_groups(FLAT, quantiles=(0.5, 0.5))),
        ("rewards: got dtype torch.complex64; takes bool, integers", lambda: groups_without_spread(SCORES.cfloat())),
        (
            "rewards: got dtype torch.int32; takes float32, bfloat16, float16 or float64",
            lambda: ops.group_advantages(FLAT.int()),
        ),
    ],
)
def test_a_message_says_what_was_given_and_what_is_taken(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_out_of_memory() -> None:
    """The size that was asked for is named."""
    with pytest.raises(RuntimeError, match="allocate"):
        compact(torch.ones(3, dtype=torch.bool), 10**13)


def test_out_of_memory_on_a_gpu_is_what_trainers_catch() -> None:
    message = "d3s_kernels: out of memory: cannot allocate [9, 5] of torch.float32 on cuda:0"

    def op(*arguments: object) -> None:
        raise RuntimeError(message)

    with pytest.raises(torch.OutOfMemoryError, match=re.escape(message)):
        ops._with_usual_errors(op)()
