"""``python -m d3s_kernels`` reports the build and the back-end of each op, and compares back-ends with the reference.

The exit status is 0 if every back-end that runs here agrees with the reference, and all that serve a device run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import d3s_kernels as d3s
from d3s_kernels._dispatch import backends
from d3s_kernels._selfcheck import checks
from d3s_kernels.compare import Comparison

_HEAD = "error / allowed, * serves"


def _devices() -> Iterator[tuple[torch.device, str]]:
    """Yields each device of this machine with a description."""
    yield torch.device("cpu"), f"{torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield torch.device("cuda", index), f"{facts.name}, compute capability {facts.major}.{facts.minor}"
    for index in range(torch.xpu.device_count()):
        yield torch.device("xpu", index), torch.xpu.get_device_name(index)


def _column(device: torch.device, backend: str) -> dict[str, str]:
    """The cell of each op: the error as a share of the allowed error, "equal" or "WRONG". Prints the wrong results."""
    cells, wrong = {}, Comparison()
    with backends.forced(backend):
        for op, worst in checks(device, backend):
            cells[op] = f"{worst.share:.2f}" if worst.allowed > 0 else "equal"
            if not worst.agrees:
                cells[op] = "WRONG"
                wrong.append(worst._replace(output=f"{op}: {worst.output}"))
    if wrong:
        print(wrong)
    return cells


def _table(device: torch.device) -> bool:
    """Prints a column for each back-end that runs on the device. Returns whether all of them agree, and those that
    serve the device run.
    """
    serving = backends.serving(device.type)
    columns, good = {}, True
    for backend in backends.runnable(device.type):
        try:
            cells = _column(device, backend)
        except Exception as error:  # any error of a driver or a compiler belongs in the report
            print(f"  {backend}: does not run here: {type(error).__name__}: {error}")
            good &= backend not in serving
            continue
        columns[backend + (" *" if backend in serving else "")] = cells
        good &= "WRONG" not in cells.values()
    if columns:
        ops = next(iter(columns.values()))
        width = max(map(len, (*ops, _HEAD)))
        print("  " + " ".join([f"{_HEAD:{width}}", *[f"{head:>9}" for head in columns]]))
        for op in ops:
            print("  " + " ".join([f"{op:{width}}", *[f"{cells[op]:>9}" for cells in columns.values()]]))
    return good


def main() -> int:
    print(f"torch {torch.__version__}")
    for name, value in d3s.build_info().items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(f"D3S_KERNELS_BACKEND: {backends.forced_backend or 'not set'}")
    for backend in backends.BACKENDS:
        print(f"{backend}: {backends.why_not(backend) or 'there'}")
    good = True
    for device, what in _devices():
        print(f"{device}: {what}; {backends.explain(device.type)}")
        good &= _table(device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
