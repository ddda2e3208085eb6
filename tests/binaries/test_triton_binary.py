"""Tests what Triton makes of the kernels, as read from the machine code. So performance is tested without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disassembly import Instruction, Resources, cuobjdump, kernels, loops, resources
from helpers import slow

pytest.importorskip("triton", reason="needs Triton")
from triton.backends.compiler import GPUTarget
from triton_launches import Launch, recorded

from d3s_kernels import _triton
from d3s_kernels._triton import logprob_entropy, max_variance, topk_mask

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")

NVIDIA = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100)}
ARCHITECTURES = ["sm_90", *(slow(name, shows="what becomes of the kernels there") for name in ("sm_80", "sm_100"))]
AMD = GPUTarget("hip", "gfx942", 64)

VOCABULARY, ODD_VOCABULARY = 151_936, 50_257  # rows that are aligned to 16 bytes, and rows that are not
VECTOR = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}
# The most instructions for an element in the loop over logits. At 4.3 TB/s, an H200 has time for some 13.8 instructions
# until the next bfloat16 arrives.
MOST_INSTRUCTIONS = {torch.bfloat16: 9.5, torch.float16: 9.5, torch.float32: 9.0}
MOST_INSTRUCTIONS_ASKEW = 11.5
MOST_INSTRUCTIONS_OF_GRADIENTS = 12.0


def forward(dtype: torch.dtype, vocabulary: int = VOCABULARY) -> None:
    logits, labels = torch.empty(3, vocabulary, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    _triton.KERNELS["logprob_entropy"](logits, labels, 1.0, None, labels == 0)


def backward(dtype: torch.dtype, vocabulary: int = VOCABULARY) -> None:
    logits, labels = torch.empty(3, vocabulary, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    rows = [torch.zeros(3) for _ in range(5)]
    _triton.KERNELS["logprob_entropy_backward"](*rows[:2], logits, labels, *rows[2:], 1.0, None, labels == 0)


def tiles(dtype: torch.dtype) -> None:
    logits, labels, rows = torch.empty(3, 4096, dtype=dtype), torch.zeros(3, dtype=torch.int32), torch.zeros(3)
    _triton.KERNELS["softmax_state_"](torch.zeros(3, 4), logits, labels, 4096, 1.0, rows)
    _triton.KERNELS["softmax_state_finish"](torch.zeros(3, 4), 1.0, rows)
    for grad_dtype in (dtype, torch.bfloat16):
        _triton.KERNELS["logprob_entropy_backward_"](
            rows, rows, logits, labels, rows, rows, rows, 4096, 1.0, rows, grad_dtype
        )
        _triton.KERNELS["logprob_entropy_backward_rows_"](
            rows, rows, logits, labels, rows, rows, rows, labels.long(), logits.to(grad_dtype), 4096, 1.0, rows
        )


def top(length: int) -> None:
    scores = torch.zeros(3, length)
    _triton.KERNELS["topk_mask"](scores, 0.1, mask=scores == 0)
    for advantages, drop_zeros in ((torch.zeros(3), False), (torch.zeros(3, length), True)):
        _triton.KERNELS["select_tokens"](scores, advantages, 0.1, pooled=False, drop_zeros=drop_zeros)


def from_logits() -> None:
    logits = torch.zeros(2, 50, 1024, dtype=torch.bfloat16)
    _triton.KERNELS["select_tokens_from_logits"](logits, torch.zeros(2), None, torch.tensor(0.5))


def varied(length: int) -> None:
    values = torch.zeros(3, length)
    _triton.KERNELS["max_variance_select"](values, 16, mask=values == 0)
    _triton.KERNELS["max_variance_select"](values, None, torch.tensor(16))


CASES: dict[str, Callable[[], None]] = {
    **{f"forward, {dtype}": lambda dtype=dtype: forward(dtype) for dtype in VECTOR},
    "forward, misaligned": lambda: forward(torch.bfloat16, ODD_VOCABULARY),
    **{f"backward, {dtype}": lambda dtype=dtype: backward(dtype) for dtype in VECTOR},
    "backward, misaligned": lambda: backward(torch.bfloat16, ODD_VOCABULARY),
    "tiles": lambda: tiles(torch.float32),
    **{f"top of {length}": lambda length=length: top(length) for length, _ in topk_mask.SIZES},
    "top in parts": lambda: top(topk_mask.LARGEST),
    "top of logits": from_logits,
    **{f"varied of {length}": lambda length=length: varied(length) for length, _ in max_variance.SIZES},
}
# Triton takes long to compile selections, so the smallest of each kind is tested for all. float16 is like bfloat16.
LONG = [name for name in CASES if name.startswith(("top", "varied"))]
LONG.remove(f"top of {topk_mask.SIZES[0][0]}")
LONG.remove(f"varied of {max_variance.SIZES[0][0]}")
LONG += [name for name in CASES if name.endswith("float16") and not name.endswith("bfloat16")]
NVIDIA_CASES = [slow(name, shows="this size or dtype") if name in LONG else name for name in CASES]
QUICK_ON_AMD = {"forward, torch.bfloat16", "tiles"}
AMD_CASES = [name if name in QUICK_ON_AMD else slow(name, shows="what AMD makes of it") for name in CASES]


def launches(case: str, warp_size: int = 32) -> list[Launch]:
    with recorded(warp_size) as found:
        CASES[case]()
    assert found
    return found


def machine_code(launch: Launch, architecture: str, folder: Path) -> tuple[list[Instruction], Resources, int]:
    """The instructions of a kernel, its resources, and its bytes of shared memory."""
    if cuobjdump() is None:
        pytest.skip("needs cuobjdump")
    path = folder / f"{architecture}.cubin"
    compiled = launch.compile(NVIDIA[architecture])
    path.write_bytes(compiled.asm["cubin"])
    for cached in (kernels, resources):
        cached.cache_clear()
    (code,), (used,) = kernels(path, architecture).values(), resources(path, architecture).values()
    return code, used, compiled.metadata.shared


def opcodes(code: list[Instruction], pattern: str) -> list[str]:
    return [instruction.opcode for instruction in code if re.match(pattern, instruction.opcode)]


@pytest.mark.parametrize("case", NVIDIA_CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_spills(architecture: str, case: str, tmp_path: Path) -> None:
    for launch in launches(case):
        _, used, shared = machine_code(launch, architecture, tmp_path)
        warps = launch.options["num_warps"]
        print(f"{architecture} {launch.name}: {used.registers} registers, {warps} warps, {shared} bytes shared")
        # On sm_80, Triton 3.6 spills four words in parts, since it takes no more than 64 registers. With 256 rollouts,
        # Triton 3.9 spills two words. On sm_100, it spills two words if a thread has 32 values.
        parts = f"select_top_in_parts of {topk_mask.PART}"
        spilling = {"select_top of 8192": 8, parts: 16, "select_most_varied of 256": 8}
        allowed = spilling.get(f"{launch.name} of {launch.arguments.get('SIZE')}", 0)
        assert used.stack <= allowed, launch
        assert used.local == 0, launch
        assert used.registers * warps * 32 <= 65_536  # registers of a multiprocessor
        assert shared * 2048 // (warps * 32) <= 164 << 10  # divided among as many programs as the threads allow


def main_loop(launch: Launch, architecture: str, elements: int, folder: Path) -> list[Instruction]:
    """The first loop with at least one exponential for each of the elements that a thread loads at a time."""
    code, *_ = machine_code(launch, architecture, folder)
    return next(loop for loop in loops(code) if len(opcodes(loop, r"MUFU\.EX2")) >= elements)


@pytest.mark.parametrize("dtype", VECTOR, ids=str)
@pytest.mark.parametrize("architecture", ["sm_90", slow("sm_100", shows="its loop")])
def test_the_loop_over_logits(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reduce_slices, _ = launches(f"forward, {dtype}")
    elements = logprob_entropy.IN_FLIGHT * VECTOR[dtype]
    loop = main_loop(reduce_slices, architecture, elements, tmp_path)
    print(f"{architecture} {dtype}: {len(loop)} instructions for {elements} elements, {len(loop) / elements:.2f}")
    assert len(loop) <= MOST_INSTRUCTIONS[dtype] * elements
    assert len(opcodes(loop, r"MUFU\.EX2")) == elements + 1  # one for each, and one to rescale the sums
    assert len(opcodes(loop, "LDG")) == logprob_entropy.IN_FLIGHT
    assert all(".128" in opcode for opcode in opcodes(loop, "LDG"))
    assert not opcodes(loop, "BAR|SHFL|LDS|STS|LDL|STL|ATOM|MEMBAR")
    assert resources(tmp_path / f"{architecture}.cubin", architecture).popitem()[1].registers <= 64  # four programs fit


def test_misaligned_rows(tmp_path: Path) -> None:
    """Elements are loaded one by one. This takes more instructions, but fewer than an H200 has time for."""
    reduce_slices, _ = launches("forward, misaligned")
    loop = main_loop(reduce_slices, "sm_90", 32, tmp_path)
    print(f"sm_90, misaligned: {len(loop) / 32:.2f} instructions for an element")
    assert len(loop) <= MOST_INSTRUCTIONS_ASKEW * 32
    assert not opcodes(loop, "BAR|SHFL|LDS|STS|LDL|STL")


@pytest.mark.parametrize("dtype", VECTOR, ids=str)
def test_the_loop_of_the_backward(dtype: torch.dtype, tmp_path: Path) -> None:
    """A copy at 4.3 TB/s leaves time for some 27 instructions for an element."""
    (write_gradients,) = launches(f"backward, {dtype}")
    loop = main_loop(write_gradients, "sm_90", 32, tmp_path)
    print(f"sm_90 {dtype}: {len(loop) / 32:.2f} instructions for an element")
    assert len(loop) <= MOST_INSTRUCTIONS_OF_GRADIENTS * 32
    assert len(opcodes(loop, r"MUFU\.EX2")) == 32
    for access in ("LDG", "STG"):
        found = opcodes(loop, access)
        assert len(found) == 32 // VECTOR[dtype]
        assert all(".128" in opcode for opcode in found)


def test_the_search_for_a_bound(tmp_path: Path) -> None:
    """A guess takes one comparison and one addition for each value. All programs for 512 rows run in one wave."""
    launch, *_ = launches("top of 8192")
    code, used, _ = machine_code(launch, "sm_90", tmp_path)
    for loop in loops(code):
        print(f"sm_90: {len(loop)} instructions for 32 values, {used.registers} registers")
        assert len(loop) <= 140
        assert len(opcodes(loop, "FSET")) >= 32
    assert 4 * used.registers * launch.options["num_warps"] * 32 <= 65_536


@pytest.mark.parametrize("case", AMD_CASES)
def test_for_amd(case: str) -> None:
    """On gfx942, the kernels compile, and nothing spills to memory. Scalar registers may spill to vector registers."""
    for launch in launches(case, warp_size=64):
        text = launch.compile(AMD).asm["amdgcn"]
        spills = re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)
        print(launch.name, re.findall(r"\.vgpr_count:\s*(\d+)", text))
        assert spills == ["0"], launch


def test_one_program_for_batches_of_any_size() -> None:
    """For rows of 40 vectors, one compilation serves any number of rows and any strides between rows and sequences."""
    programs: dict[str, set[str]] = {}
    for rows, length in ((3, 15), (3, 16), (2, 17), (1, 16), (1, 1)):
        logits = torch.empty(rows, length, 320, dtype=torch.bfloat16)
        for part in (logits, logits[:, :-1], logits[:, ::2]):
            labels, values = torch.zeros(part.shape[:-1], dtype=torch.int64), torch.zeros(part.shape[:-1])
            with recorded() as found:
                _triton.KERNELS["logprob_entropy"](part, labels)
                _triton.KERNELS["logprob_entropy_backward"](values, values, part, labels, values, values, values)
                _triton.KERNELS["logprob_entropy_backward_"](values, values, part, labels, values, values, values, 0)
            for launch in found:
                place = "in place" if launch.arguments.get("out") is part else ""
                programs.setdefault(launch.name + place, set()).add(launch.compile(NVIDIA["sm_90"]).hash)
    assert {name: len(hashes) for name, hashes in programs.items()} == dict.fromkeys(programs, 1)
