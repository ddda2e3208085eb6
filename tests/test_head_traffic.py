"""What the LM head's backward allocates and multiplies at the shapes of a GPU (H = 3,584, V = 151,936, bfloat16)."""

from __future__ import annotations

import pytest
from head_traffic import GPU, backward

H, V = 3_584, 151_936
MIB = 1 << 20


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("rows", "share", "softcap"), [(4_096, 1.0, None), (32_768, 1.0, None), (32_768, 0.1, None), (4_096, 0.1, 30.0)]
)
def test_peak_memory_is_what_is_documented(rows: int, share: float, softcap: float | None, frozen: bool) -> None:
    """Beyond inputs and outputs: the workspace, 128 MiB, the packed rows, their gradient in float32, and where several
    tiles of rows add to the weight's gradient, one slab of it in float32.
    """
    active = int(share * rows)
    traffic = backward(rows, H, V, active=active, frozen=frozen, softcap=softcap)
    outputs = 2 * rows * H + (0 if frozen else 2 * V * H)
    slab = 4 * 32_768 * H if not frozen and active > 4_096 else 0
    packed = 2 * active * H + 4 * active * H + 2 * active * H  # rows, gradient, gradient in bfloat16
    assert traffic.peak <= outputs + GPU.workspace_bytes + 128 * MIB + packed + slab


def test_rows_that_fit_are_one_tile() -> None:
    """So the weight's gradient is written once, straight to its place, and the weight is read once for each product."""
    traffic = backward(4_096, H, V, active=4_096, frozen=False)
    slabs = -(-V // 32_768)
    assert len(traffic.products) == 3 * slabs
    logits, hidden, weight = traffic.products[:3]
    assert (logits, hidden, weight) == ((4_096, H, 32_768), (4_096, 32_768, H), (32_768, 4_096, H))


def test_more_rows_are_cut_into_tiles_of_about_the_same_height() -> None:
    heights = {rows for rows, terms, _ in backward(5_000, H, V, active=5_000, frozen=True).products if terms == H}
    assert heights == {2_560, 2_440}


def test_a_frozen_weight_has_no_product_of_its_own() -> None:
    trained, frozen = (backward(32_768, H, V, active=32_768, frozen=frozen).products for frozen in (False, True))
    assert len(frozen) == len(trained) * 2 // 3
    assert not [product for product in frozen if product[0] == 32_768]
