"""The collectives, and the checks before them."""

from __future__ import annotations

import math
import pickle

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


TEXTS = ["", "a", "Maß: 30 €, \N{SNOWMAN}", "long " * 1000]


def texts(ranks: Ranks, shift: int) -> list[str]:
    return ranks.gather_text(TEXTS[(ranks.rank + shift) % len(TEXTS)])


@sizes
def test_texts_of_all_ranks(size: int) -> None:
    for shift in range(len(TEXTS)):
        expected = [TEXTS[(rank + shift) % len(TEXTS)] for rank in range(size)]
        assert world(size).run(texts, shift) == [expected] * size


def nothing(ranks: Ranks) -> list[str]:
    return ranks.gather_text("")


def test_empty_texts() -> None:
    assert world(2).run(nothing) == [["", ""]] * 2


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


ODD = {
    "ratio": math.inf,
    "a small number": 5e-324,
    "text": "a \udcff lone surrogate",
    "a tuple": ([2, 3], "torch.float32"),
    "a type": torch.bfloat16,
    "a tensor": torch.tensor([-0.0, math.inf]),
    "nothing": None,
}


def test_what_is_alike_in_any_form_is_taken() -> None:
    assert world(2).run(agreeing, [ODD] * 2, ["topk_mask"] * 2, [None] * 2, D3S_KERNELS_CHECK="1") == [None] * 2
    other = ODD | {"a type": torch.float16}
    found = world(2).outcomes(agreeing, [ODD, other], ["topk_mask"] * 2, [None] * 2, D3S_KERNELS_CHECK="1")
    assert {str(error) for error in found} == {
        "a type: got 'torch.bfloat16' on rank 0 and 'torch.float16' on rank 1; takes the same on all ranks of the "
        "process group"
    }


def without_pickle(ranks: Ranks, given: list[dict], refuse: list[str | None]) -> str | None:
    """Agrees where nothing can be pickled or unpickled."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a pickle")

    before = dist.distributed_c10d._pickler, dist.distributed_c10d._unpickler, pickle.loads, pickle.dumps
    dist.distributed_c10d._pickler = dist.distributed_c10d._unpickler = pickle.loads = pickle.dumps = refused
    try:
        agreeing(ranks, given, ["topk_mask"] * ranks.size, refuse)
    except ValueError as error:
        return str(error)
    finally:
        dist.distributed_c10d._pickler, dist.distributed_c10d._unpickler, pickle.loads, pickle.dumps = before
    return None


def test_no_rank_unpickles_what_another_sends() -> None:
    run = world(2).run
    assert run(without_pickle, [ODD] * 2, [None] * 2, D3S_KERNELS_CHECK="1") == [None] * 2
    said = run(without_pickle, [{}] * 2, [None, "k: got 0"], D3S_KERNELS_CHECK="1")
    assert said == ["k: got 0 (on rank 1 of 2)"] * 2
