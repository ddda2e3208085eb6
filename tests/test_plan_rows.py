"""plan_rows and exchange_rows: every kept row ends up in one place, and every rank has the same number of rows."""

import pytest
import torch
import torch.distributed as dist
from cases.draw import Draw
from helpers import rounds
from ranks import SIZES, Ranks, assert_all_refuse, assert_told_apart, world
from torch import Tensor

from d3s_kernels import distributed
from d3s_kernels.distributed import RowPlan, exchange_rows, plan_rows

sizes = pytest.mark.parametrize("size", SIZES)
ROUNDS = rounds(100)
ELSEWHERE = torch.device("meta")
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int16, torch.int64,
    torch.complex64,
)  # fmt: skip


def random_masks(draw: Draw, size: int, divisible: bool) -> list[Tensor]:
    """Masks of every rank's rows. Some ranks have no rows, some keep none, and some keep all."""
    rows = draw.parts(draw.integer(0, 40), size)
    masks = [torch.rand(n, generator=draw.generator()) < draw.choice((0.0, 0.3, 0.7, 1.0)) for n in rows]
    surplus = sum(int(mask.sum()) for mask in masks) % size if divisible else 0
    for mask in masks:
        for row in mask.nonzero().flatten()[:surplus].tolist():
            mask[row] = False
            surplus -= 1
    return masks


def check_plan(plan: RowPlan, plans: list[RowPlan], rank: int, masks: list[Tensor]) -> None:
    """Compares one rank's plan with the masks of all ranks and with the other plans."""
    kept = [int(mask.sum()) for mask in masks]
    expected = sum(kept) // len(masks)
    assert plan.rows == expected
    assert len(plan.staying) + sum(plan.receive_counts) == expected
    assert len(plan.leaving) == sum(plan.send_counts)
    assert plan.receive_counts == [other.send_counts[rank] for other in plans]
    assert plan.send_counts[rank] == 0
    both_ways = torch.cat([plan.staying, plan.leaving])
    assert torch.equal(both_ways, masks[rank].nonzero().flatten()[: len(both_ways)])


def any_masks(ranks: Ranks, seed: int, drop_last: bool) -> int:
    """Checks random masks, and returns how many rows moved in all rounds."""
    draw = Draw(seed)
    moved = 0
    for _ in range(ROUNDS):
        masks = random_masks(draw, ranks.size, divisible=not drop_last)
        mask = masks[ranks.rank]
        plan = plan_rows(mask, ranks.group, drop_last=drop_last)
        plans: list = [None] * ranks.size
        dist.all_gather_object(plans, plan, group=ranks.group)
        check_plan(plan, plans, ranks.rank, masks)
        # Only the last kept rows in rank order are dropped, and no more than needed.
        everyones = [(rank, row) for rank, mask in enumerate(masks) for row in mask.nonzero().flatten().tolist()]
        everyones = everyones[: plan.rows * ranks.size]
        taken = [sum(rank == other for other, _ in everyones) for rank in range(ranks.size)]
        assert plan.moved == sum(max(n - plan.rows, 0) for n in taken)

        names = torch.stack([torch.full((len(mask),), ranks.rank), torch.arange(len(mask))], 1)
        got = exchange_rows(names, plan, ranks.group)
        assert got.shape == (plan.rows, 2)
        assert torch.equal(got[: len(plan.staying)], names[plan.staying])
        senders = got[len(plan.staying) :, 0].tolist()
        assert senders == sorted(senders)
        all_rows: list = [None] * ranks.size
        dist.all_gather_object(all_rows, got.tolist(), group=ranks.group)
        assert sorted(tuple(row) for rows in all_rows for row in rows) == everyones
        moved += plan.moved
    return moved


@sizes
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_kept_row_ends_once_somewhere(size: int, drop_last: bool) -> None:
    moved = world(size).run(any_masks, int(torch.randint(2**31, ())), drop_last)
    assert moved == [moved[0]] * size
    assert moved[0] > 0


def any_tensors(ranks: Ranks, seed: int) -> None:
    draw = Draw(seed)
    masks, generator = random_masks(draw, ranks.size, divisible=True), draw.generator()
    plan = plan_rows(masks[ranks.rank], ranks.group)
    begin = sum(len(mask) for mask in masks[: ranks.rank])
    # A second exchange moves the index of every row, which says what must have arrived.
    places = exchange_rows(torch.arange(plan.planned) + begin, plan, ranks.group)
    columns, expected = {}, {}
    for dtype in DTYPES:
        for trailing in ((), (3,), (2, 5), (0,)):
            shape = sum(map(len, masks)), *trailing
            everyones = torch.randint(0, 2, shape, generator=generator).to(dtype)
            own = everyones[begin : begin + plan.planned]
            if trailing == (2, 5):  # not contiguous, and requires a gradient
                own = own.mT.contiguous().mT.requires_grad_(dtype.is_floating_point)
            columns[f"{dtype} {trailing}"] = own
            expected[f"{dtype} {trailing}"] = everyones[places]
    together = exchange_rows(columns, plan, ranks.group)
    assert list(together) == list(columns)
    for name, column in columns.items():
        for found in (together[name], exchange_rows(column, plan, ranks.group)):
            assert found.dtype == column.dtype
            assert not found.requires_grad
            assert torch.equal(found, expected[name])
    assert exchange_rows({}, plan, ranks.group) == {}


@sizes
def test_any_dtype_and_shape(size: int) -> None:
    for _ in range(3):
        world(size).run(any_tensors, int(torch.randint(2**31, ())))


def undivided(ranks: Ranks) -> None:
    plan_rows(torch.ones(int(ranks.rank == 0), dtype=torch.bool), ranks.group)


@sizes
def test_what_cannot_be_divided_is_refused_by_all(size: int) -> None:
    found = world(size).outcomes(undivided)
    said = f"mask: 1 rows are kept on {size} ranks; takes a multiple of the ranks, or drop_last=True"
    assert [(type(error), str(error)) for error in found] == [(ValueError, said)] * size


# ---- what is refused ------------------------------------------------------------------------------------------------

PLAN = RowPlan(torch.arange(2), torch.arange(0), [0, 0], [0, 0], 2, 0, 2)
BAD = {
    "plan_rows": [
        ("mask: got list; takes a tensor", {"mask": [True]}),
        ("mask: got shape [1, 1]; takes [rows]", {"mask": torch.ones(1, 1, dtype=torch.bool)}),
        ("mask: got dtype torch.float32; takes bool or integers", {"mask": torch.ones(1)}),
        ("drop_last: got 1; takes True or False", {"mask": torch.ones(1, dtype=torch.bool), "drop_last": 1}),
    ],
    "exchange_rows": [
        ("values: got int; takes a tensor or a dict of tensors", {"values": 3}),
        ("b: got int; takes a tensor", {"values": {"a": torch.zeros(2), "b": 3}}),
        ("values: got shape []; takes a row for each of the 2 planned for", {"values": torch.zeros(())}),
        ("a: got shape [3]; takes a row for each of the 2 planned for", {"values": {"a": torch.zeros(3)}}),
        ("values: is on meta; takes a tensor on the plan's, cpu", {"values": torch.zeros(2, device=ELSEWHERE)}),
        ("plan: got tuple; takes what plan_rows returns", {"values": torch.zeros(2), "plan": tuple(PLAN)}),
        (
            "process_group: got one of 2 ranks; takes that of the plan, of 3",
            {"values": torch.zeros(2), "plan": PLAN._replace(send_counts=[0, 0, 0])},
        ),
    ],
}


GOOD = {
    "plan_rows": {"mask": torch.ones(2, dtype=torch.bool)},
    "exchange_rows": {"values": torch.zeros(2), "plan": PLAN},
}


def call(ranks: Ranks, function: str, each: list[dict]) -> None:
    getattr(distributed, function)(**each[ranks.rank], process_group=ranks.group)


@pytest.mark.parametrize(("function", "said", "bad"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_bad_arguments(function: str, said: str, bad: dict) -> None:
    assert_all_refuse(call, function, bad=GOOD[function] | bad, said=said, good=GOOD[function])


@pytest.mark.parametrize("values", [torch.zeros(2, 3), torch.zeros(2).half(), {"b": torch.zeros(2)}])
def test_what_differs_between_ranks(values: object) -> None:
    good = GOOD["exchange_rows"]
    assert_told_apart(call, "exchange_rows", good=good, other=good | {"values": values}, said="values: got {'values': ")
