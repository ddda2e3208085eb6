"""A vocabulary shared by ranks: logits and the LM head, forward and backward, in 2, 3 and 4 processes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.draw import Draw
from cases.row import Arguments
from cases.table import FUNCTIONS
from helpers import (
    INF,
    NAN,
    assert_entropy,
    assert_gradient,
    assert_logprob,
    assert_same,
    assert_same_bits,
    random_labels,
    rounds,
    slow,
)
from megatron_core import Summed
from ranks import SIZES, Ranks, assert_told_apart, on_ranks, world
from test_head import Head, allowance, random_head
from test_sampling_masks import random_spans, touched_by
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from traffic import asked

import d3s_kernels as d3s
from d3s_kernels import distributed, reference
from d3s_kernels.check.compare import compare_here
from d3s_kernels.distributed import vocab_parallel_linear_logprob_entropy as shared_head
from d3s_kernels.distributed import vocab_parallel_logprob_entropy as shared_logits
from d3s_kernels.distributed.vocabulary import _shards_of_first_calls

sizes = pytest.mark.parametrize("size", SIZES)
CPU = torch.device("cpu")
OF_IDS = "token_logprobs", "topk_logprobs"
SEEDS = rounds(80)  # for each function and number of ranks


def with_gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    return [*(result.detach() for result in results), *torch.autograd.grad(results, leaves, cotangents)]


def assert_alike(ranks: Ranks, *values: Tensor) -> None:
    """The values are bit-identical on all ranks."""
    for value in values:
        for other in ranks.gather(value.detach()):
            assert_same_bits(other, value.detach())


# ---- any arguments ---------------------------------------------------------------------------------------------------


def shard_of(name: str, ranks: Ranks, first: int, last: int, other: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The function of one process, computed by all ranks. This one has the tokens from ``first`` to ``last``. ``other``
    asks for another form of the same: a copied shard, or ranks that leave the sum of hidden states' gradients to us.
    """
    function = getattr(distributed, f"vocab_parallel_{name}")

    def call(**given: Any) -> tuple[Tensor, ...]:
        if "logits" in given:
            whole = Summed.apply(given.pop("logits"), ranks.group)[..., first:last]  # strided and misaligned
            given["logits_shard"] = whole.clone() if other else whole
        else:
            names = [name for name in ("weight", "bias") if given.get(name) is not None]
            given |= {name: Summed.apply(given[name], ranks.group)[first:last] for name in names}
            given["weight_shard"] = given.pop("weight")
            if other and "topk" not in name:
                given |= {"hidden": Summed.apply(given["hidden"], ranks.group), "sum_hidden_grad": False}
        results = function(**given, vocab_start=first, process_group=ranks.group)
        assert_alike(ranks, *results)
        return results

    return call


def as_one_process(ranks: Ranks, name: str, seeds: list[int]) -> None:
    for seed in seeds:
        draw = Draw(seed)
        given = FUNCTIONS[name].draw(draw)
        vocabulary = given["logits"].shape[-1] if "logits" in given else len(given["weight"])
        edges = [0, *accumulate(draw.parts(vocabulary, ranks.size))]
        sharded = shard_of(name, ranks, edges[ranks.rank], edges[ranks.rank + 1], draw.flag())
        try:
            found = compare_here(FUNCTIONS[name], sharded, given, CPU, "cpu")
        except Exception as error:
            raise AssertionError(f"{name}, Draw({seed}), shards {edges}: {error}") from error
        for difference in found:
            assert difference.agrees, f"{name}, Draw({seed}), shards {edges}: {difference}"


@sizes
@pytest.mark.parametrize("name", [f"{head}{of}" for of in ("logprob_entropy", *OF_IDS) for head in ("", "linear_")])
def test_shards_give_what_one_process_gives(name: str, size: int) -> None:
    world(size).run(as_one_process, name, torch.randint(2**31, (SEEDS,)).tolist())


def results_and_gradients(call: Callable[..., Sequence[Tensor]], given: Arguments) -> list[Tensor]:
    leaves = [part for part in given.values() if isinstance(part, Tensor) and part.requires_grad]
    results = call(**given)
    return with_gradients(results, leaves, [torch.ones_like(result) for result in results]) if leaves else [*results]


@on_ranks(2)
def a_group_of_one_rank_is_the_local_op(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.size, 1), mesh_dim_names=("data", "vocabulary"))["vocabulary"]
    for name, of_shards, renamed in (
        ("logprob_entropy", shared_logits, {"logits": "logits_shard"}),
        ("linear_logprob_entropy", shared_head, {"weight": "weight_shard"}),
    ):
        for seed in range(rounds(40)):
            given = FUNCTIONS[name].draw(Draw(seed))
            own = {renamed.get(argument, argument): part for argument, part in given.items()}
            found = results_and_gradients(of_shards, own | {"vocab_start": 0, "process_group": mesh})
            assert_same(found, results_and_gradients(getattr(d3s, name), given))


# ---- logits ----------------------------------------------------------------------------------------------------------


@on_ranks(*SIZES)
def a_row_without_a_distribution_is_nan_on_all_ranks(ranks: Ranks) -> None:
    """Only -inf, a NaN, or +inf: of the last three, one rank alone knows."""
    torch.manual_seed(2)
    logits = torch.randn(5, 10)
    logits[0], logits[4, 1:] = -INF, -INF
    logits[1, 3], logits[2, 9] = NAN if ranks.rank == 0 else 1.0, INF if ranks.rank == ranks.size - 1 else 1.0
    logits.requires_grad_()
    results = shared_logits(logits, torch.arange(5), 10 * ranks.rank, ranks.group)
    for part in with_gradients(results, [logits], [torch.ones(5)] * 2):
        rows = part.view(5, -1).isnan()
        assert rows.all(1).tolist() == rows.any(1).tolist() == [True, True, True, False, False]


@on_ranks(*SIZES)
def a_label_that_no_rank_has_gives_nan(ranks: Ranks) -> None:
    labels, cotangents = torch.tensor([3, 500, -100, 500]), [torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.ones(4)]
    logits, hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 10), (4, 6), (10, 6)))
    for function, leaves in ((shared_logits, [logits]), (shared_head, [hidden, weight])):
        results = function(*leaves, labels, 10 * ranks.rank, ranks.group)
        logprob, entropy, slope, *_ = with_gradients(results, leaves, cotangents)
        assert logprob.isnan().tolist() == [False, True, False, True]
        assert not entropy.isnan().any()
        assert slope.isnan().all(1).tolist() == slope.isnan().any(1).tolist() == [False, True, False, False]


# ---- the LM head -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def shards_of_many_tiles(ranks: Ranks) -> None:
    """Several tiles of tokens and of rows; shards are larger than a tile."""
    torch.manual_seed(5)
    head, labels = random_head(30, vocabulary=40_000), random_labels(30, vocabulary=40_000)
    first, last = (20_001, 40_000) if ranks.rank else (0, 20_001)
    cotangents = list(torch.randn(2, 30))
    whole = head.requiring_grad()
    expected = whole(d3s.linear_logprob_entropy, labels)
    wanted = Head(*torch.autograd.grad(expected, whole.leaves, cotangents)).shard(first, last)
    own = head.shard(first, last).requiring_grad()
    place = {"vocab_start": first, "process_group": ranks.group, "workspace_bytes": 300_000}
    results = own(shared_head, labels, **place)
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(results, own.leaves, cotangents), wanted, strict=True):
        assert_gradient(ours, theirs.double())


@on_ranks(*SIZES)
def kept_tokens_of_shards(ranks: Ranks) -> None:
    """Long spans across shards beside short ones; a rank may have none of a row's tokens, or all. Each rank adds the
    gradient of its kept tokens to its own tensor, and writes to no other row of it.
    """
    torch.manual_seed(9)
    spans, labels = random_spans([2, 3000, 1, 1, 5, 0, 40] * 3, 5003)
    counts = spans.offsets.diff() > 0
    head, cotangents = random_head(len(labels), width=64, vocabulary=5003), list(torch.randn(2, len(labels)))
    options = {"temperature": 0.7, "sampling_mask": spans, "mask": counts, "max_dense_rows": 0}
    first, last = 5003 * ranks.rank // ranks.size, 5003 * (ranks.rank + 1) // ranks.size
    exact = head.exact()
    expected = exact(reference.linear_logprob_entropy, labels, **options)
    wanted = Head(*torch.autograd.grad(expected, exact.leaves, [g.double() for g in cotangents])).shard(first, last)
    off = allowance(head, labels, cotangents, **options)

    into, touched = torch.full((last - first, 64), torch.nan), touched_by(spans, 5003)[first:last]
    into[touched] = 0
    own = head.shard(first, last).requiring_grad()
    place = {"vocab_start": first, "process_group": ranks.group, "weight_grad_into": into}
    results = own(shared_head, labels, **place, **options)
    torch.autograd.backward(results, cotangents)
    assert_alike(ranks, *results, own.hidden.grad)
    assert_logprob(results[0].detach(), expected[0].detach())
    assert_entropy(results[1].detach(), expected[1].detach())
    assert own.weight.grad is None
    assert into[~touched].isnan().all()
    assert_gradient(own.hidden.grad, wanted.hidden, off["hidden"].item())
    assert_gradient(into[touched], wanted.weight[touched], off["weight"].item())
    assert_gradient(own.bias.grad, wanted.bias, off["bias"].item())
    for result in (*results, own.hidden.grad):
        assert not result[spans.offsets.diff() < 2].any()


@on_ranks(*SIZES)
def only_rows_with_a_gradient_are_communicated(ranks: Ranks) -> None:
    """Ranks gather the rows' states. For the gradient they reduce a byte per row, and rows with a gradient."""
    rows, width, kept = 50, 12, torch.arange(50) % 10 == 4
    labels, place = torch.arange(rows) % (20 * ranks.size), (20 * ranks.rank, ranks.group)
    cases = (
        ({}, rows, 5),
        ({"max_grad_rows": 8}, rows, 8),
        ({"mask": kept}, 5, 5),
        ({"mask": kept, "max_rows": 9, "max_grad_rows": 6}, 9, 6),
    )
    for dtype, (options, gathered, packed) in product((torch.float32, torch.bfloat16), cases):
        torch.manual_seed(3)
        hidden, weight = (torch.randn(n, width, dtype=dtype).requires_grad_() for n in (rows, 20))
        with asked() as told:
            logprob, entropy = shared_head(hidden, weight, labels, *place, **options)
            assert told == [("all_gather", (4 * gathered,), torch.float32)]
            del told[:]
            loss = torch.where(kept, logprob - 0.1 * entropy, 0).sum()
            of_hidden, _ = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
            assert told == [("all_reduce", (rows,), torch.uint8), ("all_reduce", (packed, width), torch.float32)]
            del told[:]
            terms = shared_head(hidden, weight, labels, *place, **options, sum_hidden_grad=False)
            del told[:]
            (term,) = torch.autograd.grad(sum(torch.where(kept, result, 0).sum() for result in terms), hidden)
            assert term[kept].any()
            assert not term[~kept].any()
            assert told == []
        with asked() as told:  # the gradient of the weight is local
            results = shared_head(hidden.detach(), weight, labels, *place, **options)
            torch.autograd.grad(sum(torch.where(kept, result, 0).sum() for result in results), weight)
            assert [name for name, *_ in told] == ["all_gather"]
        assert (of_hidden[~kept] == 0).all()
        assert (of_hidden[kept] != 0).any(-1).all()


@on_ranks(*SIZES)
def ranks_agree_on_the_rows(ranks: Ranks) -> None:
    """Ranks differ in where the gradient is 0, which is an error. They still agree on the rows, and none waits."""
    torch.manual_seed(4)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(10, 8)
    logprob, _ = shared_head(hidden, weight, torch.arange(9), 10 * ranks.rank, ranks.group)
    cotangent = torch.zeros(9)
    cotangent[[ranks.rank, 5]] = 1.0
    with asked() as told:
        (gradient,) = torch.autograd.grad(logprob, hidden, cotangent)
    assert told[1] == ("all_reduce", (ranks.size + 1, 8), torch.float32)
    assert (gradient != 0).any(-1).tolist() == [row < ranks.size or row == 5 for row in range(9)]
    assert_alike(ranks, gradient)


@on_ranks(2)
def the_gradient_of_a_shard_is_added(ranks: Ranks) -> None:
    """Each rank adds its gradient to its own tensor, here one of them a DTensor."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (ranks.size,))
    head, labels = random_head(9, vocabulary=8 * ranks.size, bias=False), random_labels(9, vocabulary=8 * ranks.size)
    hidden, weight = head.hidden.requires_grad_(), distribute_tensor(head.weight, mesh, [Shard(0)]).requires_grad_()
    into = distribute_tensor(torch.ones_like(head.weight), mesh, [Shard(0)])
    local = {"weight_grad_into": into.to_local(), "vocab_start": 8 * ranks.rank, "process_group": ranks.group}
    plain = sum(shared_head(hidden, weight, labels))
    of_hidden, of_weight = torch.autograd.grad(plain.sum(), (hidden, weight))
    each = ((weight, {"weight_grad_into": into}), (weight.to_local(), local))
    for times, (given, options) in enumerate(each, start=1):
        loss = sum(shared_head(hidden, given, labels, **options)).sum()
        gradient, none = torch.autograd.grad(loss, (hidden, weight), allow_unused=True)
        assert none is None or not none.full_tensor().any()  # torch 2.11 makes zeros of None for a DTensor
        assert_same_bits(gradient, of_hidden)
        torch.testing.assert_close(into.to_local(), 1 + times * of_weight.to_local())
    labels[3] = 8 * ranks.size  # no rank has it
    loss = sum(shared_head(hidden, weight, labels, weight_grad_into=into)).sum()
    assert torch.autograd.grad(loss, hidden)[0][3].isnan().all()
    assert into.to_local().isnan().all()


# ---- DTensor ---------------------------------------------------------------------------------------------------------


def on_a_mesh(ranks: Ranks, vocabulary: int, data: int) -> None:
    """The vocabulary is on the mesh's last dimension; rows, on a mesh of two dimensions, are on its first."""
    torch.manual_seed(vocabulary)
    shape = (data, ranks.size // data) if data > 1 else (ranks.size,)
    mesh = init_device_mesh("cpu", shape)
    rows = slice(None) if data == 1 else slice(3 * mesh.get_local_rank(0), 3 * mesh.get_local_rank(0) + 3)
    logits, labels = torch.randn(3 * data, 2, vocabulary), random_labels(3 * data, 2, vocabulary=vocabulary)
    head = random_head(3 * data, 2, vocabulary=vocabulary)
    cotangents = list(torch.randn(2, 3 * data, 2))

    sharded = [*[Shard(0)] * (data > 1), Shard(2)]
    leaf = distribute_tensor(logits, mesh, sharded).requires_grad_()
    by_rows = [*[Shard(0)] * (data > 1), Replicate()]
    for given in (labels[rows], distribute_tensor(labels, mesh, by_rows)):
        results = shared_logits(leaf, given, temperature=0.7)
        assert not any(isinstance(result, DTensor) for result in results)
        whole = logits.clone().requires_grad_()
        expected = d3s.logprob_entropy(whole, labels, temperature=0.7)
        torch.testing.assert_close(results, tuple(all_rows[rows] for all_rows in expected), rtol=1e-6, atol=1e-5)
        (slope,) = torch.autograd.grad(results, leaf, [g[rows] for g in cotangents])
        (wanted,) = torch.autograd.grad(expected, whole, cotangents)
        assert isinstance(slope, DTensor)
        assert slope.placements == tuple(sharded)
        assert_gradient(slope.full_tensor(), wanted.double())

    of_weight = [*[Replicate()] * (data > 1), Shard(0)]
    weight, bias = (distribute_tensor(tensor, mesh, of_weight).requires_grad_() for tensor in head[1:])
    hidden = head.hidden[rows].clone().requires_grad_()
    results = shared_head(hidden, weight, labels[rows], bias=bias)
    torch.autograd.backward(results, [g[rows] for g in cotangents])
    own = head._replace(hidden=head.hidden[rows]).requiring_grad()
    expected = own(d3s.linear_logprob_entropy, labels[rows])
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-5)
    wanted = torch.autograd.grad(expected, own.leaves, [g[rows] for g in cotangents])
    assert_gradient(hidden.grad, wanted[0].double())
    for leaf, gradient in zip((weight, bias), wanted[1:], strict=True):
        assert leaf.grad.placements == tuple(of_weight)
        tokens = slice(mesh.get_local_rank(data > 1) * -(-vocabulary // shape[-1]), None)
        local = leaf.grad.to_local()
        assert_gradient(local, gradient[tokens][: len(local)].double())
    replicated = distribute_tensor(head.hidden, mesh, by_rows).requires_grad_()
    results = shared_head(replicated, weight, labels[rows], bias=bias.to_local())
    (slope,) = torch.autograd.grad(results, replicated, [g[rows] for g in cotangents])
    assert_gradient(slope.to_local(), wanted[0].double())


@pytest.mark.parametrize("vocabulary", [2, 9, 41])  # with 2 tokens, not all ranks have some
@pytest.mark.parametrize(("size", "data"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_dtensors(size: int, data: int, vocabulary: int) -> None:
    world(size).run(on_a_mesh, vocabulary, data)


@on_ranks(4)
def dtensors_that_are_refused(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "vocabulary"))
    logits, labels, weight, hidden = torch.randn(4, 6), torch.arange(4), torch.randn(6, 8), torch.randn(4, 8)

    def cut(whole: Tensor, *placements: Any) -> DTensor:
        return distribute_tensor(whole, mesh, placements)

    def of_five_tokens(local: int) -> DTensor:
        return DTensor.from_local(torch.randn(4, local), mesh, by_tokens.placements, shape=(4, 5), stride=(5, 1))

    copies, twice, mixed = (Replicate(), Replicate()), (Shard(1), Shard(1)), (Shard(1), Shard(0))
    by_tokens, head = cut(logits, Replicate(), Shard(1)), cut(weight, Replicate(), Shard(0))
    place = ranks.rank % 2
    uneven, longer = of_five_tokens(3 - place), of_five_tokens(2 + place)
    assert uneven.to_local().shape[1] == 3 - place
    shared_logits(uneven, labels, vocab_size=5)
    part = f"logits_shard: got a DTensor with {2 + place} of 5 tokens on rank {place} of 2; "
    got, one_of_each = "got a DTensor with placements", cut(labels, Replicate(), Shard(0))
    cuts = "takes Shard({}), which cuts the vocabulary, on one dimension of the mesh, and Replicate{} on the others"
    both, of_head = cuts.format(1, ", or a Shard of rows,"), cuts.format(0, "")
    known = "takes None where logits_shard is a DTensor, which says it"
    copied = "takes Replicate on the ranks that share the vocabulary"
    as_weight = "takes one that is cut as weight_shard, or this rank's part"
    group, bias = mesh["vocabulary"], cut(weight[:, 0], *copies)
    for call, begin, end in (
        (lambda: shared_logits(cut(logits, *copies), labels), f"logits_shard: {got} {copies}; ", both),
        (lambda: shared_logits(cut(logits, *twice), labels), f"logits_shard: {got} {twice}; ", both),
        (lambda: shared_logits(by_tokens, labels, vocab_start=0), "vocab_start: got 0; ", known),
        (lambda: shared_logits(by_tokens, labels, process_group=group), "process_group: got DeviceMesh", known),
        (lambda: shared_logits(by_tokens, one_of_each), f"labels: {got}", copied),
        (lambda: shared_head(hidden, cut(weight, *twice), labels), f"weight_shard: {got} {twice}; ", of_head),
        (lambda: shared_head(hidden, cut(weight, *mixed), labels), f"weight_shard: {got} {mixed}; ", of_head),
        (lambda: shared_head(hidden, head, labels, bias=bias), f"bias: {got}", as_weight),
        (
            lambda: shared_logits(uneven, labels, vocab_size=6),
            "vocab_size: got 6; ",
            "5, as the DTensor logits_shard has",
        ),
        (lambda: shared_logits(longer, labels), part, f"cut evenly, {3 - place} tokens there"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(begin)}.*{re.escape(end)}$"):
            call()


# ---- arguments -------------------------------------------------------------------------------------------------------


def call_with(ranks: Ranks, head: bool, each: list[dict[str, Any]]) -> None:
    """A good call, except for the arguments that ``each`` changes on this rank."""
    torch.manual_seed(8)
    good: dict[str, Any] = {"labels": torch.arange(4), "vocab_start": 10 * ranks.rank, "process_group": ranks.group}
    if head:
        good |= {"hidden": torch.randn(4, 6), "weight_shard": torch.randn(10, 6)}
    else:
        good |= {"logits_shard": torch.randn(4, 10)}
    changed = {name: value(ranks) if callable(value) else value for name, value in each[ranks.rank].items()}
    (shared_head if head else shared_logits)(**good | changed)


def tokens_on_the_last(ranks: Ranks) -> Tensor:
    return torch.zeros(10 * (ranks.rank == ranks.size - 1), 6)


# test_errors.py has what is refused in one process too; of that, a case of each function and kind of check is here.
BAD_LOGITS: list[tuple[dict[str, Any], str]] = [
    ({"process_group": None}, "TypeError: process_group: got None; takes None only where logits_shard is a DTensor"),
    ({"vocab_start": None}, "TypeError: vocab_start: got None; takes None only where logits_shard is a DTensor"),
    ({"process_group": "gloo"}, "TypeError: process_group: got str; takes a torch.distributed process group"),
    ({"logits_shard": [1.0]}, "TypeError: logits_shard: got list; takes a tensor"),
    ({"vocab_start": -3}, "ValueError: vocab_start: got -3; takes at least 0"),
    ({"vocab_start": 1.5}, "TypeError: vocab_start: got 1.5; takes a whole number"),
    ({"vocab_size": 0}, "ValueError: vocab_size: got 0; takes at least 1"),
    ({"vocab_size": 2.5}, "TypeError: vocab_size: got 2.5; takes a whole number"),
    ({"labels": torch.tensor([0, -5, 1, 2])}, "ValueError: labels: got -5 at row 1"),
    ({"temperature": torch.ones(3)}, "ValueError: temperature: got shape [3]"),
]
BAD_HEAD: list[tuple[dict[str, Any], str]] = [
    ({"weight_shard": torch.zeros(10, 6).double()}, "ValueError: weight_shard: got dtype torch.float64"),
    ({"labels": torch.tensor([0, -101, 1, 2])}, "ValueError: labels: got -101; takes -100 (no target) or"),
    ({"max_rows": -1}, "ValueError: max_rows: got -1; takes at least 0"),
    ({"temperature": -1.0, "weight_shard": tokens_on_the_last}, "ValueError: temperature: got -1"),
    ({"vocab_start": -3}, "ValueError: vocab_start: got -3; takes at least 0"),
]
BAD = [*((False, *case) for case in BAD_LOGITS), *((True, *case) for case in BAD_HEAD)]


@pytest.mark.parametrize(("head", "changed", "said"), BAD, ids=[said.split(";")[0] for *_, said in BAD])
def test_what_is_refused(head: bool, changed: dict[str, Any], said: str) -> None:
    """All ranks refuse a call that is wrong on all of them, before any rank waits."""
    for error in world(2).outcomes(call_with, head, [changed] * 2):
        assert f"{type(error).__name__}: {error}".startswith(said), error


ONE_EACH = d3s.SamplingMask(torch.arange(4).int(), torch.arange(5))
FIRST, OTHER = torch.arange(4), torch.tensor([0, 1, 2, 4])
SHORT, LEAF = {"logits_shard": torch.zeros(3, 10), "labels": FIRST[:3]}, torch.zeros(4, 6, requires_grad=True)
TOKENS = "vocab_start: got tokens [{}, {}) on rank 0, [{}, {}) on rank 1; takes shards that"
DIFFERENT: list[tuple[bool, dict[str, Any], dict[str, Any], str]] = [
    (False, {}, {"labels": OTHER}, "labels: got [0, 1, 2, 3] on rank 0 and [0, 1, 2, 4] on rank 1; takes the same"),
    (False, {}, {"temperature": 0.5}, "temperature: got 1.0 on rank 0 and 0.5 on rank 1; takes the same"),
    (False, {}, {"mask": FIRST < 3}, "mask: got None on rank 0 and [True, True, True, False] on rank 1"),
    (False, SHORT, {}, "the rows of logits_shard: got [3] on rank 0"),
    (False, {}, {"sampling_mask": ONE_EACH}, "sampling_mask: got None on rank 0 and [0, 1, 2, 3] on rank 1; takes the"),
    (False, {"label_outside": "include"}, {}, "label_outside: got 'include' on rank 0 and 'nan' on rank 1"),
    (False, {}, {"labels": FIRST.float()}, "labels: got dtype torch.float32; takes int64 or int32 (on rank 1 of 2)"),
    (False, {}, {"vocab_start": -3}, "vocab_start: got -3; takes at least 0 (on rank 1 of 2)"),
    (False, {}, {"vocab_start": 9}, TOKENS.format(0, 10, 9, 19)),
    (False, {}, {"vocab_start": 11}, TOKENS.format(0, 10, 11, 21)),
    (False, {"vocab_start": 2}, {"vocab_start": 12}, TOKENS.format(2, 12, 12, 22)),
    (False, {"vocab_size": 20}, {}, "vocab_size: got 20 on rank 0 and None on rank 1; takes the same"),
    (True, {}, {"hidden": LEAF}, "a gradient of hidden: got False on rank 0 and True"),
    (True, {}, {"max_grad_rows": 2}, "max_grad_rows: got None on rank 0 and 2 on rank 1"),
    (True, {}, {"logit_softcap": 2.0}, "logit_softcap: got None on rank 0 and 2.0 on rank 1"),
    (True, {}, {"weight_shard": torch.zeros(10, 5)}, "weight: got shape [10, 5]; takes [V, H] with the H of hidden, 6"),
    (True, {}, {"vocab_start": 8}, TOKENS.format(0, 10, 8, 18)),
]


@pytest.mark.parametrize(("head", "first", "second", "said"), DIFFERENT, ids=[said[:60] for *_, said in DIFFERENT])
def test_what_all_refuse_when_asked(head: bool, first: dict, second: dict, said: str) -> None:
    assert_told_apart(call_with, head, good=first, other=second, said=said)


@sizes
def test_tokens_of_nobody_are_refused_if_the_vocabulary_is_known(size: int) -> None:
    tokens = 10 * size
    for token in (tokens - 1, tokens):
        labels = {"labels": torch.tensor([0, 1, token, -100])}
        kept = d3s.SamplingMask(torch.tensor([0, 1, 2, token, 3]).int(), torch.tensor([0, 1, 2, 4, 5]))
        takes = f"labels: got {token}; takes -100 (no target) or a token in [0, {tokens})"
        for head, changed, said in (
            (False, labels, takes),
            (True, labels, takes),
            (False, {"sampling_mask": kept}, f"sampling_mask: got id {token}; takes tokens in [0, {tokens})"),
        ):
            for given, environment in ((changed, {"D3S_KERNELS_CHECK": "1"}), (changed | {"vocab_size": tokens}, {})):
                for error in world(size).outcomes(call_with, head, [given] * size, **environment):
                    assert error is None if token < tokens else str(error).startswith(said), error


@on_ranks(3, D3S_KERNELS_CHECK="1")
def shards_in_any_order(ranks: Ranks) -> None:
    """Shards need not be in the order of the ranks, and an empty shard may start anywhere."""
    torch.manual_seed(9)
    logits, labels = torch.randn(5, 30), torch.arange(5) * 6
    first, last = [(20, 30), (0, 20), (7, 7)][ranks.rank]
    own, group = logits[:, first:last], dist.new_group()
    for place in (first, first + (first == last)):
        found = shared_logits(own, labels, place, group, vocab_size=30)
        torch.testing.assert_close(found, d3s.logprob_entropy(logits, labels), rtol=1e-6, atol=1e-5)


# ---- the size of the vocabulary --------------------------------------------------------------------------------------


def new_group(_: Ranks) -> dist.ProcessGroup:
    """A group without earlier calls."""
    group = dist.new_group()
    assert group is not None
    return group


def after_all_twenty(ranks: Ranks) -> int:
    return 20 * ranks.rank


WHOLE_LOGITS, WHOLE_WEIGHT = {"logits_shard": torch.zeros(4, 20)}, {"weight_shard": torch.zeros(20, 6)}


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("wrong", [(0, 1), (0,), (1,)])
def test_the_whole_vocabulary_in_place_of_a_shard(wrong: tuple[int, ...], head: bool, checked: str) -> None:
    """Megatron-LM#7452: with the place of the whole, the shards follow one another; with the place of the shard, they
    overlap. Both ranks say what both have, also if only one of them is wrong.
    """
    name, whole = ("weight_shard", WHOLE_WEIGHT) if head else ("logits_shard", WHOLE_LOGITS)
    good = {"vocab_size": 20, "process_group": new_group}
    for place in ({"vocab_start": after_all_twenty}, {}):
        starts = [rank * (20 if rank in wrong and place else 10) for rank in (0, 1)]
        ends = [start + (20 if rank in wrong else 10) for rank, start in enumerate(starts)]
        shards = f"[{starts[0]}, {ends[0]}) on rank 0, [{starts[1]}, {ends[1]}) on rank 1"
        said = f"{name}: got tokens {shards}; takes this rank's shard of the 20 tokens of vocab_size, not all"
        each = [good | (whole | place if rank in wrong else {}) for rank in (0, 1)]
        for error in world(2).outcomes(call_with, head, each, D3S_KERNELS_CHECK=checked):
            assert (type(error), str(error)) == (ValueError, said)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"vocab_start": 11}, "vocab_start: got tokens [0, 10) on rank 0, [11, 21) on rank 1; takes shards that"),
        (
            {"vocab_size": 18},
            {"vocab_size": 18},
            "vocab_size: got 18 with tokens [0, 10) on rank 0, [10, 20) on rank 1; ",
        ),
        ({}, {"vocab_size": 21}, "vocab_size: got 20 on rank 0 and 21 on rank 1; takes the same on all ranks"),
    ],
)
def test_shards_of_another_vocabulary(first: dict, second: dict, said: str) -> None:
    """All ranks refuse it in the same words, although they are not asked to exchange their arguments."""
    each = [{"vocab_size": 20, "process_group": new_group} | changed for changed in (first, second)]
    one, other = world(2).outcomes(call_with, False, each)
    assert (type(one), str(one)) == (type(other), str(other))
    assert isinstance(one, ValueError)
    assert str(one).startswith(said)


@on_ranks(*SIZES)
def shards_are_gathered_once(ranks: Ranks) -> None:
    """By the first call with a group and a size: whichever function it is, and however the group is given."""
    torch.manual_seed(12)
    rows, group = 5, new_group(ranks)
    mesh = DeviceMesh.from_group(group, "cpu")
    gathered = ("all_gather", (3,), torch.int64)
    states = ("all_gather", (4 * rows,), torch.float32)
    labels, hidden = torch.arange(rows), torch.randn(rows, 6)
    for tokens in (10, 8):
        logits, weight = torch.randn(rows, tokens), torch.randn(tokens, 6)
        place, size = tokens * ranks.rank, {"vocab_size": tokens * ranks.size}
        expected = shared_logits(logits, labels, place, group)
        with asked() as told:
            found = shared_logits(logits, labels, place, group, **size)
            shared_head(hidden, weight, labels, place, mesh, **size)
            shared_logits(logits, labels, place, mesh, **size)
            shared_head(hidden, weight, labels, place, group)
        assert told == [gathered, *[states] * 4]
        assert_same(found, expected)
        with asked() as told:
            shared_logits(DTensor.from_local(logits, mesh, [Shard(1)]), labels, **size)
            shared_logits(logits, labels, place, new_group(ranks), **size)
        assert told == [states, gathered, states]
        whole = torch.randn(rows, tokens * ranks.size)
        for given, start, name in ((logits, place + 1, "vocab_start"), (whole, place, "logits_shard")):
            got = rf"got tokens \[{start}, {start + given.shape[1]}\) on rank {ranks.rank}"
            takes = rf"takes \[{place}, {place + tokens}\), as in the first call"
            with asked() as told, pytest.raises(ValueError, match=f"^{name}: {got}; {takes}"):
                shared_logits(given, labels, start, group, **size)
            assert told == []


@on_ranks(2)
def a_group_that_ends_is_forgotten(ranks: Ranks) -> None:
    """The next group with its name may have other shards."""
    known = len(_shards_of_first_calls)
    for tokens in (3, 7):
        group, first, last = new_group(ranks), *((0, tokens) if ranks.rank == 0 else (tokens, 10))
        shared_logits(torch.zeros(4, last - first), FIRST, first, group, vocab_size=10)
        assert len(_shards_of_first_calls) == known + 1
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert len(_shards_of_first_calls) == known


@on_ranks(2)
def padding_counts_as_tokens(ranks: Ranks) -> None:
    """17 tokens, padded to 20: a label in the padding has no probability, and one beyond it is refused."""
    torch.manual_seed(13)
    whole = torch.randn(3, 20).index_fill(1, torch.arange(17, 20), -INF)
    own = whole[:, 10 * ranks.rank : 10 * ranks.rank + 10]
    for labels in (torch.tensor([0, 16, -100]), torch.tensor([0, 17, 19])):
        found = shared_logits(own, labels, 10 * ranks.rank, new_group(ranks), vocab_size=20)
        torch.testing.assert_close(found, d3s.logprob_entropy(whole, labels), rtol=1e-6, atol=1e-5)


# ---- torch -----------------------------------------------------------------------------------------------------------


def compiled(ranks: Ranks, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(10)
    place = 15 * ranks.rank, ranks.group

    def loss(logits: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, heat: float) -> Tensor:
        options = {"temperature": heat, "mask": mask, "vocab_size": 15 * ranks.size}
        logprob, entropy = shared_logits(2 * logits, labels, *place, **options)
        head, _ = shared_head(2 * hidden, weight, labels, *place, max_grad_rows=50, **options)
        return (head.exp() * logprob - 0.1 * entropy).sum()

    whole = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for rows in (7, 12):
        leaves = [torch.randn(shape, requires_grad=True) for shape in ((rows, 15), (rows, 8), (15, 8))]
        others = torch.randint(15 * ranks.size, (rows,)), torch.rand(rows) < 0.7, 0.5 + 0.1 * rows
        ours, eager = (with_gradients([f(*leaves, *others)], leaves, [torch.ones(())]) for f in (whole, loss))
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor", shows="that Inductor's code is right")])
def test_a_loss_compiles_whole(backend: str) -> None:
    world(2).run(compiled, backend)


@on_ranks(2)
def what_a_graph_refuses(ranks: Ranks) -> None:
    """A rank that traces a graph looks at its own shard alone. What raises after a graph break also gathers nothing."""
    labels, group = torch.arange(4), new_group(ranks)

    def loss(logits: Tensor, start: int) -> Tensor:
        return shared_logits(2 * logits, labels, start, group, vocab_size=20)[0].sum()

    for fullgraph, error in ((False, ValueError), (True, torch._dynamo.exc.Unsupported)):
        torch._dynamo.reset()
        graph = torch.compile(loss, backend="eager", fullgraph=fullgraph)
        for start in (20 * ranks.rank, 10 * ranks.rank):
            with asked() as told, pytest.raises(error, match="logits_shard: got tokens" if not fullgraph else None):
                graph(torch.randn(4, 20), start)
            assert told == []
        graph(torch.randn(4, 10), 10 * ranks.rank)


@on_ranks(2)
def opcheck_of_the_ops(ranks: Ranks) -> None:
    torch.manual_seed(11)
    ops, name, check = torch.ops.d3s_kernels, ranks.group.group_name, torch.library.opcheck
    rows, start = (2, 3), 20 * ranks.rank
    labels, each = random_labels(*rows, vocabulary=20 * ranks.size), 0.5 + torch.rand(rows)
    logits, mask = torch.randn(*rows, 20), torch.rand(rows) < 0.7
    for given in (logits, logits.clone().requires_grad_(), logits[:0].clone()):
        check(ops.vocab_parallel_logprob_entropy.default, (given, labels[: len(given)], start, name))
    check(ops.vocab_parallel_logprob_entropy.default, (logits, labels, start, name, 1.0, each, mask))
    hidden, weight, bias = torch.randn(*rows, 8), torch.randn(20, 8), torch.randn(20)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    head, shard = ops.linear_logprob_entropy.default, {"first_token": start, "group_name": name}
    check(head, (hidden, weight, labels), shard)
    check(head, (*leaves[:2], labels, leaves[2]), shard)
    sizes = {"max_rows": 6, "max_grad_rows": 6, "workspace_bytes": 500}
    numbers = {"temperature_tensor": each, "logit_softcap": 30.0, "mask": mask}
    check(head, (hidden, weight, labels, bias), numbers | sizes | shard)
    _, *state = head(hidden, weight, labels, bias, **shard)
    for wanted in ([True, True, True], [False, True, False], [True, False, False]):
        arguments = torch.ones(rows), None, *state, wanted, hidden, weight, labels, bias
        check(ops.linear_logprob_entropy_backward.default, arguments, {"max_grad_rows": 6} | shard)


@on_ranks(2)
def no_second_derivative(ranks: Ranks) -> None:
    leaf = torch.randn(3, 10, requires_grad=True)
    _, entropy = shared_logits(leaf, torch.arange(3), 10 * ranks.rank, ranks.group)
    (slope,) = torch.autograd.grad(entropy.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^d3s_kernels: its ops can be differentiated once, not twice$"):
        slope.sum().backward()
