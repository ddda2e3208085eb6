"""Tests what nvcc makes of the CUDA kernels, as read from the built library. So performance is tested without a GPU."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from disassembly import Instruction, Resources, cuobjdump, kernels, loops, resources, shortest_way
from helpers import EVERYTHING, build_folder

import d3s_kernels
from d3s_kernels._dispatch.build import FOLDER

ROOT = Path(__file__).parents[2]
LIBRARY = FOLDER / "_cuda.so"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
COMPILERS = shutil.which("nvcc") is not None and shutil.which("cmake", path=TOOLS) is not None

# `make test` reads what set-up has built for an H100. `make test-all` compiles for the architectures of the wheels.
WHEELS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
BUILT = [f"sm_{number.split('-')[0]}" for number in d3s_kernels.build_info()["cuda_architectures"].split()]
ANEW = EVERYTHING and COMPILERS
ARCHITECTURES = WHEELS if ANEW else ["sm_90"] if "sm_90" in BUILT else BUILT
DETAILED = [name for name in ARCHITECTURES if name in ("sm_90", "sm_100")]

built = pytest.mark.skipif(
    not (LIBRARY.exists() or ANEW) or cuobjdump() is None, reason="needs the CUDA library and cuobjdump"
)

Functions = dict[str, list[Instruction]]

IN_FLIGHT = 4  # vectors of 16 bytes: kInFlight in csrc/cuda/logprob_entropy.cu
PER_VECTOR = {"bfloat16": 8, "float16": 8, "float": 4}

# The most instructions for an element in the loop over logits, for whole rows and for slices of rows. Until the next
# bfloat16 arrives, an H200 has time for some 13.8 instructions, at 4.3 TB/s, and a B200 for some 9.0, at 8 TB/s.
FORWARD = ("whole_rows", "single_slices")
MOST_INSTRUCTIONS = {
    "sm_90": {"bfloat16": 9.0, "float16": 9.5, "float": 10.0},
    # Sums of eight elements take register moves here. Without them it would be 6.2, but the error would be twice what
    # is allowed.
    "sm_100": {"bfloat16": 7.0, "float16": 7.0, "float": 7.0},
}

REGISTERS = 65_536  # of a multiprocessor; a block cannot have more
# The kernels, as parts of mangled names, by the size of the largest block that they are launched with.
LARGEST_BLOCKS = {
    1024: ("topk_mask_cu.*select_segments", "batch_deviation"),
    512: (
        "topk_mask_cu.*(count_first|split|count_last|finish)",
        "topk_steps_cu.*of_piece",
        "topk_logprobs_cu.*(top|tied)_slices",
        "max_variance_cu.*(select_segments|find_sorted_ends)",
    ),
    256: ("(write|narrow|packed)_gradients", "place_logits", "sum_rows", "sum_tokens", "list_mask", "list_piece"),
}


@cache
def compiled_anew() -> Path:
    """Compiles for all architectures of the wheels, with warnings as errors, in a folder that the next run reuses."""
    folder = build_folder("all-architectures")
    environment = {**os.environ, "PATH": TOOLS}
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=TOOLS) else []
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], check=True, capture_output=True, text=True
    ).stdout.strip()
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), *generator, "-DD3S_WERROR=ON", "-DD3S_CUDA=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}", "-DD3S_GPUS=all"]
    build = ["cmake", "--build", str(folder), "--target", "d3s_kernels_cuda", "--parallel", "2"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # another worker of pytest waits for the library
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, build):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "_cuda.so"


def library() -> Path:
    return compiled_anew() if ANEW else LIBRARY


@pytest.fixture(params=[pytest.param(name, marks=built) for name in DETAILED])
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def functions(architecture: str) -> Functions:
    return kernels(library(), architecture)


def mangled(kernel: str, dtype: str, aligned: bool) -> str:
    """A part of the mangled name of a template over an element type and a bool."""
    element = {"float": "f", "bfloat16": "NS_8bfloat16E", "float16": "NS_7float16E"}[dtype]
    return f"{len(kernel)}{kernel}I{element}Lb{int(aligned)}EE"


def find(names: dict[str, object], part: str) -> str:
    (name,) = [name for name in names if part in name]
    return name


@built
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_spills(architecture: str) -> None:
    found = resources(library(), architecture)
    table = {name: used for name, used in found.items() if "d3s" in name and "cub" not in name}
    assert len(table) > 20
    for name, used in sorted(table.items()):
        print(f"{architecture}  {used.registers:3} registers  {plain(name)}")
    # Some kernels spill registers outside of their loops, so that more blocks share a multiprocessor: those for rows
    # with a support, the backward, the largest logits, and some kernels in float16.
    allowed = {"sm_120": 24}.get(architecture, 8)
    by = "with_support|at_supports|(15write|16narrow|16packed)_gradients|top_slices|count_digit"
    by += "|(sum_tokens|write_advantages)INS_7float16E"
    spilled = {name: used for name, used in table.items() if used.stack or used.local}
    assert {name: used for name, used in spilled.items() if used.local or used.stack > allowed} == {}
    assert [name for name in spilled if not re.search(by, name)] == []


@built
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_fit_beside_each_other(architecture: str) -> None:
    """For aligned rows, three blocks of 512 threads fit on a multiprocessor. The largest block of any kernel fits."""
    found: dict[str, Resources] = resources(library(), architecture)
    for kernel in (*FORWARD, "top_slices"):
        for dtype in PER_VECTOR:
            assert found[find(found, mangled(kernel, dtype, aligned=True))].registers <= 40
            assert found[find(found, mangled(kernel, dtype, aligned=False))].registers <= 64
    for threads, launched in LARGEST_BLOCKS.items():
        for part in launched:
            many = [used.registers for name, used in found.items() if re.search(part, name)]
            assert many, part
            assert max(many) * threads <= REGISTERS


def entropy_loop(functions: Functions, kernel: str, dtype: str, aligned: bool = True) -> list[Instruction]:
    code = functions[find(functions, mangled(kernel, dtype, aligned))]
    elements = IN_FLIGHT * PER_VECTOR[dtype]
    innermost = min((loop for loop in loops(code) if exponentials(loop) >= elements), key=len)
    return shortest_way(innermost)


def count(code: list[Instruction], opcode: str) -> int:
    return sum(re.match(opcode, step.opcode) is not None for step in code)


def exponentials(code: list[Instruction]) -> int:
    return count(code, r"MUFU\.EX2$")


def loads(code: list[Instruction]) -> list[str]:
    return [instruction.opcode for instruction in code if instruction.opcode.startswith("LDG")]


@pytest.mark.parametrize("dtype", PER_VECTOR)
@pytest.mark.parametrize("kernel", FORWARD)
def test_the_loop_over_logits(architecture: str, functions: Functions, kernel: str, dtype: str) -> None:
    way = entropy_loop(functions, kernel, dtype)
    elements = IN_FLIGHT * PER_VECTOR[dtype]
    print(f"{architecture} {kernel} {dtype}: {len(way) / elements:.2f} instructions for each of {elements} elements")
    assert len(way) <= MOST_INSTRUCTIONS[architecture][dtype] * elements
    assert exponentials(way) == elements + 1  # one for each element, and one to rescale the sums
    assert len(loads(way)) == IN_FLIGHT
    assert all(".128" in opcode for opcode in loads(way))
    assert not count(way, "BAR|SHFL|LDL|STL|ATOM|MEMBAR")
    # With packed arithmetic, one instruction computes the distances of two neighbours, and one computes the two terms
    # of an element. Each eight elements have a sum of their own. All of these sums except one take one more product and
    # one more addition.
    packed = [count(way, f"{opcode}$") for opcode in ("FADD2", "FMUL2", "FFMA2")]
    more = elements // 8 - 1
    of_group = [elements // 2 + more, elements // 2 + 1 + more, elements - more]
    assert packed == (of_group if architecture == "sm_100" else [0, 0, 0])


def test_misaligned_rows_are_read_in_wide_loads_too(architecture: str, functions: Functions) -> None:
    way = entropy_loop(functions, "whole_rows", "bfloat16", aligned=False)
    print(f"{architecture} whole_rows bfloat16, misaligned: {len(way) / 32:.2f} instructions for an element")
    assert loads(way)
    assert all(".128" in opcode for opcode in loads(way))
    assert len(way) <= 13 * 32  # an H200 has time for more


def test_the_loop_of_the_backward(architecture: str, functions: Functions) -> None:
    """Rows are aligned or misaligned. A copy at 4.3 TB/s leaves time for some 27 instructions for an element."""
    for aligned, most in ((True, 9), (False, 13)):
        code = functions[find(functions, mangled("write_gradients", "bfloat16", aligned))]
        loop = min((loop for loop in loops(code) if exponentials(loop) >= 32), key=len)
        said = "" if aligned else ", misaligned"
        print(f"{architecture} write_gradients bfloat16{said}: {len(loop) / 32:.2f} instructions for an element")
        assert len(loop) <= most * 32
        assert exponentials(loop) == 32  # that of the label is outside of the loop
        assert len(loads(loop)) == (1 if aligned else 2) * IN_FLIGHT
        assert all(".128" in opcode for opcode in loads(loop))
        assert not count(loop, "BAR|SHFL|LDL|STL")


@pytest.mark.parametrize("aligned", [True, False])
def test_the_loop_of_the_backward_in_half_precision(architecture: str, functions: Functions, aligned: bool) -> None:
    """A step reads all its logits before the barrier that some steps have, and writes after it.

    The reads do not use the cache for read-only memory. The 6 bytes of an element leave time for some 40 instructions.
    """
    code = functions[find(functions, mangled("narrow_gradients", "bfloat16", aligned))]
    loop = min((loop for loop in loops(code) if exponentials(loop) >= 16), key=len)
    said = "" if aligned else ", misaligned"
    print(f"{architecture} narrow_gradients bfloat16{said}: at most {len(loop) / 16:.2f} instructions for an element")
    assert len(loop) <= (10 if aligned else 24) * 16
    order = [found.group() for step in loop if (found := re.match("LDG|BAR|STG", step.opcode))]
    loaded, stored = (4, 2) if aligned else (16, 16)
    assert order == ["LDG"] * loaded + ["BAR"] + ["STG"] * stored
    assert all(".128" in step.opcode for step in loop if step.opcode.startswith(("LDG", "STG"))) == aligned
    assert not [opcode for opcode in loads(loop) if "CONSTANT" in opcode]


def test_the_loop_of_packed_rows(architecture: str, functions: Functions) -> None:
    """From float32 to half precision: a vector of the gradient takes two vectors of logits, and no barrier."""
    code = functions[find(functions, "16packed_gradientsIfNS_8bfloat16ELb1E")]
    loop = min((loop for loop in loops(code) if exponentials(loop) >= 16), key=len)
    print(f"{architecture} packed_gradients bfloat16: {len(loop) / 16:.2f} instructions for an element")
    assert len(loop) <= 10 * 16
    assert exponentials(loop) == 16
    for access, vectors in (("LDG", IN_FLIGHT), ("STG", IN_FLIGHT // 2)):
        found = [step.opcode for step in loop if step.opcode.startswith(access)]
        assert len(found) == vectors
        assert all(".128" in opcode for opcode in found)
    assert not count(loop, "BAR|SHFL|LDL|STL")


@pytest.mark.parametrize(("kernel", "vectors"), [("place_logits", 8), ("sum_rows", 8), ("sum_tokens", 4)])
def test_the_loops_over_kept_rows(architecture: str, functions: Functions, kernel: str, vectors: int) -> None:
    """So many vectors are in flight before the first is used; one of them may be loaded a little later."""
    (name, *_) = (name for name in functions if re.search(f"support_products_cu.*{kernel}INS_8bfloat16E", name))
    wide = [loop for loop in loops(functions[name]) if count(loop, r"LDG.*\.128\.CONSTANT$") >= vectors]
    loop = min(wide, key=len)
    order = [found.group() for step in loop if (found := re.match(r"LDG\.E\.128|FFMA|BAR|LDL|STL", step.opcode))]
    print(f"{architecture} {kernel} bfloat16: {resources(library(), architecture)[name].registers} registers")
    assert order.count("LDG.E.128") == vectors
    assert order.index("FFMA") >= vectors - 1
    assert set(order) == {"LDG.E.128", "FFMA"}


@pytest.mark.parametrize("groups", [False, True])
def test_the_sums_of_sequences_load_in_vectors(architecture: str, functions: Functions, groups: bool) -> None:
    """Two vectors of both log-probabilities are in flight before the first token is added up.

    With the mask, these are 72 bytes for each thread. When each token waited for its own mask, the ratios took 2.7
    times as long as a copy. When each token was compared with four groups, this took 51 instructions, and an H200 took
    21.6 us. A sequence without groups took 14.1 us.
    """
    code = functions[find(functions, f"15whole_sequencesILb{int(groups)}E")]
    loop = min((loop for loop in loops(code) if count(loop, r"F2F\.F64\.F32$") >= 8), key=len)
    order = [found.group() for step in loop if (found := re.match("LDG|F2F|BAR|LDL|STL", step.opcode))]
    print(f"{architecture} whole_sequences: {len(shortest_way(loop)) / 8:.1f} instructions for a token, without loads")
    assert len(shortest_way(loop)) <= 8 * 24
    assert sum(".128" in opcode for opcode in loads(loop)) >= 4
    assert set(order[: order.index("F2F")]) == {"LDG"}
    assert set(order[order.index("F2F") :]) == {"F2F"}


IN_BLOCKS = [f"15select_segmentsILb0ELb0ELi{fours}EEEvNS_6Scores" for fours in (2, 4)]  # short segments, longer ones


@pytest.mark.parametrize("kernel", IN_BLOCKS)
def test_later_digits_of_top_k_count_without_branches(architecture: str, functions: Functions, kernel: str) -> None:
    """With a branch, a key took 11 instructions. 512 x 8,192 scores took 14.1 us on an H200, instead of 12.9 us."""
    code = functions[find(functions, kernel)]
    passes = [loop for loop in loops(code) if count(loop, "ATOMS") == 4 and not loads(loop)]
    print(f"{architecture} select_segments: {[len(loop) / 4 for loop in passes]} instructions for a key")
    assert len(passes) >= 2  # for the second and for the third digit
    for loop in passes:
        assert len(loop) <= 4 * 8
        assert not any(step.opcode.startswith("B") for step in loop[:-1])


@pytest.mark.parametrize("kernel", IN_BLOCKS)
def test_a_mask_is_written_without_the_code_for_ties(architecture: str, functions: Functions, kernel: str) -> None:
    """With that code, four keys take 47 instructions, and 512 x 8,192 scores 13.4 us on an H200, instead of 12.9 us."""
    writing = [loop for loop in loops(functions[find(functions, kernel)]) if count(loop, "STG.E$") == 2]
    (loop,) = (loop for loop in writing if count(loop, "LDS.128") == 2 and not count(loop, "VOTE"))
    print(f"{architecture} the mask: {len(shortest_way(loop)) / 8:.1f} instructions for a key")
    assert len(shortest_way(loop)) <= 8 * 8.5


@pytest.mark.parametrize("last", [False, True])
def test_all_searches_of_a_merge_load_at_once(architecture: str, functions: Functions, last: bool) -> None:
    """nvcc had made each load wait for the last one. With that, and longer runs, a pool took 10 us more on an H200."""
    (loop,) = loops(functions[find(functions, f"10merge_runsILb{int(last)}E")])
    order = [step.opcode for step in loop if re.match(r"LDG|ISETP.*U32.*\.EX", step.opcode)]
    assert [opcode.startswith("LDG") for opcode in order] == [True] * 16 + [False] * 16


# The number of stores of 16 bytes in the kernels, for rows in half precision and for rows in float32, where each vector
# takes two stores. sum_tokens has a store for four vectors at a time, one for a single vector, and one for a run that
# is longer than a warp adds up.
STORES = {"sum_rows": (1, 2), "finish_rows": (1, 2), "join_tokens": (1, 2), "sum_tokens": (6, 12)}


@pytest.mark.parametrize("kernel", STORES)
def test_sums_are_written_in_vectors(architecture: str, functions: Functions, kernel: str) -> None:
    for out, wide in zip(("S[0-9]_", "f"), STORES[kernel], strict=True):
        element = "INS_(8bfloat16|7float16)E"
        names = [name for name in functions if re.search(rf"support_products_cu.*\d{kernel}{element}{out}E", name)]
        assert len(names) == 2
        for name in names:
            stores = [step.opcode for step in functions[name] if step.opcode.startswith("STG.E.128")]
            print(f"{architecture} {plain(name).partition('(')[0]}: {len(stores)} stores of 16 bytes")
            assert len(stores) == wide


def plain(name: str) -> str:
    if shutil.which("c++filt") is None:
        return name
    text = subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout.strip()
    return text.replace("(anonymous namespace)::", "").replace("d3s::", "")


@pytest.mark.slow("that no file gives a warning, for any architecture of the wheels")
@pytest.mark.skipif(not COMPILERS, reason="needs nvcc, cmake")
def test_it_compiles_without_a_warning() -> None:
    assert compiled_anew().exists()


def test_wheels_hold_all_architectures() -> None:
    """D3S_GPUS=all stands for these architectures. test_wheel.py looks for them in a wheel."""
    found = re.search(r"set\(D3S_ALL_GPUS ([^)]+)\)", (ROOT / "csrc" / "gpus.cmake").read_text(encoding="utf-8"))
    assert found
    assert [f"sm_{number.partition('-')[0]}" for number in found[1].split()] == WHEELS
