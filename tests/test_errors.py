"""Every bad argument is refused, by name: "ratio: got 1.5; takes a number in (0, 1]"."""

import math
import re
from collections.abc import Callable
from functools import partial

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
from d3s_kernels._selection.rules import ROLLOUT_RULES, TOKEN_RULES

LOGITS, LABELS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
SCORES, FLAT = torch.zeros(2, 6), torch.zeros(12)
HIDDEN, WEIGHT, TARGETS = torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.long)
EACH = torch.zeros(2)
ELSEWHERE = torch.device("meta")


def bad(argument: str, function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return pytest.param(argument, function, args, kwargs)


def logits_cases() -> list[object]:
    """What every function of logits refuses."""
    cases = []
    for function, rest, mask in (
        (entropy, (), "mask"),
        (logprob_entropy, (LABELS,), "mask"),
        (select_tokens_from_logits, (EACH, 0.5), "mask"),
    ):
        cases += [
            bad("logits", function, LOGITS.double(), *rest),
            bad("logits", function, LOGITS.long(), *rest),
            bad("logits", function, LOGITS.tolist(), *rest),
            bad("logits", function, torch.zeros(()), *rest),
            bad("logits", function, torch.zeros(2, 3, 10)[..., ::2], *rest),
            bad("logits", function, torch.zeros(2, 5, 3).mT, *rest),
            bad("temperature", function, LOGITS, *rest, temperature=0.0),
            bad("temperature", function, LOGITS, *rest, temperature=-1.0),
            bad("temperature", function, LOGITS, *rest, temperature=NAN),
            bad("temperature", function, LOGITS, *rest, temperature=math.inf),
            bad("temperature", function, LOGITS, *rest, temperature="hot"),
            bad("temperature", function, LOGITS, *rest, temperature=torch.tensor(0.0)),
            bad("temperature", function, LOGITS, *rest, temperature=torch.tensor(1)),
            bad("temperature", function, LOGITS, *rest, temperature=torch.tensor([1.0, -1.0, 1.0])),
            bad("temperature", function, LOGITS, *rest, temperature=torch.full((2, 3), NAN)),
            bad("temperature", function, LOGITS, *rest, temperature=torch.ones(4)),
            bad("temperature", function, LOGITS, *rest, temperature=torch.ones(2, 3, 1)),
            bad(mask, function, LOGITS, *rest, **{mask: torch.ones(2, 3)}),
            bad(mask, function, LOGITS, *rest, **{mask: torch.ones(3, 2, dtype=torch.int32)}),
            bad(mask, function, LOGITS, *rest, **{mask: torch.ones(3, dtype=torch.bool)}),
            bad(mask, function, LOGITS, *rest, **{mask: torch.ones(2, 3, 5, dtype=torch.bool)}),
            bad(mask, function, LOGITS, *rest, **{mask: torch.ones(2, 3, dtype=torch.bool, device=ELSEWHERE)}),
        ]
    return cases


def label_cases() -> list[object]:
    cases = []
    for function, inputs, labels, vocabulary in (
        (logprob_entropy, (LOGITS,), LABELS, 5),
        (linear_logprob_entropy, (HIDDEN, WEIGHT), TARGETS, 7),
    ):
        for label in (vocabulary, 2**40, -1, -99, -101):
            wrong = labels.clone()
            wrong.view(-1)[-1] = label
            cases.append(bad("labels", function, *inputs, wrong))
        cases += [
            bad("labels", function, *inputs, labels.float()),
            bad("labels", function, *inputs, labels[1:]),
            bad("labels", function, *inputs, labels.unsqueeze(-1)),
            bad("labels", function, *inputs, labels.to(ELSEWHERE)),
            bad("labels", function, *inputs, None),
        ]
    return cases


def linear_cases() -> list[object]:
    def head(argument: str, **changes: object) -> object:
        return bad(
            argument, linear_logprob_entropy, **{"hidden": HIDDEN, "weight": WEIGHT, "labels": TARGETS, **changes}
        )

    return [
        head("hidden", hidden=HIDDEN.double(), weight=WEIGHT.double()),
        head("hidden", hidden=torch.zeros(()), labels=TARGETS[0]),
        head("weight", weight=WEIGHT.double()),
        head("weight", weight=WEIGHT.half(), hidden=HIDDEN.bfloat16()),
        head("weight", weight=WEIGHT[:, :3]),
        head("weight", weight=WEIGHT[0]),
        head("weight", weight=WEIGHT.to(ELSEWHERE)),
        head("bias", bias=torch.zeros(4)),
        head("bias", bias=torch.zeros(7, dtype=torch.float64)),
        head("bias", bias=torch.zeros(7, dtype=torch.float16), hidden=HIDDEN.bfloat16(), weight=WEIGHT.bfloat16()),
        head("mask", mask=torch.ones(3)),
        head("mask", mask=torch.ones(2, dtype=torch.bool)),
        head("temperature", temperature=0.0),
        head("temperature", temperature=NAN),
        head("temperature", temperature=torch.tensor(-1.0)),
        head("temperature", temperature=torch.tensor([1.0, 0.0, 1.0])),
        head("temperature", temperature=torch.ones(4)),
        head("logit_softcap", logit_softcap=0.0),
        head("logit_softcap", logit_softcap=-30.0),
        head("logit_softcap", logit_softcap=NAN),
        head("logits_dtype", logits_dtype=torch.float64),
        head("logits_dtype", logits_dtype=torch.int32),
        head("max_rows", max_rows=-1),
        head("max_grad_rows", max_grad_rows=-1),
        head("workspace_bytes", workspace_bytes=0),
    ]


def segment_cases() -> list[object]:
    """What every function of segments refuses."""
    cases = []
    for name, function, rest in (
        ("scores", topk_mask, (0.5,)),
        ("entropy", select_tokens, (torch.tensor(1.0), 0.5)),
        ("rewards", group_advantages, ()),
        ("values", max_variance_select, (2,)),
        *(("advantages|values", partial(select_rollouts, rule=rule), (2,)) for rule in ROLLOUT_RULES),
        *(("entropy", partial(select_tokens, rule=rule), (torch.tensor(1.0), 0.5)) for rule in TOKEN_RULES),
    ):
        wrong = (torch.cfloat, torch.float8_e5m2) if function is group_advantages else (torch.double, torch.long)
        cases += [
            *(bad(name, function, SCORES.to(dtype), *rest) for dtype in wrong),
            bad(name, function, torch.zeros(()), *rest),
            bad(name, function, [0.0, 1.0], *rest),
            bad(f"{name}|offsets", function, SCORES, *rest, offsets=torch.tensor([0, 12])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([1, 12])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, 8, 6, 12])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, -3, 12])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, 11])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, 13])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, 2**40, 12])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([], dtype=torch.long)),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([[0, 12]])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0.0, 12.0])),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, 12], dtype=torch.int16)),
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor([0, 12], device=ELSEWHERE)),
            bad("offsets", function, FLAT, *rest, offsets=[0, 12]),
        ]
        if function is not group_advantages:
            cases += [
                bad("mask", function, SCORES, *rest, mask=torch.ones(2, 6)),
                bad("mask", function, SCORES, *rest, mask=torch.ones(6, dtype=torch.bool)),
                bad("mask", function, SCORES, *rest, mask=torch.ones(2, 6, dtype=torch.bool, device=ELSEWHERE)),
            ]
        if function is not group_advantages and name != "advantages|values":
            cases += [
                bad("max_segment", function, SCORES, *rest, max_segment=-1),
                bad("max_segment", function, SCORES, *rest, max_segment=1.5),
            ]
    return cases


def quota_cases() -> list[object]:
    """Ratio, k and keep."""
    cases = []
    for function, args in (
        (topk_mask, (SCORES,)),
        (select_tokens, (SCORES, EACH)),
        (partial(select_tokens, rule="entropy_quantile"), (SCORES, None)),
        (select_tokens_from_logits, (LOGITS, EACH)),
    ):
        numbers = (0.0, -0.1, 1.0 + 1e-9, 20, NAN, math.inf)
        cases += [bad("ratio", function, *args, number) for number in numbers]
        cases += [bad("ratio", function, *args, torch.tensor(float(number))) for number in (0.0, -0.1, 1.5, NAN)]
        cases += [
            bad("ratio", function, *args, torch.tensor([0.5, 0.5])),
            bad("ratio", function, *args, torch.tensor(1)),
            bad("ratio", function, *args, torch.tensor(0.5, device=ELSEWHERE)),
            bad("ratio", function, *args, None),
            bad("ratio", function, *args, "half"),
            bad("ratio", function, *args, True),
        ]
    for function in (max_variance_select, *(partial(select_rollouts, rule=rule) for rule in ROLLOUT_RULES)):
        cases += [bad("keep", function, SCORES, number) for number in (0, -1, 2.5, None, "two", True)]
        cases += [bad("keep", function, SCORES, torch.tensor(number)) for number in (0, -1, 2.5, [2, 2])]
    return [
        *cases,
        bad("k", topk_mask, SCORES, k=0),
        bad("k", topk_mask, SCORES, k=-3),
        bad("k", topk_mask, SCORES, k=1.5),
        *(bad("k", topk_mask, SCORES, k=torch.tensor(number)) for number in (0, -1, 2.5, [2, 2])),
        bad("k", topk_mask, SCORES, k=torch.tensor(2, device=ELSEWHERE)),
        bad("ratio|k", topk_mask, SCORES),
        bad("ratio|k", topk_mask, SCORES, 0.5, k=3),
        bad("ratio|k", topk_mask, SCORES, 0.5, k=torch.tensor(3)),
    ]


def other_cases() -> list[object]:
    mask = torch.ones(3, dtype=torch.bool)
    return [
        bad("advantages", select_tokens, SCORES, torch.zeros(3), 0.5),
        bad("advantages", select_tokens, SCORES, torch.zeros(6), 0.5),
        bad("advantages", select_tokens, SCORES, torch.zeros(2, 1), 0.5),
        bad("advantages", select_tokens, SCORES, 1.0, 0.5),
        bad("advantages", select_tokens, SCORES, EACH.to(ELSEWHERE), 0.5),
        bad("advantages", select_tokens, FLAT, torch.zeros(3), 0.5, offsets=torch.tensor([0, 5, 12])),
        bad("advantages", select_tokens_from_logits, LOGITS, torch.zeros(3), 0.5),
        bad("offsets", select_tokens_from_logits, LOGITS[0], torch.zeros(1), 0.5, offsets=torch.tensor([0, 4])),
        bad("scope", select_tokens, SCORES, EACH, 0.5, scope="token"),
        bad("scope", select_tokens, SCORES, EACH, 0.5, scope="group"),
        bad("scope", select_tokens_from_logits, LOGITS, EACH, 0.5, scope=None),
        bad("scope", select_rollouts, SCORES, 2, scope="sequence"),
        *(bad("rule", select_rollouts, SCORES, 2, rule=rule) for rule in ("best", "entropy", None, ["random"])),
        *(bad("rule", select_tokens, SCORES, EACH, 0.5, rule=rule) for rule in ("best", "percentile", None, 1)),
        bad("generator", select_rollouts, SCORES, 2, generator=torch.Generator()),
        bad("generator", select_rollouts, SCORES, 2, rule="percentile", generator=torch.Generator()),
        bad("generator", select_rollouts, SCORES, 2, rule="random", generator=7),
        bad("generator", select_rollouts, SCORES.to(ELSEWHERE), 2, rule="random", generator=torch.Generator()),
        bad("generator", select_tokens, SCORES, EACH, 0.5, generator=torch.Generator()),
        bad("generator", select_tokens, SCORES, None, 0.5, rule="random", generator="a seed"),
        bad("advantages", select_tokens, SCORES, None, 0.5),
        bad("advantages", select_tokens, SCORES, None, 0.5, rule="advantage"),
        bad("advantages", select_tokens, SCORES, torch.zeros(3), 0.5, rule="advantage"),
        bad("scope", select_tokens, SCORES, None, 0.5, rule="entropy_quantile", scope="sequence"),
        bad("drop_zeros", select_tokens, SCORES, None, 0.5, rule="entropy_quantile", drop_zeros=True),
        bad("mask", compact, torch.ones(3), 2),
        bad("mask", compact, [True], 2),
        bad("capacity", compact, mask, -1),
        bad("capacity", compact, mask, 1.5),
        bad("capacity", compact, mask, None),
        bad("scale", group_advantages, SCORES, scale="std"),
        bad("scale", group_advantages, SCORES, scale=True),
        bad("eps", group_advantages, SCORES, eps=-1e-4),
        bad("eps", group_advantages, SCORES, eps=NAN),
        bad("eps", group_advantages, SCORES, eps=math.inf),
        bad("eps", group_advantages, SCORES, eps=None),
        bad("ddof", group_advantages, SCORES, ddof=None),
        bad("ddof", group_advantages, SCORES, ddof=-1),
        bad("ddof", group_advantages, SCORES, ddof=0.5),
    ]


def ratio_cases() -> list[object]:
    groups = torch.zeros(2, 6, dtype=torch.int8)
    ratio = (importance_ratio, SCORES, SCORES)
    clip = (adaptive_clip, SCORES, groups)
    return [
        *(
            bad(name, function, values, *rest, **more)
            for name, function, rest, more in (
                ("logprob", importance_ratio, (SCORES,), {}),
                ("entropy", entropy_groups, (), {}),
                ("entropy", adaptive_clip, (groups,), {"vocab_size": 9}),
            )
            for values in (SCORES.double(), SCORES.long(), torch.zeros(()), [0.0, 1.0])
        ),
        *(
            bad("offsets", function, FLAT, *rest, offsets=torch.tensor(offsets), **more)
            for function, rest, more in (
                (importance_ratio, (FLAT,), {}),
                (entropy_groups, (), {}),
                (adaptive_clip, (groups.flatten(),), {"vocab_size": 9}),
            )
            for offsets in ([1, 12], [0, 8, 6, 12], [0, 11], [[0, 12]], [0.0, 12.0])
        ),
        bad("old_logprob", *ratio[:2], torch.zeros(6)),
        bad("old_logprob", *ratio[:2], SCORES.double()),
        bad("old_logprob", *ratio[:2], SCORES.to(ELSEWHERE)),
        bad("mask", *ratio, torch.ones(2, 6)),
        bad("mask", *ratio, torch.ones(6, dtype=torch.bool)),
        bad("level", *ratio, level="word"),
        bad("level", *ratio, level=None),
        bad("denominator", *ratio, denominator="new"),
        bad("denominator", *ratio, denominator=1),
        bad("groups", *ratio, level="entropy_group"),
        bad("groups", *ratio, groups=groups),
        bad("groups", *ratio, level="sequence", groups=groups),
        bad("groups", *ratio, level="entropy_group", groups=groups.long()),
        bad("groups", *ratio, level="entropy_group", groups=groups[0]),
        bad("groups", *ratio, level="entropy_group", groups=groups + 16),
        bad("log_bounds", *ratio, log_bounds=(0.0, 1.0)),
        bad("log_bounds", *ratio, log_bounds=(-1.0, NAN)),
        bad("log_bounds", *ratio, log_bounds=(-1.0, -0.5)),
        bad("log_bounds", *ratio, log_bounds=20.0),
        bad("log_bounds", *ratio, log_bounds=("low", "high")),
        bad("quantiles", entropy_groups, SCORES, quantiles=(0.0,)),
        bad("quantiles", entropy_groups, SCORES, quantiles=(0.5, 1.0)),
        bad("quantiles", entropy_groups, SCORES, quantiles=(0.5, 0.5)),
        bad("quantiles", entropy_groups, SCORES, quantiles=(NAN,)),
        bad("quantiles", entropy_groups, SCORES, quantiles=0.8),
        bad("quantiles", entropy_groups, SCORES, quantiles=("high",)),
        bad("quantiles", entropy_groups, SCORES, quantiles=(None,)),
        bad("quantiles", entropy_groups, SCORES, quantiles=[i / 20 for i in range(1, 17)]),
        bad("mask", entropy_groups, SCORES, torch.ones(2, 6)),
        bad("scope", entropy_groups, SCORES, scope="group"),
        bad("max_segment", entropy_groups, SCORES, max_segment=-1),
        bad("groups", *clip[:2], groups + 16, vocab_size=9),
        bad("groups", *clip[:2], groups.int(), vocab_size=9),
        bad("groups", *clip[:2], None, vocab_size=9),
        bad("mask", *clip, torch.ones(2, 6), vocab_size=9),
        bad("vocab_size", *clip, vocab_size=1),
        bad("vocab_size", *clip, vocab_size=9.5),
        bad("vocab_size", *clip, vocab_size=None),
        bad("alpha", *clip, vocab_size=9, alpha=0.0),
        bad("alpha", *clip, vocab_size=9, alpha=math.inf),
        bad("alpha", *clip, vocab_size=9, alpha="wide"),
        bad("alpha", *clip, vocab_size=9, alpha=None),
    ]


@pytest.mark.parametrize(
    ("argument", "function", "args", "kwargs"),
    [
        *ratio_cases(),
        *logits_cases(),
        *label_cases(),
        *linear_cases(),
        *segment_cases(),
        *quota_cases(),
        *other_cases(),
    ],
)
def test_bad_argument(argument: str, function: Callable[..., object], args: tuple, kwargs: dict) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        function(*args, **kwargs)
    assert re.search(rf"\b({argument})\b", str(error.value)), f"does not name {argument}: {error.value}"


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("ratio: got 1.5; takes a number in (0, 1]", lambda: topk_mask(SCORES, 1.5)),
        ("labels: got 5", lambda: logprob_entropy(LOGITS, torch.full((2, 3), 5))),
        ("keep: got 0; takes at least 1", lambda: max_variance_select(SCORES, 0)),
        ("groups: got 16; takes at most 15", lambda: adaptive_clip(FLAT, torch.full((12,), 16).char(), vocab_size=9)),
        ("quantiles: got 0.5 after 0.5", lambda: entropy_groups(FLAT, quantiles=(0.5, 0.5))),
        ("offsets: ", lambda: group_advantages(FLAT, offsets=torch.tensor([0, 8, 6, 12]))),
        ("rewards: got dtype torch.complex64; takes bool, integers", lambda: group_advantages(SCORES.cfloat())),
        ("rewards: got dtype torch.complex64; takes bool, integers", lambda: groups_without_spread(SCORES.cfloat())),
        (
            "rewards: got dtype Int; takes float32, bfloat16, float16 or float64",
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
    message = "d3s_kernels: out of memory: cannot allocate [9, 5] of Float on cuda:0"

    def op(*arguments: object) -> None:
        raise RuntimeError(message)

    with pytest.raises(torch.OutOfMemoryError, match=re.escape(message)):
        ops._with_usual_errors(op)()
