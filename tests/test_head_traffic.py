"""What the LM head allocates, multiplies and moves at the shapes of a GPU (H = 3,584, V = 151,936, bfloat16)."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import slow

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from head_traffic import GPU, MIB, PAGE, VOCABULARIES, WIDTHS, backward, forward, table, table_of_parts

from d3s_kernels._lm_head.products import parts_of

H, V = 3_584, 151_936
OF_32_000 = {128: [8, 8, 8, 4], 410: [8, 4, 2, 1], 1_638: [8, 4, 4, 2], 4_096: [1, 1, 2, 1]}
OF_262_144 = {128: [32, 16, 8, 4], 410: [8, 4, 16, 8], 1_638: [16, 8, 4, 4], 4_096: [8, 4, 4, 1]}
INTO = {"into": torch.float32}, {"into": torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"frozen": True}, *INTO], ids=str)
@pytest.mark.parametrize(
    ("rows", "share", "softcap"), [(4_096, 1.0, None), (32_768, 1.0, None), (32_768, 0.1, None), (4_096, 0.1, 30.0)]
)
@pytest.mark.parametrize("vocabulary", [V, slow(50_257, shows="rows that end within a vector")])
def test_peak_memory_is_what_is_documented(
    vocabulary: int, rows: int, share: float, softcap: float | None, options: dict
) -> None:
    """Beyond inputs and outputs: the workspace, 128 MiB, the packed rows, their gradient in float32, and where several
    tiles of rows add to a weight's gradient in half precision, one slab of it in float32.
    """
    active = int(share * rows)
    traffic = backward(rows, H, vocabulary, active=active, softcap=softcap, **options)
    outputs = 2 * rows * H + (0 if options else 2 * vocabulary * H)
    half = options.get("into") != torch.float32 and not options.get("frozen")
    slab = 4 * 32_768 * H if half and active > 4_096 else 0
    packed = 2 * active * H + 4 * active * H + 2 * active * H  # rows, gradient, gradient in bfloat16
    assert traffic.peak <= outputs + GPU.workspace_bytes + 128 * MIB + packed + slab


def test_rows_that_fit_are_one_tile() -> None:
    """So the weight's gradient is written once, straight to its place, and the weight is read once for each product."""
    traffic = backward(4_096, H, V, active=4_096)
    assert len(traffic.products) == 3 * -(-V // 32_768)
    shapes = [each[:3] for each in traffic.products[:3]]
    assert shapes == [(4_096, H, 32_768), (4_096, 32_768, H), (32_768, 4_096, H)]


def test_kept_logits_are_not_computed_again() -> None:
    """The forward needs no workspace beside them, and the backward reads only those of its rows."""
    kept = 4 * 4_096 * V
    assert kept <= forward(4_096, H, V, keeps=True).peak <= kept + MIB
    for active in (4_096, 410):
        again, found = (backward(4_096, H, V, active=active, kept=flag) for flag in (False, True))
        assert [each for each in again.products if each.terms != H] == found.products
        assert found.moved - again.moved <= 0.001 * again.moved
        assert found.peak <= again.peak + MIB


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(128, [32, 16, 8, 4]), (410, [8, 4, 16, 8]), (1_638, [16, 8, 4, 4]), (4_096, [8, 4, 2, 1])],
    ids=str,
)
def test_the_gradient_of_hidden_states_in_parts(rows: int, parts: list[int]) -> None:
    """For H = 896, 2,048, 3,584 and 8,192. The product is the same in all, and the memory is that of the workspace."""
    widths = 896, 2_048, 3_584, 8_192
    for width, number in zip(widths, parts, strict=True):
        options = {"active": rows, "logits_dtype": torch.bfloat16}
        whole, found = (backward(rows, width, V, splits=splits, **options) for splits in (False, True))
        assert max(each.parts for each in found.products) == number
        assert found.operations == whole.operations
        assert found.peak <= 4 * rows * width + max(whole.peak, GPU.workspace_bytes + 2 * V * width + 10 * rows * width)
    assert [parts_of(rows, width, 32_000, 1 << 30) for width in widths] == OF_32_000[rows]
    assert [parts_of(rows, width, 262_144, 1 << 30) for width in widths] == OF_262_144[rows]


def test_parts_need_memory_and_enough_terms() -> None:
    assert parts_of(410, 3_584, V, 0) == parts_of(410, 3_584, V, -5) == parts_of(410, 3_584, 2_047, 99) == 1
    assert [parts_of(410, 3_584, V, room) for room in (1, 14, 15)] == [2, 2, 16]


def test_more_rows_are_cut_into_tiles_of_about_the_same_height() -> None:
    found = backward(5_000, H, V, active=5_000, frozen=True).products
    assert {each.rows for each in found if each.terms == H} == {2_560, 2_440}


def test_a_frozen_weight_has_no_product_of_its_own() -> None:
    trained, frozen = (backward(32_768, H, V, active=32_768, frozen=frozen).products for frozen in (False, True))
    assert len(frozen) == len(trained) * 2 // 3
    assert not [each for each in frozen if each.rows == 32_768]


@pytest.mark.parametrize("rows", [4_096, 32_768])
@pytest.mark.parametrize("vocabulary", [V, slow(50_257, shows="rows that end within a vector")])
def test_outside_of_products_each_logit_is_moved_once(vocabulary: int, rows: int) -> None:
    """The forward reads 4 bytes of each. The backward reads 4 and writes 2. The rest is in proportion to rows x H, and,
    where several tiles of rows add to it, to the slabs of the weight's gradient.
    """
    logits = rows * vocabulary
    assert 4 * logits <= forward(rows, H, vocabulary).moved <= 4.01 * logits
    of_rows = 40 * rows * H  # packed and masked, the gradient rounded and unpacked
    for options in ({}, {"frozen": True}, *INTO):
        slabs = 8 * vocabulary * H if rows > 4_096 else 0
        moved = backward(rows, H, vocabulary, active=rows, **options).moved
        assert 6 * logits <= moved <= 6.001 * logits + of_rows + slabs


@pytest.mark.parametrize("options", INTO, ids=str)
def test_adding_to_the_weights_gradient_reads_and_writes_it_once(options: dict) -> None:
    """Also where 10 % of the rows have a gradient; nothing else of its size is allocated or touched."""
    plain, adding = (backward(4_096, H, V, active=409, **given) for given in ({}, options))
    itemsize = options["into"].itemsize
    assert [each[:3] for each in adding.products] == [each[:3] for each in plain.products]
    moved = sum(each.bytes for each in adding.products) - sum(each.bytes for each in plain.products)
    assert moved == V * H * (2 * itemsize - 2)
    assert adding.moved == plain.moved
    assert adding.peak == plain.peak - 2 * V * H


@pytest.mark.parametrize(
    ("width", "vocabulary"),
    [
        shape if shape == (896, 50_257) else slow(*shape, shows="that this table, too, is what is counted")
        for shape in product(WIDTHS, VOCABULARIES)
    ],
)
def test_the_page_has_what_is_counted(width: int, vocabulary: int) -> None:
    assert table(width, vocabulary) in PAGE.read_text(encoding="utf-8"), "run python tools/head_traffic.py"


@pytest.mark.slow("that the table of parts is what is counted")
def test_the_page_has_the_parts() -> None:
    assert table_of_parts() in PAGE.read_text(encoding="utf-8"), "run python tools/head_traffic.py"
