"""The collectives, and the checks before them."""

from __future__ import annotations

import math
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import SIZES, Ranks, world
from torch.distributed.device_mesh import init_device_mesh

from d3s_kernels._collectives import ranks_of
from d3s_kernels.distributed.agreement import agree

sizes = pytest.mark.parametrize("size", SIZES)


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


def agreed(given: list[dict], *, call: str = "topk_mask", refused: str | None = None, check: bool = True) -> list[Any]:
    """What each rank raises, or None; the last one makes this call, and refuses an argument with this message."""
    size = len(given)
    told = ["topk_mask"] * (size - 1) + [call], [None] * (size - 1) + [refused]
    return world(size).outcomes(agreeing, given, *told, **({"D3S_KERNELS_CHECK": "1"} if check else {}))


ODD = {
    "ratio": math.inf,
    "a small number": 5e-324,
    "text": "a \udcff lone surrogate",
    "a tuple": ([2, 3], "torch.float32"),
    "a type": torch.bfloat16,
    "a tensor": torch.tensor([-0.0, math.inf]),
    "nothing": None,
}
ODDER = ODD | {"a type": torch.float16}


def test_what_is_alike_in_any_form_is_taken() -> None:
    assert agreed([ODD] * 2) == [None] * 2


# What is given on the first ranks, and on the last one; the call of the last one; what is said.
DIFFERENT: dict[str, tuple[dict, dict, str, str]] = {
    "k": ({"k": torch.tensor(3)}, {"k": torch.tensor(4)}, "topk_mask", "k: got 3 on rank 0 and 4 on rank "),
    "offsets": ({"offsets": torch.arange(90)}, {"offsets": torch.arange(91)}, "topk_mask", "offsets: got [0, 1, 2"),
    "call": ({"k": 1}, {"ratio": 0.5}, "compact", "call: got 'topk_mask' on rank 0 and 'compact' on rank "),
    "type": (ODD, ODDER, "topk_mask", "a type: got 'torch.bfloat16' on rank 0 and 'torch.float16' on rank "),
}


@sizes
@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_between_ranks_is_refused_by_all(size: int, case: str) -> None:
    first, last, call, said = DIFFERENT[case]
    given = [first] * (size - 1) + [last]
    found = agreed(given, call=call)
    assert len({str(error) for error in found}) == 1
    assert isinstance(found[0], ValueError)
    assert str(found[0]).startswith(said)
    assert str(found[0]).endswith("takes the same on all ranks of the process group")
    assert agreed(given, call=call, check=False) == [None] * size


def without_pickle(ranks: Ranks, given: list[dict], refuse: list[str | None]) -> str | None:
    """Agrees where nothing can be pickled or unpickled."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a pickle")

    of_torch = patch.multiple(dist.distributed_c10d, _pickler=refused, _unpickler=refused)
    with of_torch, patch.multiple(pickle, loads=refused, dumps=refused):
        try:
            agreeing(ranks, given, ["topk_mask"] * ranks.size, refuse)
        except ValueError as error:
            return str(error)
    return None


def test_no_rank_unpickles_what_another_sends() -> None:
    run = world(2).run
    assert run(without_pickle, [ODD] * 2, [None] * 2, D3S_KERNELS_CHECK="1") == [None] * 2
    said = run(without_pickle, [{}] * 2, [None, "k: got 0"], D3S_KERNELS_CHECK="1")
    assert said == ["k: got 0 (on rank 1 of 2)"] * 2
