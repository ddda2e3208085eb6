"""Every op on inputs of moderate size on the GPU. The tests of the back-ends call them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from cases.coverage import served_by
from cases.draw import Draw
from cases.table import OPS
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels._rules import rules
from d3s_kernels._rules.equal_rows import most_varied
from d3s_kernels.check.compare import moved
from d3s_kernels.check.tolerances import written_arguments

GPU = torch.device(os.environ.get("D3S_TEST_DEVICE", "cuda"))
DRAWS = 3  # of each op's arguments
MOST = 5000  # the length of a row or a segment: several blocks
# Rows that the draws rarely have. In selections, 1, 2, 4 or 8 warps hold a row in registers, and a block takes a longer
# one; in ratios, 1 to 8 warps take a row. Rows of odd length begin at each place of a vector.
ROWS = {
    **{f"rows of {length}": (5, length) for length in (509, *range(1021, 8190, 1024), 8193)},
    "128 rows of 8193": (128, 8193),
}
Call = Callable[[], tuple[Tensor, ...]]


def size(on_gpu: int, on_cpu: int) -> int:
    return on_gpu if GPU.type == "cuda" else on_cpu


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What waits for the GPU raises."""
    if GPU.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if GPU.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def logits_like_a_models(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed logits. In every fourth row one token is far above the rest."""
    logits = torch.randn(*shape, device=GPU, dtype=dtype) * 3
    logits.view(-1, shape[-1])[::4, 17] += 30
    return logits


def arguments_of(op: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Arguments from the table, without gradients and with bounded rows, so that no op waits for the device."""
    arguments = moved(OPS[op].draw(Draw(seed, most=MOST)), device)
    for name in ("max_rows", "max_grad_rows"):
        if name in arguments:
            arguments[name] = arguments["labels"].numel()
    if "max_dense_rows" in arguments:
        arguments["max_dense_rows"] = len(arguments["support_offsets"])
    return {name: part.detach() if isinstance(part, Tensor) else part for name, part in arguments.items()}


def run(op: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The op's results and the tensors it writes. It runs on copies, so the arguments stay unchanged. Nothing is seeded
    here: a graph that is being captured allows only the generator that it has.
    """
    fresh = {name: part.clone() if isinstance(part, Tensor) else part for name, part in arguments.items()}
    call = getattr(torch.ops.d3s_kernels, op).default
    found = call(**fresh)
    results = (found,) if isinstance(found, Tensor) else found or ()
    # A gradient that was not requested is empty, or none.
    every = (*(fresh.get(name) for name in written_arguments(op)), *results)
    return tuple(result for result in every if result is not None and result.numel() > 0)


def names() -> list[str]:
    ops = sorted(served_by("kernels", "composed"))
    return [*(f"{op} {seed}" for op in ops for seed in range(DRAWS)), *MADE_OF_OPS]


def call(name: str, device: torch.device = GPU) -> Call:
    """The call of one of ``names()``. Its inputs stay at the same addresses."""
    if name in MADE_OF_OPS:
        return partial(MADE_OF_OPS[name], torch.randint(0, 3, (64, 8)).float().to(device))
    op, seed = name.split()
    return partial(run, op, arguments_of(op, int(seed), device))


def _rollouts(rule: str, rewards: Tensor) -> tuple[Tensor, ...]:
    keep = torch.full((), 3, device=rewards.device)
    return tuple(d3s.select_rollouts(rewards, keep, rule=rule, scope=scope) for scope in ("batch", "group"))


def _tokens(rule: str, rewards: Tensor) -> tuple[Tensor, ...]:
    return tuple(d3s.select_tokens(rewards / 3, rewards[:, 0], 0.3, rule=rule)[:3:2])


def _rows(shape: tuple[int, int], rewards: Tensor) -> tuple[Tensor, ...]:
    """Selections and ratios of rows with ties, with a mask, and with -inf in the first one. Most groups have words of
    their own in csrc/cuda/ratios.cu, and some take atomic additions.
    """
    place = torch.arange(shape[0] * shape[1], device=rewards.device).view(shape)
    few = rewards.flatten()[place % rewards.numel()] / 3
    scores = torch.where(place < shape[1], few.log(), few)
    mask, groups = place % 5 > 0, (place * 7 % 13 - 1).to(torch.int8)
    kept = d3s.select_tokens(scores, few[:, 0], 0.3, mask=mask, scope="sequence", drop_zeros=True)
    return (
        d3s.topk_mask(scores, 0.1, mask=mask),
        *(kept.mask, kept.count, kept.threshold),
        d3s.importance_ratio(scores, few / 2, mask, level="sequence"),
        d3s.importance_ratio(scores, few / 2, mask, level="entropy_group", groups=groups),
        d3s.adaptive_clip(few, groups, mask, vocab_size=100),
    )


# Rules that draw are left out, as their results change; so is TRL's quantile, which waits for the device.
MADE_OF_OPS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    **{f"rollouts, {rule}": partial(_rollouts, rule) for rule, row in rules.ROLLOUTS.items() if not row.draws},
    **{
        f"tokens, {rule}": partial(_tokens, rule)
        for rule, row in rules.TOKENS.items()
        if not row.draws and rule != "entropy_quantile"
    },
    **{name: partial(_rows, shape) for name, shape in ROWS.items()},
    "rollouts, equal rows": lambda rewards: (
        most_varied(rewards.view(8, 64), torch.full((), 192, device=rewards.device)),
    ),
}
