"""Runs every CPU op of a library built with AddressSanitizer, on arguments of the table.

    LD_PRELOAD=$(gcc -print-file-name=libasan.so) python tests/cpp/sanitized_ops.py build/sanitize

The folder holds the package's libraries. Results are compared with the reference, as in the other tests. In addition, a
read or write out of bounds or an integer overflow ends the run.
"""

import importlib.util
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
# The package looks for its libraries beside this module, so it finds the sanitized ones.
(path,) = Path(sys.argv[1]).glob("_build_info*.so")
spec = importlib.util.spec_from_file_location("d3s_kernels._build_info", path)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)

from cases.coverage import require_all, served_by  # noqa: E402
from cases.draw import Draw  # noqa: E402
from cases.table import OPS  # noqa: E402

from d3s_kernels.check.compare import compare_here  # noqa: E402

# Draws, by the largest length of a row or a segment: many short ones, and some beyond each size at which a kernel
# starts to work in pieces.
SIZES = {40: 25, 300: 8, 10_000: 2, 70_000: 1}

ran, calls = set(), 0
for op in served_by("kernels", "composed", "cpu"):
    function = getattr(torch.ops.d3s_kernels, op).default
    for most, draws in SIZES.items():
        for seed in range(draws):
            arguments = OPS[op].draw(Draw(seed, most=most))
            for difference in compare_here(OPS[op], function, arguments, torch.device("cpu"), "cpu"):
                assert difference.agrees, (op, seed, most, difference)
            calls += 1
    ran.add(op)
require_all("the sanitized library ran every op", ran, served_by("kernels", "composed", "cpu"))
print(f"{calls} calls of {len(ran)} ops, none out of bounds")
