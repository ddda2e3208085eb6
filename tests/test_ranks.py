"""The collectives, and the checks before them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import SIZES, Ranks, world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from d3s_kernels._across_ranks.agreement import agree
from d3s_kernels._groups import ranks_of

sizes = pytest.mark.parametrize("size", SIZES)


def everyones(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    own = torch.arange(6).view(2, 3) + 10 * ranks.rank
    return ranks.gather(own.T), ranks.add_(own.clone()), ranks.gather_number(ranks.rank, own)


@sizes
def test_collectives(size: int) -> None:
    each = torch.stack([torch.arange(6).view(2, 3) + 10 * rank for rank in range(size)])
    for gathered, added, numbers in world(size).run(everyones):
        assert torch.equal(gathered, each.transpose(1, 2))
        assert torch.equal(added, each.sum(0))
        assert numbers.tolist() == list(range(size))


def of_a_mesh(ranks: Ranks) -> tuple[int, int, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "vocabulary"))
    of_mesh = ranks_of(mesh["vocabulary"])
    assert of_mesh.group is mesh.get_group("vocabulary")
    try:
        ranks_of(mesh)
    except ValueError as error:
        return of_mesh.rank, of_mesh.size, str(error)
    raise AssertionError


def test_a_dimension_of_a_mesh_is_a_group() -> None:
    found = world(4).run(of_a_mesh)
    assert [(rank, size) for rank, size, _ in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert found[0][2] == "process_group: got a mesh of 2 dimensions; takes one dimension of it"


def outside(ranks: Ranks) -> str | None:
    some = dist.new_group([0])
    try:
        assert ranks_of(some).size == 1
    except ValueError as error:
        return str(error)
    return None


def test_a_group_that_this_process_is_not_in_is_refused() -> None:
    assert world(2).run(outside) == [None, "process_group: this process is not in it; takes one that it is in"]


def test_other_things_are_no_groups() -> None:
    with pytest.raises(TypeError, match=r"^process_group: got str; takes a torch\.distributed process group"):
        ranks_of("gloo")  # type: ignore[arg-type]


def agreeing(ranks: Ranks, given: list[dict], calls: list[str], refuse: list[str | None]) -> None:
    def check() -> None:
        reason = refuse[ranks.rank]
        if reason is not None:
            raise ValueError(reason)

    agree(ranks, calls[ranks.rank], check, lambda _: given[ranks.rank])


@sizes
def test_what_one_rank_refuses_all_refuse_in_the_same_words(size: int) -> None:
    refuse = [None] * (size - 1) + ["ratio: got 2.0; takes a number in (0, 1]"]
    same = [{}] * size, ["topk_mask"] * size
    found = world(size).outcomes(agreeing, *same, refuse, D3S_KERNELS_CHECK="1")
    said = f"ratio: got 2.0; takes a number in (0, 1] (on rank {size - 1} of {size})"
    assert [(type(error), str(error)) for error in found] == [(ValueError, said)] * size
    # Without D3S_KERNELS_CHECK only the rank that refuses raises.
    found = world(size).outcomes(agreeing, *same, refuse)
    assert found[:-1] == [None] * (size - 1)
    assert str(found[-1]) == refuse[-1]


@sizes
@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ({"ratio": 0.1}, {"ratio": 0.2}, "ratio: got 0.1 on rank 0 and 0.2 on rank "),
        ({"k": torch.tensor(3)}, {"k": torch.tensor(4)}, "k: got 3 on rank 0 and 4 on rank "),
        ({"offsets": torch.arange(90)}, {"offsets": torch.arange(91)}, "offsets: got [0, 1, 2"),
    ],
)
def test_what_differs_between_ranks_is_refused_by_all(size: int, first: dict, last: dict, said: str) -> None:
    given = [first] * (size - 1) + [last]
    same = given, ["topk_mask"] * size, [None] * size
    found = world(size).outcomes(agreeing, *same, D3S_KERNELS_CHECK="1")
    assert len({str(error) for error in found}) == 1
    assert isinstance(found[0], ValueError)
    assert str(found[0]).startswith(said)
    assert str(found[0]).endswith("takes the same on all ranks of the process group")
    assert world(size).run(agreeing, *same) == [None] * size


def test_different_calls_are_refused_by_all() -> None:
    found = world(2).outcomes(
        agreeing, [{"k": 1}, {"ratio": 0.5}], ["topk_mask", "group_advantages"], [None] * 2, D3S_KERNELS_CHECK="1"
    )
    assert {str(error) for error in found} == {
        "call: got 'topk_mask' on rank 0 and 'group_advantages' on rank 1; takes the same on all ranks of the process "
        "group"
    }
