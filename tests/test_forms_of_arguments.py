"""Masks of integers and dtypes that differ are taken as what they are converted to, and tensors that no kernel can read
are refused by the argument's name: DTensors, nested, sparse and quantised ones, parameters that are not whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, compiled_once
from ranks import Ranks, on_ranks, world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import Parameter

import d3s_kernels as d3s
from d3s_kernels import distributed
from d3s_kernels.selection import choose_rollouts, in_groups
from d3s_kernels.selection.metrics import selection_metrics

MASK, FLAT_MASK = torch.tensor([[True, False, True], [True, True, False]]), torch.tensor([True, False, True, True])
LOGITS, LABELS = torch.linspace(-3, 3, 30).view(2, 3, 5), torch.tensor([[0, 4, 2], [-100, 1, 3]])
VALUES, FLAT = torch.linspace(0.1, 3, 6).view(2, 3), torch.tensor([0.3, 2.0, 0.1, 1.0])
OFFSETS = torch.tensor([0, 1, 4])
RAGGED = {"mask": FLAT_MASK, "offsets": OFFSETS}
ONE, SHARE = torch.tensor(1), torch.tensor(0.5)
GROUPS = torch.tensor([[0, 1, 0], [1, 1, -1]], dtype=torch.int8)
HIDDEN, WEIGHT = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(-2, 2, 28).view(7, 4)
HEAD = {"hidden": HIDDEN, "weight": WEIGHT, "labels": torch.tensor([0, 6, -100, 3]), "bias": torch.linspace(0, 1, 7)}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}


def takes(function: Callable[..., Any], called: str = "", **given: Any) -> None:
    CALLS[called or function.__name__] = function, given


# Every function with tensors among its arguments. All that can be tensors are.
takes(d3s.entropy, logits=LOGITS, mask=MASK, temperature=torch.tensor(0.7))
takes(d3s.logprob_entropy, logits=LOGITS, labels=LABELS, mask=MASK)
takes(d3s.linear_logprob_entropy, **HEAD, mask=FLAT_MASK)
takes(d3s.linear_logprob_entropy, "weight_grad_into", **HEAD, weight_grad_into=torch.zeros(7, 4))
takes(d3s.token_logprobs, logits=LOGITS, token_ids=LABELS[..., None].clamp(min=0), labels=LABELS, mask=MASK)
of_ids = {"token_ids": torch.tensor([[0, 6]]).expand(4, 2)}
takes(d3s.linear_token_logprobs, **HEAD, **of_ids, mask=FLAT_MASK)
takes(d3s.topk_mask, scores=FLAT, ratio=SHARE, **RAGGED)
takes(d3s.topk_mask, "topk_mask by k", scores=VALUES, k=ONE, mask=MASK)
takes(d3s.select_tokens, entropy=FLAT, advantages=FLAT, ratio=SHARE, scope="sequence", **RAGGED)
quantile = {"ratio": 0.5, "rule": "entropy_quantile"}
takes(d3s.select_tokens, "TRL's quantile", entropy=VALUES, advantages=None, mask=MASK, **quantile)
takes(d3s.select_tokens_from_logits, logits=LOGITS, advantages=torch.tensor([1.0, -2.0]), ratio=0.5, mask=MASK)
takes(d3s.random_prefixes, mask=MASK, draws=torch.tensor([0.4, 0.1]))
takes(d3s.compact, mask=MASK, capacity=5)
takes(d3s.max_variance_select, values=FLAT, keep=ONE, **RAGGED)
takes(d3s.select_rollouts, advantages=VALUES, keep=1, mask=MASK)
takes(d3s.select_rollouts, "PODS percentile", advantages=VALUES, keep=1, mask=MASK, rule="percentile", scope="group")
takes(d3s.group_advantages, rewards=FLAT, offsets=OFFSETS)
takes(d3s.groups_without_spread, rewards=FLAT, offsets=OFFSETS)
takes(d3s.variance_mass, rewards=FLAT, share=0.5, offsets=OFFSETS)
takes(d3s.importance_ratio, logprob=VALUES, old_logprob=VALUES, mask=MASK, groups=GROUPS, level="entropy_group")
opsm = {"rule": "opsm", "high": 0.1, "advantages": FLAT}
takes(d3s.trusted_tokens, logprob=FLAT, sampling_logprob=FLAT / 2, **opsm, **RAGGED)
takes(d3s.shared_tokens, token_ids=LABELS, advantages=LABELS[:, :1].float(), mask=MASK)
takes(d3s.entropy_groups, entropy=FLAT, **RAGGED)
takes(d3s.adaptive_clip, entropy=VALUES, groups=GROUPS, mask=MASK, vocab_size=9)
takes(d3s.sampling_mask_from_logits, logits=LOGITS, top_k=2)
takes(d3s.SamplingMask, token_ids=torch.tensor([1, 2]).int(), offsets=torch.tensor([0, 1, 2]))
page = {"prompts": ["?"], "completions": [[*"abc"], [*"def"]], "kept_rollouts": torch.tensor([True, True])}
takes(d3s.selection_page, **page, kept_tokens=MASK, scores=VALUES)
MASKS = ("mask", "kept_tokens", "kept_rollouts")
MASKED = [(name, mask) for name, (_, given) in CALLS.items() for mask in MASKS if mask in given]


def call(name: str, **changed: Any) -> Any:
    function, given = CALLS[name]
    return function(**{**given, **changed})


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (tuple, list)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(theirs, Tensor):
        assert_same_bits(ours, theirs)
    else:
        assert ours == theirs


# ---- arrays and lists ------------------------------------------------------------------------------------------------

_selection, _tokens = d3s.Selection(advantages_from="kept"), d3s.select_tokens(VALUES, VALUES[:, 0], 0.5)
_of_step = {"advantages": VALUES, "rollout_mask": MASK, "token_mask": MASK.flatten()[:, None], "rewards": VALUES}
OF_STEPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rollouts": (_selection.rollouts, {"advantages": VALUES, "progress": 0.0, "has_tokens": MASK}),
    "advantages": (_selection.advantages, {"advantages": VALUES, "kept": MASK, "without_spread": MASK[:, 0]}),
    "trusted": (_selection.trusted, {"logprob": None, "sampling_logprob": None, "mask": MASK}),
    "tokens": (_selection.tokens, {"entropy": VALUES, "advantages": VALUES[:, 0], "progress": 0.0, "mask": MASK}),
    "denominator": (_selection.denominator, {"tokens": _tokens, "mask": MASK}),
    "choose_rollouts": (choose_rollouts, {"advantages": VALUES, "keep": 1}),
    "in_groups": (in_groups, {"values": FLAT, "groups": "abab"}),
    "selection_metrics": (selection_metrics, {**_of_step, "tokens": _tokens}),
    "micro_batches": (d3s.micro_batches, {"lengths": OFFSETS, "number": 1}),
}


@pytest.mark.parametrize("name", [*CALLS, *OF_STEPS])
def test_of_an_array_or_a_list_it_is_said_what_makes_a_tensor(name: str) -> None:
    function, given = (CALLS | OF_STEPS)[name]
    for argument, value in given.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            for wrong, made in ((value.numpy(), "from_numpy"), (value.tolist(), "tensor")):
                said = rf"^{argument}: got (ndarray|list); takes .*: torch\.{made}\({argument}\) is one$"
                with pytest.raises(TypeError, match=said):
                    function(**{**given, argument: wrong})


# ---- masks -----------------------------------------------------------------------------------------------------------

# Of int64, a number whose lowest byte is 0.
INTEGERS = {torch.uint8: 2, torch.int8: -1, torch.int16: 1, torch.int32: 1 << 16, torch.int64: 1 << 40}


@pytest.mark.parametrize(("name", "mask"), MASKED)
def test_an_integer_mask_is_true_where_it_is_not_0(name: str, mask: str) -> None:
    given, expected = CALLS[name][1][mask], call(name)
    for dtype, number in INTEGERS.items():
        assert_same(call(name, **{mask: given.to(dtype) * number}), expected)


@pytest.mark.parametrize(("name", "mask"), MASKED)
def test_a_float_mask_is_refused(name: str, mask: str) -> None:
    """It may be additive: 0 where a token counts."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        said = rf"^{mask}: got dtype {dtype}; takes bool or integers .*added to logits, 0"
        with pytest.raises(ValueError, match=said):
            call(name, **{mask: CALLS[name][1][mask].to(dtype)})


@on_ranks(2, D3S_KERNELS_CHECK="1")
def masks_of_ranks(ranks: Ranks) -> None:
    for name in ("topk_mask", "select_tokens", "select_tokens_from_logits", "max_variance_select", "select_rollouts"):
        mask, placement = CALLS[name][1]["mask"], {"process_group": ranks.group}
        expected = call(name, **placement)
        assert_same(call(name, mask=mask.long() << 40, **placement), expected)
    kept = torch.tensor([0, 256, -1])
    assert distributed.plan_rows(kept, ranks.group).staying.tolist() == [1, 2]
    place = {"vocab_start": 5 * ranks.rank, "process_group": ranks.group}
    expected = distributed.vocab_parallel_logprob_entropy(LOGITS, LABELS, **place, mask=MASK)
    # Masks count as the same if they mean the same.
    of_rank = MASK.int() if ranks.rank == 0 else MASK
    assert_same(distributed.vocab_parallel_logprob_entropy(LOGITS, LABELS, **place, mask=of_rank), expected)


# ---- tensors that no kernel reads ------------------------------------------------------------------------------------


class Packed(Tensor):
    """As torchao's: a float dtype outside, other numbers inside."""

    def dequantize(self) -> Tensor:
        raise AssertionError


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, "got a tensor of layout torch.sparse_coo; takes a dense one: to_dense()"),
    "nested": (
        lambda tensor: torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged),
        "got a nested tensor; takes its values(), with offsets= its offsets() where the function takes offsets",
    ),
    "nested, strided": (lambda tensor: torch.nested.nested_tensor([tensor, tensor]), "got a nested tensor; takes its"),
    "quantised": (
        lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        "got a quantised tensor, Tensor of torch.qint8; takes one of its numbers: dequantize() makes it",
    ),
    "packed": (lambda tensor: tensor.as_subclass(Packed), "got a quantised tensor, Packed of torch.float32; takes"),
}


def tensors(name: str) -> Iterator[tuple[str, Tensor]]:
    yield from ((argument, value) for argument, value in CALLS[name][1].items() if isinstance(value, Tensor))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_no_kernel_reads(kind: str, name: str) -> None:
    make, said = KINDS[kind]
    of_floats = kind in ("quantised", "packed")
    for argument, value in tensors(name):
        if value.dim() == 0 or (of_floats and value.dtype != torch.float32):
            continue
        with pytest.raises((TypeError, ValueError)) as error:
            call(name, **{argument: make(value)})
        # Where the dispatcher finds a layout, it knows the name that the op has for the argument.
        of_op = name in ("select_rollouts", "PODS percentile", "groups_without_spread", "variance_mass")
        names = f"{argument}|values" if of_op else argument
        dtype_or_kind = rf"{re.escape(said)}|got (dtype )?torch.qint8|got .* of torch.qint8"
        assert re.match(f"({names}): ({dtype_or_kind})", str(error.value)), error.value


PLAIN = "got a DTensor; takes a plain tensor: full_tensor() is all of it, to_local() this rank's"


def distributed_tensors(ranks: Ranks) -> list[str]:
    """What every function says of a DTensor in each of its arguments."""
    mesh, unclear = init_device_mesh("cpu", (ranks.size,)), []
    for name in CALLS:
        for argument, value in tensors(name):
            try:
                call(name, **{argument: distribute_tensor(value, mesh, [Replicate()])})
                said = "nothing"
            except TypeError as error:
                said = str(error)
            also = "vocab_parallel_linear_logprob_entropy takes it" if argument == "weight" else ""
            if not said.startswith(f"{argument}: {PLAIN}") or also not in said:
                unclear.append(f"{name}: {said}")
    return unclear


def test_a_dtensor() -> None:
    assert world(2).run(distributed_tensors) == [[], []]


def test_a_dtensor_in_a_graph() -> None:
    class Sharded(Tensor):
        def to_local(self) -> Tensor:
            raise AssertionError

    compiled = torch.compile(lambda scores: d3s.topk_mask(scores, k=1), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="scores: got a Sharded; takes a plain tensor"):
        compiled(VALUES.as_subclass(Sharded))


def partitioned(shape: list[int]) -> Parameter:
    """What DeepSpeed's ZeRO-3 leaves of a parameter."""
    parameter = Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape = 3, torch.Size(shape)
    return parameter


def flattened(numbers: int) -> Parameter:
    """What FSDP's first version leaves of a parameter, outside of a forward."""
    parameter = Parameter(torch.zeros(numbers))
    parameter._fsdp_flattened = True
    return parameter


def freed(tensor: Tensor) -> Tensor:
    gathered = tensor.clone()
    gathered.untyped_storage().resize_(0)
    return gathered


ZERO = r"DeepSpeed's ZeRO-3 has partitioned .*: enter deepspeed.zero.GatheredParameters\(\[{}\]\) around forward and ba"
FSDP = "FSDP leaves a flattened part.*call within that forward, or within FullyShardedDataParallel.summon_full_params"
FREED = "got one whose memory has been freed, as FSDP does after the forward"
SHAPES = {"weight": r"; takes \[V, H\]. ", "bias": r"; takes \[V\], \[7\]. "}
# The argument, what makes it, and what is said of it.
NOT_WHOLE: dict[str, tuple[str, Callable[[], Tensor], str]] = {
    "a part of a weight": ("weight", lambda: flattened(11), rf"got shape \[11\]{SHAPES['weight']}{FSDP}"),
    "bytes of a quantised weight": (
        "weight",
        lambda: Parameter(torch.zeros(7, 4, dtype=torch.uint8), requires_grad=False),
        "got dtype torch.uint8; takes .*; a quantised one has to be dequantised first",
    ),
}
for name, whole in (("weight", WEIGHT), ("bias", HEAD["bias"])):
    said = rf"got shape \[0\]{SHAPES[name]}"
    partition = partial(partitioned, list(whole.shape))
    NOT_WHOLE[f"a partitioned {name}"] = name, partition, said + ZERO.format(name)
    NOT_WHOLE[f"no part of a {name}"] = name, partial(flattened, 0), said + FSDP
    NOT_WHOLE[f"a freed {name}"] = name, partial(freed, whole), FREED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", NOT_WHOLE)
def test_a_parameter_that_is_not_whole(case: str, dtype: torch.dtype) -> None:
    """Also where hidden states of another dtype would have it converted, which reads it; with a sampling mask, whose
    kernels read it; and beside a tensor for its gradient, which has another shape.
    """
    argument, make, said = NOT_WHOLE[case]
    kept = d3s.SamplingMask.from_lists([[1, 2], [6], [], [3]])
    for options in ({}, {"sampling_mask": kept, "label_outside": "include"}, {"weight_grad_into": torch.zeros(7, 4)}):
        with pytest.raises(ValueError, match=f"^{argument}: {said}"):
            call("linear_logprob_entropy", **{"hidden": HIDDEN.to(dtype), **options, argument: make()})


# ---- dtypes that differ ----------------------------------------------------------------------------------------------

HALF, OTHER, WIDE = torch.bfloat16, torch.float16, torch.float32
# Of hidden states, weight and bias.
MIXED = ((HALF, WIDE, None), (WIDE, HALF, None), (HALF, HALF, WIDE), (OTHER, WIDE, HALF), (WIDE, WIDE, OTHER))


def leaves_of(*dtypes: torch.dtype | None) -> list[Tensor | None]:
    given = zip((HIDDEN, WEIGHT, HEAD["bias"]), dtypes, strict=True)
    return [None if dtype is None else value.clone().to(dtype).requires_grad_() for value, dtype in given]


def widened(leaves: list[Tensor | None]) -> list[Tensor | None]:
    return [None if leaf is None else leaf.detach().float().requires_grad_() for leaf in leaves]


def scores_and_gradients(scores: Callable[..., Any], leaves: list[Tensor | None]) -> list[Tensor]:
    """In the dtypes of the leaves."""
    logprob, entropy = scores(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad((logprob - entropy).sum(), given)
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in given]
    return [logprob.detach(), entropy.detach(), *gradients]


def assert_as_if_widened(scores: Callable[..., Any], leaves: list[Tensor | None]) -> None:
    expected = scores_and_gradients(scores, widened(leaves))
    for ours, theirs in zip(scores_and_gradients(scores, leaves), expected, strict=True):
        assert_same_bits(ours, theirs.to(ours.dtype))


def of_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Any:
    return d3s.linear_logprob_entropy(hidden, weight, HEAD["labels"], bias=bias, mask=FLAT_MASK.long(), **options)


@pytest.mark.parametrize("dtypes", MIXED)
def test_dtypes_that_differ_become_float32(dtypes: tuple[torch.dtype | None, ...]) -> None:
    assert_as_if_widened(of_head, leaves_of(*dtypes))


def test_dtypes_that_differ_in_a_graph() -> None:
    leaves = leaves_of(HALF, WIDE, HALF)
    compiled = compiled_once(of_head)
    assert_same(*(scores_and_gradients(head, leaves) for head in (compiled, of_head)))


def test_the_gradient_of_a_converted_weight_is_added() -> None:
    hidden, weight, _ = leaves_of(WIDE, HALF, None)
    expected = scores_and_gradients(of_head, widened([hidden, weight, None]))
    into, seen = torch.zeros(7, 4), []
    weight.register_hook(seen.append)
    logprob, entropy = of_head(hidden, weight, None, weight_grad_into=into)
    (logprob - entropy).sum().backward()
    assert_same_bits(into, expected[3])
    assert_same_bits(hidden.grad, expected[2])
    assert weight.grad is None
    assert seen == [None]


ANY, OF_HIDDEN = "takes float32, bfloat16 or float16", "takes float32 or the dtype of hidden, torch.bfloat16"
REFUSED: tuple[tuple[tuple[torch.dtype | None, ...], dict[str, Any], str], ...] = (
    ((HALF, OTHER, None), {}, f"weight: got dtype torch.float16; {OF_HIDDEN}"),
    ((HALF, HALF, OTHER), {}, f"bias: got dtype torch.float16; {OF_HIDDEN}"),
    ((torch.float64, WIDE, None), {}, f"hidden: got dtype torch.float64; {ANY}"),
    ((torch.float64, torch.float64, None), {}, f"hidden: got dtype torch.float64; {ANY}"),
    ((HALF, torch.float64, None), {}, f"weight: got dtype torch.float64; {ANY}"),
    ((WIDE, WIDE, torch.float64), {}, f"bias: got dtype torch.float64; {ANY}"),
    ((HALF, WIDE, None), {"logits_dtype": HALF}, "logits_dtype: got torch.bfloat16; takes torch.float32 or the dtype"),
    (
        (WIDE, HALF, None),
        {"weight_grad_into": torch.zeros(7, 4, dtype=HALF)},
        "weight_grad_into: got dtype torch.bfloat16; takes float32, since dtypes differ and the products are made in",
    ),
)


@pytest.mark.parametrize(("dtypes", "options", "said"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_dtypes_that_are_refused(dtypes: tuple[torch.dtype | None, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        of_head(*leaves_of(*dtypes), **options)


@on_ranks(2)
def dtypes_that_differ_among_ranks(ranks: Ranks) -> None:
    def scores(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        given = {"vocab_start": 7 * ranks.rank, "process_group": ranks.group, "bias": bias, "mask": FLAT_MASK.int()}
        return distributed.vocab_parallel_linear_logprob_entropy(hidden, weight, HEAD["labels"], **given)

    for dtypes in MIXED:
        assert_as_if_widened(scores, leaves_of(*dtypes))


def test_a_comparison_takes_what_the_function_takes() -> None:
    given = *leaves_of(WIDE, HALF, None)[:2], HEAD["labels"]
    found = d3s.compare(d3s.linear_logprob_entropy, *given, mask=FLAT_MASK.int())
    assert found.agrees, found


def test_every_function_with_a_mask_is_here() -> None:
    functions = [getattr(d3s, name) for name in d3s.__all__]
    takes = {f.__name__ for f in functions if inspect.isfunction(f) and "mask" in inspect.signature(f).parameters}
    assert takes == {function.__name__ for function, given in CALLS.values() if "mask" in given} | {"selection_page"}
