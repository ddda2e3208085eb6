"""The ops in plain PyTorch: the bits of the compiled kernels, unchecked values, no waiting for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    NAN,
    assert_identical,
    assert_same,
    assert_same_bits,
    assert_unchecked_spans,
    random_logits,
    ratio_results,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from d3s_kernels._dispatch import backends
from d3s_kernels._torch import KERNELS, softmax_state


def plain(name: str, *arguments: Any, **options: Any) -> Any:
    """Calls a kernel without the checks before it, as on a GPU."""
    return KERNELS[name](*arguments, **options)


# ---- the compiled kernels' bits --------------------------------------------------------------------------------------


def test_the_same_ratios() -> None:
    compiled = ratio_results()
    with backends.forced("torch"):
        assert_same(ratio_results(), compiled)


def test_a_group_has_the_same_bits_padded_and_packed() -> None:
    rewards = torch.randn(40, 23)
    padded = torch.cat([rewards, torch.full((40, 9), NAN)], 1)
    packed = plain("group_advantages", rewards.flatten(), torch.arange(41) * 23)
    assert_same_bits(plain("group_advantages", padded)[:, :23], packed.view(40, 23))


def test_blocks_of_rows_cover_strided_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(5, 6, 7, 40)[:, 1:, ::2].transpose(0, 1)
    expected = plain("logprob_entropy", logits.contiguous(), None)
    for block in (1, 3 * 40, 4 * 40, 30 * 40):
        monkeypatch.setattr(softmax_state, "_BLOCK", block)
        assert_same(plain("logprob_entropy", logits, None), expected)


# ---- unchecked values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, -99, 50, 2**31, -(2**63)])
def test_a_label_that_is_no_token(label: int) -> None:
    logits, labels = random_logits(3, 50), torch.tensor([3, label, -100])
    logprob, *statistics = plain("logprob_entropy", logits, labels)
    assert logprob.isnan().tolist() == [False, True, False]
    assert not statistics[0].isnan().any()
    given = torch.ones(3), torch.ones(3), logits, labels, *statistics
    gradients = [plain("logprob_entropy_backward", *given)]
    for first in (None, 0) if label < 0 else (None,):  # with a first token, the size of the vocabulary is unknown
        gradients.append(logits.clone())
        plain("logprob_entropy_backward_", *given[:2], gradients[-1], *given[3:], first)
    for gradient in gradients:
        assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == [False, True, False]


def test_spans_of_a_sampling_mask() -> None:
    assert_unchecked_spans(plain)


@pytest.mark.parametrize("offsets", [[0, 10, 5, 20], [0, 40], [-9, 20], [0, 2**31 - 1, 20], [20, 0], [7], [5, 9, 12]])
def test_bad_offsets_stay_within_bounds(offsets: list[int]) -> None:
    """Values outside the offsets are not selected, or NaN. Those inside get the same results as with good offsets."""
    values, cuts, each = torch.randn(20), torch.tensor(offsets), torch.ones(len(offsets) - 1)
    good = cuts.clamp(0, 20).cummax(0).values
    begin, end = int(good[0]), int(good[-1])
    inside, part = values[begin:end], good - begin
    for name, arguments, expected, otherwise in (
        ("topk_mask", (values, 0.5), (inside, 0.5), False),
        ("max_variance_select", (values, 2), (inside, 2), False),
        ("group_advantages", (values,), (inside,), NAN),
        ("importance_ratio", (values, 0 * values), (inside, 0 * inside), NAN),
    ):
        options = {"level": "sequence"} if name == "importance_ratio" else {}
        full = torch.full((20,), otherwise)
        full[begin:end] = plain(name, *expected, offsets=part, **options)
        assert_identical(plain(name, *arguments, offsets=cuts, **options), full)
    mask, _, _ = plain("select_tokens", values, each, 0.5, offsets=cuts)
    assert not mask[:begin].any()
    assert not mask[end:].any()


def test_a_bad_quota_selects_nothing() -> None:
    for ratio in (0.0, -1.0, 1.5, NAN):
        mask, count, threshold = plain("select_tokens", torch.rand(100), torch.tensor(1.0), None, torch.tensor(ratio))
        assert (mask.any().item(), count.item(), threshold.item()) == (False, 0, torch.inf), ratio
    for keep in (torch.tensor(0), torch.tensor(-1), torch.tensor(-(2**63))):
        for pooled in (False, True):
            assert not plain("max_variance_select", torch.rand(5, 9), None, keep, pooled=pooled).any(), keep
            assert not plain("topk_mask", torch.rand(5, 9), k_tensor=keep, pooled=pooled).any(), keep


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, torch.inf])
def test_a_bad_temperature_gives_nan(temperature: float) -> None:
    each = torch.tensor([1.0, temperature])
    _, entropy, _, _ = plain("logprob_entropy", random_logits(2, 9), None, 1.0, each)
    assert entropy.isnan().tolist() == [False, True]


def test_a_bad_group_gives_nan_and_is_in_no_others_sums() -> None:
    values = torch.rand(3, 4)
    groups = torch.tensor([[0, 15, 16, 127], [-1, -128, 3, 3], [0, 16, 3, 64]], dtype=torch.int8)
    good = groups < 16
    for call in (
        lambda ids: plain("adaptive_clip", values, ids, None, None, 9),
        lambda ids: plain("importance_ratio", values, 0 * values, None, ids, None, "entropy_group", "old"),
    ):
        found, clean = call(groups), call(groups.where(good, -1))
        assert_same_bits(found[good], clean[good])
        assert found[~good].isnan().all()


# ---- no waiting for the device ---------------------------------------------------------------------------------------


def vocabulary_calls() -> None:
    logits, labels, mask = torch.rand(5, 2, 9000), torch.ones(5, 2).long(), torch.ones(5, 2).bool()
    logprob, *statistics = plain("logprob_entropy", logits, labels, 1.0, torch.rand(5, 2), mask)
    plain("logprob_entropy_backward", logprob, logprob, logits, labels, *statistics, 1.0, torch.rand(()), mask)
    state, tile, rows = torch.rand(10, 4), logits.flatten(0, 1), [one.flatten() for one in (logprob, *statistics)]
    plain("softmax_state_", state, tile, labels.flatten(), 8192)
    plain("softmax_state_finish", state)
    plain("logprob_entropy_backward_", rows[0], rows[0], tile, labels.flatten(), *rows[1:], 8192)
    plain("select_tokens_from_logits", logits, torch.rand(5), None, torch.rand(()), mask)
    supports, heat = (torch.ones(70).int(), torch.ones(11).long(), True), torch.rand(5, 2)
    dense, exceeded = plain("support_rows", logits, *supports[:2], 4, mask)
    results = [torch.rand(5, 2) for _ in range(4)]
    plain("support_logprob_entropy_", *results, logits, labels, *supports, 1.0, heat, dense, exceeded)
    gradient = torch.zeros(5, 2, 9000)
    given = logprob, logprob, logits, labels, *results[1:], gradient, *supports
    plain("support_logprob_entropy_backward_", *given, 1.0, None, mask, None)
    plain("support_softmax_state_", state, tile, labels.flatten(), *supports, 8192, 1.0, None, None, exceeded)


def segment_calls() -> None:
    for values, offsets in ((torch.rand(4, 30), None), (torch.rand(90), torch.ones(4).int())):
        mask, groups = values > 0.5, values.to(torch.int8)
        for pooled in (False, True):
            plain("topk_mask", values, k_tensor=torch.ones(()).int(), mask=mask, offsets=offsets, pooled=pooled)
            plain("select_tokens", values, values, None, torch.rand(()), mask, offsets, None, pooled, True)
            plain("max_variance_select", values, None, torch.ones(()).long(), mask, offsets, None, pooled)
            plain("entropy_groups", values, [0.3, 0.8], mask, offsets, None, pooled)
        for scale in ("group", "batch"):
            plain("group_advantages", values, offsets, scale)
        for level, ids in (("token", None), ("sequence", None), ("entropy_group", groups)):
            ratio = plain("importance_ratio", values, values, mask, ids, offsets, level, "old")
            plain("importance_ratio_backward", values, ratio, mask, ids)
        plain("adaptive_clip", values, groups, mask, offsets, 100)
        plain("compact", mask, 50)


@pytest.mark.parametrize("calls", [vocabulary_calls, segment_calls])
def test_no_value_is_looked_at(calls: Callable[[], None]) -> None:
    """Fake tensors have no values: reading one, or making a shape from it, is an error."""
    with FakeTensorMode():
        calls()
