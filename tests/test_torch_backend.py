"""The ops in plain PyTorch: the bits of the compiled kernels, and unchecked values. test_waits.py has what waits."""

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
