"""Every op is in the table, tested by every suite, and means what the table says; exceptions are named."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from typing import get_args

import pytest
import torch
from cases import rollouts, tokens
from cases.coverage import replaced, require_all, served_by
from cases.draw import EXAMPLES, Draw, draws
from cases.table import FUNCTIONS, OF_RANKS, OPS, Row
from helpers import EVERYTHING, assert_identical, unwritten
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import _torch, reference
from d3s_kernels._dispatch import backends
from d3s_kernels._dispatch.build import FOLDER
from d3s_kernels._dispatch.libraries import COMPILED, argument_names, registered
from d3s_kernels._rules.rules import ROLLOUT_RULES, TOKEN_RULES
from d3s_kernels.check.compare import called, compare_here
from d3s_kernels.check.tolerances import calls, written_arguments
from d3s_kernels.rollouts.select_rollouts import RolloutRule
from d3s_kernels.tokens.select_tokens import TokenRule

ROOT = Path(__file__).parents[1]
OWN = sorted(served_by("kernels", "composed", "cpu"))
# Draws, by the largest length of a row or a segment.
SIZES = {40: 2 * EXAMPLES, 400: max(1, EXAMPLES // 5)} | ({5000: 1} if EVERYTHING else {})


def assert_means(name: str, row: Row, call: object) -> None:
    backend = next(iter(backends.serving("cpu")))
    for most, count in SIZES.items():
        for draw in draws(count, most=most):
            for difference in compare_here(row, call, row.draw(draw), torch.device("cpu"), backend):  # type: ignore[arg-type]
                assert difference.agrees, f"{name}: {difference}"


@pytest.mark.simd
@pytest.mark.parametrize("op", OWN)
def test_every_op_means_what_the_table_says(op: str) -> None:
    assert_means(op, OPS[op], getattr(torch.ops.d3s_kernels, op).default)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_means_what_the_reference_says(name: str) -> None:
    assert_means(name, FUNCTIONS[name], getattr(d3s, name))


@pytest.mark.parametrize("op", sorted(served_by("kernels")))
def test_strides_and_alignment_change_no_bit(op: str) -> None:
    call = getattr(torch.ops.d3s_kernels, op).default
    for draw in draws():
        given = {name: part.detach() if isinstance(part, Tensor) else part for name, part in OPS[op].draw(draw).items()}
        packed = {name: part.contiguous().clone() if isinstance(part, Tensor) else part for name, part in given.items()}
        for one, other in zip(called(call, given), called(call, packed), strict=True):
            if one is not None:
                assert_identical(one, other)


# Arguments with one number, or one row, for each element of a mask.
OF_TOKENS = ("scores", "entropy", "logits", "values", "logprob", "old_logprob", "hidden")
OF_TOKENS += ("grad_ratio", "grad_logprob", "grad_entropy")
MASKED = [op for op in sorted(served_by("kernels")) if "mask" in argument_names(op)]


@pytest.mark.parametrize("op", [op for op in MASKED if op != "compact"])  # of which the mask is all that there is
def test_what_is_masked_is_not_read(op: str) -> None:
    call = getattr(torch.ops.d3s_kernels, op).default
    for draw in draws():
        given = {name: part.detach() if isinstance(part, Tensor) else part for name, part in OPS[op].draw(draw).items()}
        if (mask := given.get("mask")) is None:
            continue
        written = written_arguments(op)
        poisoned = given | {name: given[name].clone() for name in written if given.get(name) is not None}
        # With support_of, the logits are one list, whose memory all rows share.
        shared = [] if given.get("support_of") is None else ["logits"]
        for name in set(OF_TOKENS).difference(written, shared):
            if isinstance(part := given.get(name), Tensor) and part.shape[: mask.dim()] == mask.shape:
                poisoned[name] = part.where(mask.reshape(mask.shape + (1,) * (part.dim() - mask.dim())), torch.nan)
        for one, other in zip(called(call, poisoned), called(call, given), strict=True):
            if one is not None:
                assert_identical(one, other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_writes_to_its_arguments_and_no_choice_has_a_gradient(name: str) -> None:
    for draw in draws(3):
        given = FUNCTIONS[name].draw(draw)
        if not FUNCTIONS[name].gradients:
            given |= {argument: with_gradient(part) for argument, part in given.items() if argument != "temperature"}
        tensors = [part for part in given.values() if isinstance(part, Tensor)]
        with unwritten(*tensors):
            results = called(getattr(d3s, name), given)
        if not FUNCTIONS[name].gradients:
            known = {id(part) for part in tensors}  # select_tokens gives the entropies back
            assert not any(part.requires_grad for part in results if isinstance(part, Tensor) and id(part) not in known)


def with_gradient(part: object) -> object:
    if isinstance(part, Tensor) and part.dim() > 0 and part.is_floating_point():
        return part.detach().requires_grad_()
    return part


# ---- completeness ----------------------------------------------------------------------------------------------------


def test_every_op_is_in_the_table() -> None:
    require_all("the table of ops", {*OPS, *OF_RANKS}, registered())


def test_every_op_checks_its_arguments_without_kernels_too() -> None:
    names = torch._C._dispatch_get_all_op_names()
    checked = {name.partition("::")[2].partition(".")[0] for name in names if name.startswith("d3s_checks::")}
    require_all("the library of checks", checked, COMPILED)


def test_every_back_end_has_its_ops() -> None:
    require_all("plain PyTorch's kernels", _torch.KERNELS, served_by("kernels"))
    triton = pytest.importorskip("d3s_kernels._triton", reason="needs Triton")
    assert set(triton.KERNELS) <= served_by("kernels")
    files = [import_module(f"{triton.__name__}.{file.name}") for file in iter_modules(triton.__path__)]
    defined = {name for file in files for name, _ in inspect.getmembers(file, inspect.isfunction)}
    require_all("KERNELS of d3s_kernels/_triton/__init__.py", triton.KERNELS, defined.intersection(registered()))


@pytest.mark.skipif(backends.forced_backend is not None or replaced(), reason="other kernels serve the CPU here")
def test_every_op_has_a_kernel_for_the_cpu() -> None:
    has_one = {op for op in registered() if "\nCPU: " in torch._C._dispatch_dump(f"d3s_kernels::{op}")}
    require_all("kernels for the CPU", has_one, registered())


def test_the_cuda_library_registers_every_op() -> None:
    """The library cannot be loaded without a CUDA build of torch, but it contains the schemas that it registers."""
    library = FOLDER / "_cuda.so"
    if not library.exists():
        pytest.skip("this build has no CUDA library")
    text = library.read_bytes()
    named = {op for op in registered() if re.search(rb"\0%s\(" % op.encode(), text)}
    require_all("the CUDA library", named & served_by("kernels"), served_by("kernels"))


def test_the_doctor_calls_every_op() -> None:
    """The gradients of the public functions are the other ops that are composed."""
    heads = {"linear_logprob_entropy", "linear_token_logprobs", "linear_topk_logprobs"}
    composed = heads | {"token_logprobs", "topk_logprobs"}
    require_all("d3s doctor", calls(8), served_by("kernels", "cpu") | composed)


@pytest.mark.slow_elsewhere("that they would run there")
def test_the_gpu_tests_call_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "cuda"))
    import every_op

    ran = set()
    for name in every_op.names():
        assert all(isinstance(result, Tensor) for result in every_op.call(name, torch.device("cpu"))())
        ran.add(name.split()[0])
    require_all("tests/cuda/every_op.py", ran & set(OPS), served_by("kernels", "composed"))


def test_the_suites_for_a_gpu_are_there() -> None:
    suites = runpy.run_path(str(ROOT / "tests" / "cuda" / "suites.py"))["SUITES"]
    require_all("tests/cuda/suites.py", suites, backends.BACKENDS)
    assert all((ROOT / path).exists() for paths in suites.values() for path in paths)
    # The own tests of an op run on every kernel of the op. (Those of the head have names of their own.)
    own = {op: ROOT / "tests" / f"test_{op}.py" for op in set(OPS) & set(FUNCTIONS)}
    forgotten = [op for op, path in own.items() if path.exists() and f"tests/{path.name}" not in suites["cuda"]]
    assert not forgotten, f"tests/cuda/suites.py: without the tests of {', '.join(forgotten)}"


def test_every_public_function_of_the_reference_is_in_the_table() -> None:
    functions = inspect.getmembers(reference, inspect.isfunction)
    here = {name for name, function in functions if function.__module__ == reference.__name__}
    public = {name for name in here if not name.startswith("_")}
    require_all("the functions", FUNCTIONS, public)
    assert public <= set(d3s.__all__)
    require_all("d3s_kernels/check/tolerances.py, of the ops", set(OPS) & set(FUNCTIONS), set(OPS) & set(d3s.__all__))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_tests_of_its_own(name: str) -> None:
    imported = re.compile(rf"^from d3s_kernels import (\([^)]*|.*)\b{name}\b|\bd3s\.{name}\(", re.MULTILINE)
    files = ROOT.joinpath("tests").glob("test_*.py")
    assert any(imported.search(file.read_text(encoding="utf-8")) for file in files), "see CONTRIBUTING.md"


@pytest.mark.parametrize("op", OPS)
def test_results_are_named_as_the_schema_has_them(op: str) -> None:
    """There is one name for each argument that the op writes and each result that it returns."""
    call = getattr(torch.ops.d3s_kernels, op).default
    assert len(OPS[op].results) == len(written_arguments(op)) + len(call._schema.returns)
    assert set(OPS[op].gradients) <= {argument.name for argument in call._schema.arguments}


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_every_rule_is_in_its_table() -> None:
    assert get_args(RolloutRule) == ROLLOUT_RULES == reference.ROLLOUT_RULES
    assert get_args(TokenRule) == TOKEN_RULES == reference.TOKEN_RULES


RULES = [*product(["select_tokens"], TOKEN_RULES), *product(["select_rollouts"], ROLLOUT_RULES)]


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_every_rule_means_what_the_reference_says(name: str, rule: str) -> None:
    drawn = tokens.token_rules if name == "select_tokens" else rollouts.rollout_rules
    assert_means(name, replace(FUNCTIONS[name], draw=partial(drawn, rule=rule)), getattr(d3s, name))
    documented = re.findall(r'^"(\w+)" ', inspect.getdoc(getattr(d3s, name)) or "", re.MULTILINE)
    assert rule in documented


# ---- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_elsewhere("the same draws, whatever computes the ops")
@pytest.mark.parametrize("op", OWN)
def test_the_simplest_draw_is_legal_and_choices_repeat_a_draw(op: str) -> None:
    """As the fuzzer needs them to make a failing call simpler."""
    draw = Draw(7)
    OPS[op].draw(draw)
    again = Draw(choices=draw.choices)
    OPS[op].draw(again)
    assert again.choices == draw.choices
    simplest = OPS[op].draw(Draw(choices=()))
    found = compare_here(OPS[op], getattr(torch.ops.d3s_kernels, op).default, simplest, torch.device("cpu"), "cpu")
    assert all(difference.agrees for difference in found)
