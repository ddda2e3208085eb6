"""Every op on arguments of the table, for compute-sanitizer: short and long rows and segments, and misaligned rows. The
ops with the most barriers come first, and a line says which one runs, so that an end before the last one loses little.

compute-sanitizer --tool racecheck python tests/cuda/sanitized.py        all
compute-sanitizer --tool racecheck python tests/cuda/sanitized.py 1/2    the first of two parts, of about the same time
"""

import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from cases.coverage import require_all, served_by
from cases.draw import Draw
from cases.table import OPS
from every_op import GPU, ROWS, call

from d3s_kernels.check.compare import moved

# Draws, by the largest length of a row or a segment: beyond each size at which a kernel changes to other launches.
SIZES = {40: 3, 10_000: 2, 70_000: 1}
FIRST = [
    "topk_mask", "max_variance_select", "logprob_entropy", "logprob_entropy_backward_", "support_weight_grad_",
    "support_hidden_grad_", "support_logits", "support_logits_backward", "compact", "select_tokens",
    "logprob_entropy_backward", "support_rows", "support_logprob_entropy_", "support_softmax_state_",
    "support_logprob_entropy_backward_",
    "softmax_state_", "importance_ratio", "entropy_groups", "adaptive_clip", "group_advantages",
]  # fmt: skip


def what_the_table_cannot_draw(part: int) -> None:
    """Rows of every number of warps; the narrow gradient of the first minute; and segments beyond a block's shared
    memory, in pieces.
    """
    from test_first_minute import OP, narrow_and_wide

    for name in list(ROWS)[part::2]:
        call(name)()
    if part == 0:
        narrow_and_wide(5)
    else:
        ties = torch.arange(131_072, device=GPU) % 7
        OP.topk_mask(ties.float(), 0.1)
        OP.max_variance_select(ties.float(), 1000)
        OP.compact(ties == 3, 9000)


def main(part: int = 1, parts: int = 1) -> None:
    ops = served_by("kernels", "composed")
    ordered = [*FIRST, *sorted(ops - set(FIRST))]
    require_all("the sanitizer's ops", ordered, ops)
    begin = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {what}", flush=True)

    for extra in range(2):
        if extra % parts == part - 1:
            say(f"what the table cannot draw, {extra + 1}")
            what_the_table_cannot_draw(extra)
    for op in ordered[part - 1 :: parts]:
        say(op)
        for most, draws in SIZES.items():
            for seed in range(draws):
                # No gradients: their ops are here too.
                with torch.no_grad():
                    getattr(torch.ops.d3s_kernels, op).default(**moved(OPS[op].draw(Draw(seed, most=most)), GPU))
        if GPU.type == "cuda":
            torch.cuda.synchronize()
    say(f"{len(ordered[part - 1 :: parts])} ops ran")


if __name__ == "__main__":
    main(*map(int, sys.argv[1].split("/")) if len(sys.argv) > 1 else ())
