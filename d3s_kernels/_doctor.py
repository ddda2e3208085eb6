"""The report of ``d3s doctor``: the build, the back-end of each op, and all back-ends compared with exact results."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ._dispatch import backends
from ._selfcheck import checks, raised
from .compare import Comparison, Difference

OLDEST = (8, 0)  # the first compute capability that the CUDA kernels compile for
SCHEMA = 1  # of the JSON report; increased when a field changes its meaning or is removed
_HEAD = "error / allowed, * serves"


class Examined(NamedTuple):
    """What a back-end does on a device."""

    backend: str
    serves: bool  # whether it computes the ops there when a user calls them
    error: str | None  # why it does not run, although it should
    ops: dict[str, Difference]  # the worst result of each op

    @property
    def good(self) -> bool:
        """No result may be wrong. Only a back-end that serves no op may fail to run."""
        right = all(worst.agrees or (raised(worst) and not self.serves) for worst in self.ops.values())
        return right and not (self.serves and self.error)


def devices() -> Iterator[tuple[torch.device, str]]:
    """Yields each device of this machine with a description."""
    yield torch.device("cpu"), f"{platform.machine()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield torch.device("cuda", index), f"{facts.name}, compute capability {facts.major}.{facts.minor}"
    for index in range(torch.xpu.device_count()):
        yield torch.device("xpu", index), torch.xpu.get_device_name(index)


def examine(device: torch.device, say: Callable[[str, Difference], None] | None = None) -> Iterator[Examined]:
    """Yields what each back-end that should run on the device does there. ``say`` gets each op's result at once."""
    for backend in backends.runnable(device.type):
        error: str | None = None
        ops: dict[str, Difference] = {}
        try:
            with backends.forced(backend):
                for op, worst in checks(device, backend):
                    ops[op] = worst
                    if say:
                        say(op, worst)
        except Exception as fault:  # any error of a driver or a compiler belongs in the report
            error = f"{type(fault).__name__}: {fault}"
        if ops and all(map(raised, ops.values())):  # such as where there is no compiler
            op, worst = next(iter(ops.items()))
            error, ops = f"{op}: {worst.output}", {}
        yield Examined(backend, backend in backends.serving(device.type), error, ops)


def has_code(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether a CUDA library for these architectures, as CMake names them, runs on a GPU of this compute capability.

    Machine code (90-real) runs on GPUs of the same major version and this or a higher minor one, PTX (90-virtual) on
    this and all later GPUs; 90 has both. For a name of another kind, such as native, the answer is True.
    """
    for name in architectures.split():
        number, _, kind = name.partition("-")
        if not number.isdecimal():
            return True
        built = divmod(int(number), 10)
        if built <= capability and (kind != "real" or built[0] == capability[0]):
            return True
    return False


def without_code(architectures: str, capability: tuple[int, int]) -> str:
    """A message, with what helps, if the CUDA library has no code for a GPU; empty if it has some."""
    if has_code(architectures, capability):
        return ""
    said = f"; the library has no code for this GPU, only for {architectures}; "
    if capability < OLDEST:
        return said + "nothing compiles for one so old: set D3S_KERNELS_BACKEND=torch"
    wanted = ";".join([*architectures.split(), "{}{}-real".format(*capability)])
    return said + f"in a clone, this compiles it: pip install -C cmake.define.CMAKE_CUDA_ARCHITECTURES='{wanted}' ."


def explain(device: torch.device, build: dict[str, Any]) -> str:
    """What computes tensors on the device, why, and whether its library has code for this very GPU."""
    said = backends.explain(device.type)
    if "cuda" not in backends.serving(device.type):
        return said
    return said + without_code(build["cuda_architectures"], torch.cuda.get_device_capability(device))


def _half_products() -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in backends.half_products()]


# ---- as text ---------------------------------------------------------------------------------------------------------


def print_report(build: dict[str, Any]) -> bool:
    """Prints the report, each part when it is known. Returns whether all is as it should be."""
    print(f"torch {torch.__version__}")
    print(f"here: Python {platform.python_version()}, {platform.platform()}, CUDA of torch: {torch.version.cuda}")
    for name, value in build.items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(f"matrix products in half precision on the CPU: {', '.join(_half_products()) or 'none'}; others in float32")
    print(f"D3S_KERNELS_BACKEND: {backends.forced_backend or 'not set'}")
    for backend in backends.BACKENDS:
        print(f"{backend}: {backends.why_not(backend) or 'there'}")
    good = True
    for device, what in devices():
        print(f"{device}: {what}; {explain(device, build)}", flush=True)
        good &= _print_device(device)
    return good


def _print_device(device: torch.device) -> bool:
    """Prints what is wrong, and a column for each back-end that runs. Returns whether all is as it should be."""
    columns: dict[str, dict[str, Difference]] = {}
    good, alone = True, len(backends.runnable(device.type)) == 1
    for examined in examine(device, _print_op if alone else None):
        good &= examined.good
        if examined.error:
            print(f"  {examined.backend}: does not run here: {examined.error}", flush=True)
            continue
        for op, worst in examined.ops.items():
            if _cell(worst) == "raised":
                print(f"  {examined.backend}: {op} does not run here: {worst.output}", flush=True)
        wrong = {op: worst for op, worst in examined.ops.items() if _cell(worst) == "WRONG"}
        if wrong:
            print(Comparison(worst._replace(output=f"{op}: {worst.output}") for op, worst in wrong.items()), flush=True)
        columns[examined.backend + (" *" if examined.serves else "")] = examined.ops
    if columns and not alone:
        ops = next(iter(columns.values()))
        width = max(map(len, (*ops, _HEAD)))
        print("  " + " ".join([f"{_HEAD:{width}}", *[f"{head:>9}" for head in columns]]))
        for op in ops:
            print("  " + " ".join([f"{op:{width}}", *[f"{_cell(found[op]):>9}" for found in columns.values()]]))
    return good


def _print_op(op: str, worst: Difference) -> None:
    """Prints an op's line at once, if only one back-end runs: so the output shows at which op a GPU hangs."""
    cell = _cell(worst)
    why = "" if worst.agrees or cell == "not run" else f" {worst.output}"
    print(f"  {op:33}{worst.output if cell == 'not run' else cell}{why}", flush=True)


def _cell(worst: Difference) -> str:
    """The error as a share of the allowed error, "equal", "WRONG", "raised" or "not run"."""
    if not worst.agrees:
        return "not run" if worst.output.startswith("not run") else "raised" if raised(worst) else "WRONG"
    return f"{worst.share:.2f}" if worst.allowed > 0 else "equal"


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def report(build: dict[str, Any]) -> dict[str, Any]:
    """The same facts for programs: docs/debugging.md has the fields."""
    found = [(device, what, list(examine(device))) for device, what in devices()]
    return {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": build,
        "cpu_half_products": _half_products(),
        "forced_backend": backends.forced_backend,
        "why_not": {backend: backends.why_not(backend) for backend in backends.BACKENDS},
        "devices": [
            {
                "device": str(device),
                "description": what,
                "explanation": explain(device, build),
                "backends": [each._asdict() | {"ops": _ops(each)} for each in all_examined],
            }
            for device, what, all_examined in found
        ],
        "good": all(each.good for _, _, all_examined in found for each in all_examined),
    }


def _ops(examined: Examined) -> dict[str, Any]:
    """The ops as JSON, which has no infinity: an infinite error, such as a number in place of NaN, is null."""
    return {
        op: {
            "output": worst.output,
            "error": worst.error if math.isfinite(worst.error) else None,
            "allowed": worst.allowed if math.isfinite(worst.allowed) else None,
            "agrees": worst.agrees,
        }
        for op, worst in examined.ops.items()
    }
