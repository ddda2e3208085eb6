"""SamplingMask, its constructors on data laid out as engines and trainers send them, and masks made from logits."""

from __future__ import annotations

import math
import pickle
from array import array

import numpy as np
import pytest
import torch
from helpers import INF, NAN, assert_identical
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d3s_kernels import SamplingMask, sampling_mask_from_logits
from d3s_kernels.support import from_logits

SPANS = [[7, 2, 150_000], [], [5], [0, 1]]
lists = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=6)


# ---- constructors ----------------------------------------------------------------------------------------------------


def test_lists_of_an_engine() -> None:
    """vLLM and SGLang: a list of id lists, one for each generated token, in any order."""
    mask = SamplingMask.from_lists(SPANS)
    assert (mask.rows, len(mask.token_ids)) == (4, 6)
    assert_identical(mask.token_ids, torch.tensor([7, 2, 150_000, 5, 0, 1], dtype=torch.int32))
    assert_identical(mask.offsets, torch.tensor([0, 3, 3, 4, 6]))
    assert SamplingMask.from_lists([np.array(span, np.int32) for span in SPANS]).to_lists() == SPANS
    assert SamplingMask.from_lists([]).rows == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padded_ids(dtype: torch.dtype) -> None:
    """SkyRL: int32 [tokens, top_k] with trailing -1; in a batch of sequences, [B, T, K]."""
    padded = torch.tensor([[7, 2, 150_000], [-1, -1, -1], [5, -1, -1], [0, 1, -1]], dtype=dtype)
    for ids in (padded, padded.view(2, 2, 3), padded.T.contiguous().T):
        assert SamplingMask.from_padded(ids).to_lists() == SPANS
    assert_identical(SamplingMask.from_padded(padded).to_padded(), padded.int())
    assert SamplingMask.from_padded(padded[:0]).to_padded().shape == (0, 0)
    assert SamplingMask.from_lists([[], []]).to_padded().shape == (2, 0)
    assert SamplingMask.from_padded(padded[:, :0]).to_lists() == [[]] * 4


def test_bytes_of_a_trainer() -> None:
    """prime-rl: the bytes of int32 ids, and of an int32 count for each position; 0 is the whole vocabulary."""
    ids, counts = array("i", [7, 2, 150_000, 5, 0, 1]).tobytes(), array("i", [3, 0, 1, 2]).tobytes()
    assert SamplingMask.from_counts(ids, counts).to_lists() == SPANS
    assert SamplingMask.from_counts(torch.frombuffer(bytearray(ids), dtype=torch.int32), counts).to_lists() == SPANS
    assert SamplingMask.from_counts(b"", b"").rows == 0


WRONG = (
    (lambda: SamplingMask.from_lists([[1], [2, "x"]]), TypeError, "supports: got 'x' at row 1; takes ids of tokens"),
    (lambda: SamplingMask.from_lists([[1], None]), TypeError, "supports: got NoneType at row 1; takes a list of ids"),
    (lambda: SamplingMask.from_lists([[2**31]]), ValueError, "supports: got 2147483648 at row 0; takes ids of tokens"),
    (lambda: SamplingMask.from_lists([[1, 2.5]]), TypeError, "supports: got 2.5 at row 0; takes ids of tokens"),
    (lambda: SamplingMask.from_padded(torch.tensor([[1, -2]])), ValueError, "token_ids: got -2 at row 0"),
    (lambda: SamplingMask.from_padded(torch.ones(2, 2)), ValueError, r"got shape \[2, 2\] of torch.float32"),
    (lambda: SamplingMask.from_counts(b"123", b""), ValueError, "token_ids: got 3 bytes; takes those of int32"),
    (lambda: SamplingMask.from_counts([1], b""), TypeError, "token_ids: got list; takes a tensor, or bytes"),
    (lambda: made([1], [-1]), ValueError, "counts: got -1 at row 0; takes at least 0"),
    (lambda: made([1], [2]), ValueError, "offsets: got 2 last; takes at most the number of token_ids, 1"),
    (lambda: made([2**31], [1]), ValueError, "token_ids: got 2147483648; takes ids of tokens"),
    (lambda: made([-1, 2], [2]), ValueError, "token_ids: got -1; takes ids of tokens"),
    (lambda: plain([-1], [0, 1]), ValueError, "token_ids: got -1; takes ids of tokens, at least 0"),
    (lambda: SamplingMask.from_lists([[3], [-5]]), ValueError, "supports: got -5 at row 1; takes ids of tokens"),
    (lambda: SamplingMask.from_padded(torch.tensor([[2**32 + 5]])), ValueError, "token_ids: got 4294967301 at row 0"),
    (lambda: SamplingMask.from_lists(SPANS).index_select([0], capacity=-1), ValueError, "capacity: got -1; takes at"),
    (lambda: plain([1], [0, 1, 0]), ValueError, "offsets: got 1 and then 0 at row 1; takes some that do not decrease"),
    (lambda: plain([1], [1, 1]), ValueError, "offsets: got 1 first; takes 0"),
    (lambda: plain([1], []), ValueError, r"offsets: got shape \[0\]"),
    (lambda: SamplingMask(torch.ones(1), torch.zeros(1).long()), ValueError, r"token_ids: got shape \[1\] of torch"),
    (lambda: SamplingMask(1, torch.zeros(1).long()), TypeError, "token_ids: got int; takes a tensor"),
    (lambda: SamplingMask.from_lists(SPANS).index_select([4]), ValueError, r"rows: got 4; takes rows in \[0, 4\)"),
    (lambda: SamplingMask.from_lists(SPANS).index_select(torch.ones(2)), ValueError, "rows: got shape"),
    (lambda: SamplingMask.cat([]), ValueError, "masks: got none; takes at least one"),
)


def made(ids: list[int], counts: list[int]) -> SamplingMask:
    return SamplingMask.from_counts(torch.tensor(ids), torch.tensor(counts))


def plain(ids: list[int], offsets: list[int]) -> SamplingMask:
    return SamplingMask(torch.tensor(ids, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.parametrize(("call", "error", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_what_is_refused(call: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


# ---- rows ------------------------------------------------------------------------------------------------------------


@given(lists, st.data())
def test_a_choice_of_rows(spans: list[list[int]], data: st.DataObject) -> None:
    """Also of rows that come twice."""
    rows = data.draw(st.lists(st.integers(0, len(spans) - 1), max_size=8)) if spans else []
    mask = SamplingMask.from_lists(spans)
    assert mask.index_select(rows).to_lists() == [spans[row] for row in rows]
    assert mask.index_select(torch.tensor(rows, dtype=torch.int32)).to_lists() == [spans[row] for row in rows]


@given(st.lists(lists, min_size=1, max_size=4))
def test_masks_one_after_the_other(parts: list[list[list[int]]]) -> None:
    """Also of masks with ids that belong to no row."""
    masks = [SamplingMask.from_lists(spans) for spans in parts]
    loose = [SamplingMask(torch.cat([mask.token_ids, mask.token_ids[:1]]), mask.offsets) for mask in masks]
    whole = [span for spans in parts for span in spans]
    assert SamplingMask.cat(masks).to_lists() == SamplingMask.cat(loose).to_lists() == whole


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are not looked at."""
    monkeypatch.setattr("d3s_kernels.support.sampling_mask.is_known", lambda tensor: False)


@pytest.mark.usefixtures("on_a_gpu")
def test_a_choice_of_rows_on_a_gpu_has_room_for_what_there_is() -> None:
    mask = SamplingMask.from_lists(SPANS)
    chosen = mask.index_select([3, 0])
    assert len(chosen.token_ids) == len(mask.token_ids)
    assert chosen.to_lists() == [SPANS[3], SPANS[0]]
    assert mask.index_select([0, 0, 3], capacity=8).to_lists() == [SPANS[0], SPANS[0], SPANS[3]]
    too_many = mask.index_select([0, 0, 3])  # 8 ids, and room for 6
    assert (too_many.offsets.diff() < 0).all()
    with pytest.raises(ValueError, match="a choice of rows had more ids than its capacity"):
        too_many.to_lists()
    for masks in ([too_many, mask], [mask, too_many], [mask, too_many, mask]):
        assert (SamplingMask.cat(masks).offsets.diff() < 0).all()
    assert (too_many.index_select([1]).offsets.diff() < 0).all()
    assert mask.index_select([]).rows == 0


def test_it_travels() -> None:
    mask = SamplingMask.from_lists(SPANS)
    assert pickle.loads(pickle.dumps(mask)).to_lists() == SPANS
    assert mask.to("cpu").to_lists() == SPANS
    assert mask.to("meta").device.type == "meta"
    assert repr(mask) == "SamplingMask(rows=4, token_ids=6, device='cpu')"


# ---- from logits -----------------------------------------------------------------------------------------------------

OPTIONS = (
    {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1.0, "min_p": 0.0, "top_k": 99}, {"top_p": 0.8, "temperature": 2.5},
)  # fmt: skip


def kept_of(mask: SamplingMask, columns: int) -> Tensor:
    kept = torch.zeros(mask.rows, columns, dtype=torch.bool)
    for row, span in enumerate(mask.to_lists()):
        assert len(set(span)) == len(span)
        kept[row, span] = True
    return kept


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transformers_keeps_the_same(options: dict[str, float]) -> None:
    transformers = pytest.importorskip("transformers")
    logits = 3 * torch.randn(40, 60)
    scores = logits.double() / options.get("temperature", 1.0)
    for name, warper in (
        ("top_k", transformers.TopKLogitsWarper), ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):  # fmt: skip
        if name in options:
            scores = warper(options[name])(None, scores)
    assert torch.equal(kept_of(sampling_mask_from_logits(logits, **options), 60), scores.isfinite())


def by_hand(row: list[float], top_k: int | None, top_p: float | None, min_p: float | None) -> set[int]:
    """vLLM's rules: min-p of all tokens, then the k best and what ties with the last, then top-p of those."""
    weight = {token: math.exp(z) for token, z in enumerate(row)}
    if min_p is not None:
        weight = {token: w for token, w in weight.items() if w >= min_p * max(weight.values())}
    if top_k is not None:
        kth = sorted(weight.values(), reverse=True)[:top_k][-1]
        weight = {token: w for token, w in weight.items() if w >= kth}
    if top_p is not None:
        ascending, left, total = sorted(weight, key=lambda token: (weight[token], -token)), 0.0, sum(weight.values())
        for token in ascending[:-1]:
            left += weight[token]
            if left <= (1 - top_p) * total:
                del weight[token]
    return set(weight)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_vllms_rules_by_hand(options: dict[str, float]) -> None:
    logits = 3 * torch.randn(40, 60)
    mask = sampling_mask_from_logits(logits, order="vllm", **options)
    options = dict(options)
    scores = (logits.double() / options.pop("temperature", 1.0)).tolist()
    rules = [options.get(name) for name in ("top_k", "top_p", "min_p")]
    assert [set(span) for span in mask.to_lists()] == [by_hand(row, *rules) for row in scores]


def test_the_orders_differ() -> None:
    """After min-p fewer tokens share the probability, so that top-p keeps fewer of them."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    options = {"top_p": 0.6, "min_p": 0.3}
    assert sampling_mask_from_logits(logits, **options).to_lists() == [[0, 1]]
    assert sampling_mask_from_logits(logits, order="vllm", **options).to_lists() == [[0]]


def test_ties() -> None:
    """Top-k keeps what ties with the k-th; top-p the lower ids."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0]])
    assert sampling_mask_from_logits(logits, top_k=3).to_lists() == [[0, 1, 2, 3, 4]]
    assert sampling_mask_from_logits(torch.zeros(1, 8), top_p=0.5).to_lists() == [[0, 1, 2, 3]]
    assert sampling_mask_from_logits(torch.zeros(1, 8), top_p=0.51).to_lists() == [[0, 1, 2, 3, 4]]


def test_shapes_and_dtypes() -> None:
    logits = torch.randn(2, 3, 50)
    logits[..., ::7] = -INF
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        mask = sampling_mask_from_logits(logits.to(dtype), top_p=0.9)
        assert mask.rows == 6
        assert not kept_of(mask, 50)[:, ::7].any()
    assert sampling_mask_from_logits(logits[:0], top_k=2).rows == 0
    assert sampling_mask_from_logits(logits[0, 0]).rows == 1


BAD = (
    ({"top_k": 0}, "top_k: got 0; takes at least 1"), ({"top_p": 0.0}, r"top_p: got 0.0; takes a number in \(0, 1\]"),
    ({"top_p": NAN}, "top_p: got nan"), ({"min_p": 1.5}, r"min_p: got 1.5; takes a number in \[0, 1\]"),
    ({"temperature": 0.0}, "temperature: got 0.0; takes a number above 0"),
    ({"temperature": 1e-38}, r"temperature: got 1e-38; takes a number above 0, in \[1e-15, 1e15\]"),
    ({"order": "sglang"}, "order: got 'sglang'; takes one of 'transformers', 'vllm'"),
    ({"max_kept": 3}, "max_kept: got 3; takes at least what row 0 keeps, 50"),
    ({"max_kept": 0}, "max_kept: got 0; takes at least 1"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_options(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampling_mask_from_logits(torch.randn(2, 50), **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_that_cannot_be_sampled_from(value: float, options: dict[str, float]) -> None:
    logits = torch.randn(3, 50)
    logits[1, slice(None) if value == -INF else 7] = value
    with pytest.raises(ValueError, match="logits: got NaN, infinity or no finite number in row 1"):
        sampling_mask_from_logits(logits, **options)


def test_rows_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50)
    whole = sampling_mask_from_logits(logits, top_p=0.9).to_lists()
    monkeypatch.setattr(from_logits, "_LOGITS_AT_ONCE", 120)
    assert sampling_mask_from_logits(logits, top_p=0.9).to_lists() == whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_dtype_of_torch_does_not_matter(dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(40, 60)
    before = sampling_mask_from_logits(logits, top_p=0.99, min_p=0.001).to_lists()
    torch.set_default_dtype(dtype)
    try:
        assert sampling_mask_from_logits(logits, top_p=0.99, min_p=0.001).to_lists() == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_whole_probability_keeps_everything() -> None:
    assert sampling_mask_from_logits(torch.tensor([[0.0, -28.5, -80.0]]), top_p=1.0).to_lists() == [[0, 1, 2]]


@pytest.mark.usefixtures("on_a_gpu")
def test_a_bad_row_on_a_gpu_has_an_id_that_no_token_has() -> None:
    logits = torch.randn(4, 50)
    logits[1], logits[2] = NAN, 0.0
    mask = sampling_mask_from_logits(logits, top_k=6, max_kept=8)
    lengths = [len(span) for span in mask.to_lists()]
    assert lengths == [6, 1, 1, 6]
    assert mask.to_lists()[1:3] == [[-1], [-1]]
