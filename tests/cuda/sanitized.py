"""Every op on arguments of the table, for compute-sanitizer: short and long rows and segments, and misaligned rows.

compute-sanitizer --tool racecheck python tests/cuda/sanitized.py
"""

import torch

from d3s_kernels._table.coverage import require_all, served_by
from d3s_kernels._table.draw import Draw
from d3s_kernels._table.outcomes import called
from d3s_kernels._table.table import OPS
from d3s_kernels.compare import moved

GPU = torch.device("cuda")
# Draws, by the largest length of a row or a segment: beyond each size at which a kernel changes to other launches.
SIZES = {40: 4, 10_000: 2, 200_000: 1}


def main() -> None:
    ran = set()
    for op in served_by("kernels", "composed"):
        function = getattr(torch.ops.d3s_kernels, op).default
        for most, draws in SIZES.items():
            for seed in range(draws):
                called(function, moved(OPS[op].draw(Draw(seed, most=most)), GPU))
        ran.add(op)
    torch.cuda.synchronize()
    require_all("the sanitizer ran every op", ran, served_by("kernels", "composed"))
    print(f"{len(ran)} ops ran")


if __name__ == "__main__":
    main()
