"""``python -m d3s_kernels``: what was built, what computes each op here, and every back-end beside the reference.

The exit status is 0 where all that run here agree with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import d3s_kernels as d3s
from d3s_kernels import _ops
from d3s_kernels._selfcheck import checks


def _devices() -> Iterator[tuple[torch.device, str]]:
    """Those of this machine, and what they are."""
    yield torch.device("cpu"), f"{torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield torch.device("cuda", index), f"{facts.name}, compute capability {facts.major}.{facts.minor}"
    for index in range(torch.xpu.device_count()):
        yield torch.device("xpu", index), torch.xpu.get_device_name(index)


def _column(device: torch.device, backend: str) -> tuple[list[str], list[str], bool]:
    """The names of the checks, how far this back-end is from the reference in each, and whether it is near enough."""
    names, errors, good = [], [], True
    with _ops.forced(backend):
        for name, ours, exact, tolerance in checks(device):
            error = (ours.double() - exact.double()).abs().max().item()
            near = error <= tolerance  # not of NaN
            good &= near
            names.append(f"{name} ({f'{tolerance:.0e}' if tolerance else 'equal'})")
            errors.append(f"{f'{error:.1e}' if tolerance else 'ok'}" if near else f"WRONG {error:.1e}")
    return names, errors, good


def _table(device: torch.device) -> bool:
    """Prints a column for each back-end that runs on the device. Whether those that run agree, and what serves runs."""
    serving = _ops.serving(device.type)
    columns, good = {}, True
    for backend in _ops.runnable(device.type):
        try:
            names, errors, near = _column(device, backend)
        except Exception as error:  # whatever a driver or a compiler says: it goes into the report
            print(f"  {backend}: does not run here: {type(error).__name__}: {error}")
            good &= backend not in serving
            continue
        columns[backend + (" *" if backend in serving else "")] = errors
        good &= near
    if columns:
        width = max(map(len, names))
        print("  " + " ".join([f"{'error (allowed), * serves':{width}}", *[f"{head:>14}" for head in columns]]))
        for row in zip(names, *columns.values(), strict=True):
            print("  " + " ".join([f"{row[0]:{width}}", *[f"{cell:>14}" for cell in row[1:]]]))
    return good


def main() -> int:
    print(f"torch {torch.__version__}")
    for name, value in d3s.build_info().items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(f"D3S_KERNELS_BACKEND: {_ops.forced_backend or 'not set'}")
    for backend in _ops.BACKENDS:
        print(f"{backend}: {_ops.why_not(backend) or 'there'}")
    good = True
    for device, what in _devices():
        print(f"{device}: {what}; {_ops.explain(device.type)}")
        good &= _table(device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
