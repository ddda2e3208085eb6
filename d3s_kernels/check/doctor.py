"""The report of ``d3s doctor``: the build, the back-end of each op, and all back-ends compared with exact results."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._dispatch import backends
from .compare import Comparison, Difference, compare_here, public, row_of
from .tolerances import FUNCTIONS, LENGTHS, calls

SCHEMA = 1  # the version of the JSON report; increased when a field changes its meaning or is removed
_HEAD = "error / allowed, * serves"
Say = Callable[[str], object]  # a function that is called with each part of the text report


def report(build: dict[str, Any], say: Say) -> dict[str, Any]:
    """Runs all checks and returns the report for programs; docs/debugging.md lists its fields. ``say`` is called with
    each part of the text report as soon as this part is complete. So if a device hangs, the text shows at which part.
    """
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": build,
        "cpu_half_products": [str(dtype).removeprefix("torch.") for dtype in backends.half_products()],
        "forced_backend": backends.forced_backend,
        "why_not": {},
        "devices": [],
        "good": True,
    }
    say(f"torch {facts['torch']}")
    say(f"here: Python {facts['python']}, {facts['platform']}, CUDA of torch: {torch.version.cuda}")
    for name, value in build.items():
        say(f"{name.replace('_', ' ')}: {value}")
    half = ", ".join(facts["cpu_half_products"]) or "none"
    say(f"matrix products in half precision on the CPU: {half}; others in float32")
    say(f"D3S_KERNELS_BACKEND: {backends.forced_backend or 'not set'}")
    found = list(devices())  # initialises CUDA: then it is known whether the CUDA library has code for the GPUs
    facts["why_not"] = {backend: backends.why_not(backend) for backend in backends.BACKENDS}
    for backend, why in facts["why_not"].items():
        say(f"{backend}: {why or 'there'}")
    for device, what in found:
        explanation = backends.explain(device.type)
        say(f"{device}: {what}; {explanation}")
        examined, good = _examine(device, say)
        facts["devices"].append(
            {"device": str(device), "description": what, "explanation": explanation, "backends": examined}
        )
        facts["good"] &= good
    return facts


def devices() -> Iterator[tuple[torch.device, str]]:
    """Yields each device of this machine with a description."""
    yield torch.device("cpu"), f"{platform.machine()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield torch.device("cuda", index), f"{facts.name}, compute capability {facts.major}.{facts.minor}"
    for index in range(torch.xpu.device_count()):
        yield torch.device("xpu", index), torch.xpu.get_device_name(index)


def _examine(device: torch.device, say: Say) -> tuple[list[dict[str, Any]], bool]:
    """Checks each back-end that should run on the device. Returns the results for the JSON report, and whether all is
    good. All is good if all results are right, and if every back-end that serves users' calls has run.
    """
    names, serving = backends.runnable(device.type), backends.serving(device.type)
    good, examined = True, []
    columns: dict[str, dict[str, Difference]] = {}
    for backend in names:
        serves = backend in serving
        # If there is only one back-end, a line is printed for each op as soon as the op has run. So the text shows at
        # which op a GPU hangs.
        error, ops = _run(device, backend, say if len(names) == 1 else None)
        good &= all(worst.agrees or (_raised(worst) and not serves) for worst in ops.values())
        good &= not (serves and error)
        examined.append({"backend": backend, "serves": serves, "error": error, "ops": _as_json(ops)})
        if error:
            say(f"  {backend}: does not run here: {error}")
            continue
        for op, worst in ops.items():
            if _cell(worst) == "raised":
                say(f"  {backend}: {op} does not run here: {worst.output}")
        wrong = [worst._replace(output=f"{op}: {worst.output}") for op, worst in ops.items() if _cell(worst) == "WRONG"]
        if wrong:
            say(str(Comparison(wrong)))
        columns[backend + (" *" if serves else "")] = ops
    if columns and len(names) > 1:
        ops = next(iter(columns.values()))
        width = max(map(len, (*ops, _HEAD)))
        say("  " + " ".join([f"{_HEAD:{width}}", *[f"{head:>9}" for head in columns]]))
        for op in ops:
            say("  " + " ".join([f"{op:{width}}", *[f"{_cell(column[op]):>9}" for column in columns.values()]]))
    return examined, good


def _run(device: torch.device, backend: str, say: Say | None) -> tuple[str | None, dict[str, Difference]]:
    """Checks every op on one back-end. Returns two values: an error message (None if the back-end runs), and for each
    op the :class:`Difference` that :func:`worst_of` returns.
    """
    ops: dict[str, Difference] = {}
    error = None
    try:
        with backends.forced(backend):
            for op, worst in checks(device, backend):
                ops[op] = worst
                if say:
                    cell = _cell(worst)
                    shown = worst.output if cell == "not run" else cell if worst.agrees else f"{cell} {worst.output}"
                    say(f"  {op:38} {shown}")
    except Exception as fault:  # any error of a driver or a compiler belongs in the report
        error = f"{type(fault).__name__}: {fault}"
    if ops and all(map(_raised, ops.values())):  # for example, if there is no compiler
        op, worst = next(iter(ops.items()))
        return f"{op}: {worst.output}", {}
    return error, ops


def _cell(worst: Difference) -> str:
    """Returns the text of a table cell: the error as a share of the allowed error, or "equal", "WRONG", "raised" or
    "not run".
    """
    if not worst.agrees:
        return "not run" if worst.output.startswith("not run") else "raised" if _raised(worst) else "WRONG"
    return f"{worst.share:.2f}" if worst.allowed > 0 else "equal"


def _as_json(ops: dict[str, Difference]) -> dict[str, Any]:
    """Returns the worst result of each op for the JSON report. JSON has no infinity, so an infinite error becomes null.
    An error is infinite if, for example, the exact result is NaN and the computed result is not.
    """
    facts: dict[str, Any] = {}
    for op, worst in ops.items():
        error, allowed = (part if math.isfinite(part) else None for part in (worst.error, worst.allowed))
        facts[op] = {"output": worst.output, "error": error, "allowed": allowed, "agrees": worst.agrees}
    return facts


# ---- the checks ------------------------------------------------------------------------------------------------------


def checks(device: torch.device, backend: str) -> Iterator[tuple[str, Difference]]:
    """Yields the name and the worst result of each op. After a device fault, no further op runs."""
    failed = None
    for op in calls(LENGTHS[0]):
        if op == "wide_product_" and device.type != "cpu":
            continue
        worst = worst_of(op, device, backend) if failed is None else _nothing(backend, f"not run: {failed}")
        yield op, worst
        if failed is None and _raised(worst) and not _works(device):
            failed = f"the device failed at {op}"


def worst_of(op: str, device: torch.device, backend: str) -> Difference:
    """Runs an op's call for each of ``LENGTHS``. Returns the :class:`Difference` with the largest ``share``. If an
    error is larger than allowed, the calls stop: the difference with this error is returned, and its ``output`` also
    names the length. If a call raises, the ``output`` of the returned difference names the exception.
    """
    row, call = row_of(public(op) if op in FUNCTIONS else getattr(torch.ops.d3s_kernels, op))
    found: list[Difference] = []
    for length in LENGTHS:
        try:
            differences = compare_here(row, call, calls(length)[op], device, backend)
        except Exception as fault:  # an error of a kernel, a driver or a compiler
            first_line = next(iter(str(fault).splitlines()), "")
            return _nothing(backend, f"{type(fault).__name__} at length {length}: {first_line}")
        for difference in differences:
            if not difference.agrees:
                return difference._replace(output=f"{difference.output} at length {length}")
        found += differences
    return max(found, key=lambda difference: difference.share)


def _raised(worst: Difference) -> bool:
    """Returns whether the op raised an exception or was not run. In both cases there is no result to compare."""
    return worst.index is None and worst.error == math.inf


def _nothing(backend: str, why: str) -> Difference:
    return Difference(backend, why, None, math.inf, 0.0)


def _works(device: torch.device) -> bool:
    """Returns whether the device still computes. After a kernel fault, every call on the device fails."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except Exception:
        return False
