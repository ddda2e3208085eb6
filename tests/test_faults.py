"""What is said of values on a GPU that nobody has checked. Compiled kernels note them: tested on the emulated kernels
and on a GPU. For Triton and plain PyTorch they are looked for, which is tested everywhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import d3s_kernels as d3s
from d3s_kernels._dispatch import faults
from d3s_kernels._dispatch.backends import forced_backend

noting = pytest.mark.skipif(
    not faults.watches() or forced_backend in ("triton", "torch"),
    reason="needs compiled CUDA kernels, or emulated ones",
)
OP = torch.ops.d3s_kernels


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, values are not checked, and nothing was said yet."""
    monkeypatch.delenv("D3S_KERNELS_CHECK", raising=False)
    monkeypatch.setattr(faults, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        d3s.synchronize_checks()
    faults._told.clear()


class Case(NamedTuple):
    op: str
    arguments: dict[str, Any]
    fault: str


VALUES = torch.randn(10)
ROWS: dict[str, Any] = {"logits": torch.randn(4, 50), "labels": None}
SPANS = {"support_ids": torch.tensor([3, 4, 9], dtype=torch.int32), "support_offsets": torch.tensor([0, 1, 1, 2, 3])}
TOKENS = {"entropy": VALUES.abs(), "advantages": torch.ones(()), "ratio": 0.5}
WITH_OFFSETS = {
    "topk_mask": {"scores": VALUES, "ratio": 0.5},
    "select_tokens": TOKENS | {"pooled": False},
    "select_tokens, pooled": TOKENS | {"advantages": torch.ones(2)},
    "max_variance_select": {"values": VALUES, "keep": 2},
    "group_advantages": {"rewards": VALUES},
    "importance_ratio": {"logprob": VALUES, "old_logprob": VALUES, "level": "sequence"},
    "entropy_groups": {"entropy": VALUES, "quantiles": [0.5]},
    "adaptive_clip": {"entropy": VALUES, "groups": torch.ones(10, dtype=torch.int8), "mask": None, "vocab_size": 9},
    "topk_order_keys": {"scores": VALUES, "advantages": torch.ones(2)},
}
BAD_OFFSETS = {
    "late": [1, 3, 10], "decreasing": [0, 11, 10], "short": [0, 3, 9], "long": [0, 3, 2**40], "negative": [0, -3, 10],
}  # fmt: skip
CASES: dict[str, Case] = {}


def case(name: str, op: str, fault: str, **arguments: Any) -> None:
    CASES[name] = Case(op, arguments, fault)


for name, given in WITH_OFFSETS.items():
    for how, cuts in BAD_OFFSETS.items():
        op = name.partition(",")[0]
        case(f"{name}, offsets that are {how}", op, "offsets", **given | {"offsets": torch.tensor(cuts)})
for ratio in (0.0, -1.0, 1.5, torch.nan):
    given = {"ratio_tensor": torch.tensor(ratio)}
    case(f"topk_mask, ratio {ratio}", "topk_mask", "ratio", scores=VALUES, **given)
    steps = {"search": torch.zeros(1, 3, dtype=torch.int64), "counts": torch.ones(1, 2048, dtype=torch.int64)}
    case(f"a step, ratio {ratio}", "topk_choose_digit_", "ratio", **steps, shift=21, **given)
    logits = {"logits": ROWS["logits"], "advantages": torch.ones(())}
    case(f"select_tokens_from_logits, ratio {ratio}", "select_tokens_from_logits", "ratio", **logits, **given)
for number in (0, -(2**40)):
    case(f"topk_mask, k {number}", "topk_mask", "keep", scores=VALUES, k_tensor=torch.tensor(number))
    keep = torch.tensor(number)
    case(f"max_variance_select, keep {number}", "max_variance_select", "keep", values=VALUES, keep_tensor=keep)
for what, fault, changed in (
    *((f"label {label}", "labels", {"labels": torch.tensor([3, label, -100, 9])}) for label in (-1, 50, 2**40)),
    *(
        (f"temperature {heat}", "temperature", {"temperature_tensor": torch.tensor([1, 1, heat, 1])})
        for heat in (0.0, -1.0, 1e20, torch.nan)
    ),
    ("id -1", "supports", SPANS | {"support_ids": torch.tensor([3, -1, 9], dtype=torch.int32)}),
    ("id 50", "supports", SPANS | {"support_ids": torch.tensor([3, 4, 50], dtype=torch.int32)}),
    ("spans that overlap", "supports", SPANS | {"support_offsets": torch.tensor([0, 2, 1, 2, 3])}),
    ("spans that end late", "supports", SPANS | {"support_offsets": torch.tensor([0, 1, 1, 2, 4])}),
    ("a bound on dense rows", "dense_rows", SPANS | {"max_dense_rows": 0}),
):
    op = "support_logprob_entropy" if "support_ids" in changed else "logprob_entropy"
    case(f"logprob_entropy, {what}", op, fault, **ROWS | changed)
for token in (-2, 50, 2**40):
    ids = {"token_ids": torch.tensor([[0, token], [1, -1], [2, 2], [3, 4]]), "labels": torch.full((4,), -100)}
    case(f"token_logprobs, id {token}", "token_logprobs", "token_ids", logits=ROWS["logits"], **ids)
high = {"groups": torch.full((10,), 16, dtype=torch.int8), "offsets": None}
case("a group", "adaptive_clip", "groups", **WITH_OFFSETS["adaptive_clip"] | high)


def said(case: Case) -> str:
    return f"{faults.public_name(case.op, case.arguments)} met, on a GPU, {faults.FAULTS[case.fault]}"


@noting
@pytest.mark.parametrize("name", CASES)
def test_noted_by_kernels(name: str) -> None:
    case = CASES[name]
    getattr(OP, case.op)(**case.arguments)
    with pytest.warns(RuntimeWarning) as told:
        d3s.synchronize_checks()
    (message,) = (str(warning.message) for warning in told)
    assert told[0].filename == __file__
    assert message.startswith(f"d3s_kernels: {said(case)}")
    assert not say_nothing()


def say_nothing() -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        d3s.synchronize_checks()
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("name", CASES)
def test_looked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setenv("D3S_KERNELS_CHECK", "late")
    faults.look(case.op, case.arguments)
    with pytest.warns(RuntimeWarning, match=re.escape(said(case))):
        d3s.synchronize_checks()
    assert not say_nothing()


GOOD = {
    "ratio_tensor": torch.tensor(1.0),
    "k_tensor": torch.tensor(1),
    "keep_tensor": torch.tensor(1),
    "offsets": torch.tensor([0, 10, 10]),
    "labels": torch.tensor([0, 49, -100, 9]),
    "temperature_tensor": torch.tensor([1e-15, 1e15, 1, 1]),
    "groups": torch.full((10,), 15, dtype=torch.int8),
    "max_dense_rows": 1,
    "token_ids": torch.tensor([[0, 49], [1, -1], [2, 2], [3, 4]]),
    **SPANS,
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_said_of_good_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, given, _ = CASES[name]
    good = {key: GOOD.get(key, value) if value is not None else None for key, value in given.items()}
    monkeypatch.setenv("D3S_KERNELS_CHECK", "late")
    faults.look(op, good)
    getattr(OP, op)(**good)
    assert not say_nothing()


@noting
def test_the_next_call_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = torch.tensor(0.0)
    assert not d3s.topk_mask(VALUES, bad).any()
    with pytest.warns(RuntimeWarning, match="topk_mask met, on a GPU, a ratio") as told:
        d3s.compact(torch.ones(3, dtype=torch.bool), 2)
    assert told[0].filename == __file__  # the user's line, at any depth of ours
    d3s.topk_mask(VALUES, bad)
    assert not say_nothing()  # once for each op and fault
    monkeypatch.setenv("D3S_KERNELS_CHECK", "error")
    d3s.topk_mask(VALUES, bad)
    with pytest.raises(RuntimeError, match="topk_mask met, on a GPU, a ratio"):
        d3s.group_advantages(VALUES)
    d3s.group_advantages(VALUES)  # said once


@noting
def test_the_head() -> None:
    hidden, weight, labels = torch.randn(4, 8), torch.randn(50, 8), torch.tensor([1, 2, 3, 4])
    d3s.linear_logprob_entropy(hidden, weight, labels, temperature=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    with pytest.warns(RuntimeWarning, match="linear_logprob_entropy met, on a GPU, a temperature"):
        d3s.synchronize_checks()


def test_nothing_is_looked_for_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (None, "1"):
        if setting:
            monkeypatch.setenv("D3S_KERNELS_CHECK", setting)
        faults.look("topk_mask", {"scores": VALUES, "ratio_tensor": torch.tensor(0.0)})
        assert not say_nothing()


@pytest.mark.parametrize(("enumeration", "names"), [("Fault", faults.FAULTS), ("PublicOp", faults.PUBLIC_OPS)])
def test_the_names_are_those_of_the_kernels(enumeration: str, names: Iterable[str]) -> None:
    source = (Path(__file__).parents[1] / "csrc" / "ops" / "faults.h").read_text(encoding="utf-8")
    found = re.search(rf"enum class {enumeration} \{{(.*?)\}}", source, re.DOTALL)
    assert found
    in_order = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)[2:].lower() for name in re.findall(r"k\w+", found[1])]
    assert in_order == list(names)
