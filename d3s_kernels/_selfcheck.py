"""The checks of ``d3s doctor``: a few fixed calls of every op, compared with exact results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._exact import FUNCTIONS
from .compare import Difference, compare_here, public, row_of
from .sampling import SamplingMask

# The lengths of rows and segments: a short length, a length that does not fill a block, and a length that needs several
# blocks of a GPU kernel.
LENGTHS = (8, 333, 5000)


@cache
def calls(length: int) -> dict[str, dict[str, Any]]:
    """Returns the arguments of one call for each op that needs no process group. If an op has a public function, the
    arguments are for this function. The arguments are the same in every report.
    """
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # Five rows of logits. In the first row, some tokens have probability 0. The logits of the second row are far from
    # 0. The fourth row is masked. The sampling mask keeps three tokens of the first row, one token of the second row,
    # and all tokens of the third row.
    logits, labels = 3 * normal(5, length), torch.tensor([2, -100, 7, 0, 5])
    logits[0, 3::3], logits[1] = -math.inf, logits[1] + 1000
    mask, temperature = torch.tensor([True, True, True, False, True]), torch.tensor([1.0, 0.7, 2.0, 1.0, 0.9])
    kept = SamplingMask(torch.tensor([0, 1, 2, 3, 4, 5, 7]).int(), torch.tensor([0, 3, 4, 4, 5, 7]))
    spans = {"labels": labels, "mask": mask, "sampling_ids": kept.token_ids, "sampling_offsets": kept.offsets}
    rows = {"labels": labels, "temperature_tensor": temperature}
    states = torch.stack([logits.amax(-1), 1 + normal(5) ** 2, -(normal(5) ** 2), logits[:, 0]], -1)
    incoming = {"grad_logprob": normal(5), "grad_entropy": normal(5)}
    incoming |= {"entropy": torch.ones(5), "row_max": logits.amax(-1), "log_sum": torch.ones(5)}
    hidden, weight = normal(5, 24).bfloat16(), normal(length, 24).bfloat16()
    places = {"rows": torch.tensor([0, 0, 0, -1, -1, 4, 4, 0, -1, -1, -1, -1]).int(), "grad": normal(12)}
    places["tokens"] = torch.arange(12).int() % 5

    # Four segments; one of them is empty. The scores have ties, NaN and infinity.
    n, offsets = 3 * length, torch.tensor([0, length, length, 3 * length - 2, 3 * length])
    scores, old, new, each = normal(n).round(decimals=1), normal(n), normal(n), normal(4)
    scores[::5], scores[3], scores[4] = 0.0, math.nan, -math.inf
    segments = {"mask": normal(n) > -1, "offsets": offsets}
    groups = {"groups": (new.abs() * 4).clamp(max=15).to(torch.int8), **segments}
    keys = torch.ops.d3s_kernels.topk_order_keys(scores)
    first = {"search": torch.zeros(4, 3, dtype=torch.int64), "shift": 24}
    counts = (5 * normal(4, 256).abs()).long()
    search = torch.tensor([[2**31, 2, length // 2], [0, 0, 0], [2**31, 1, length], [2**31 - 1, 1, 1]])
    return {
        "logprob_entropy": {
            "logits": logits.clone().requires_grad_(), "labels": labels, "temperature": temperature, "mask": mask,
            "sampling_mask": kept, "label_outside": "include",
        },
        "logprob_entropy_backward": {"logits": logits.bfloat16(), "mask": mask, **incoming, **rows},
        "softmax_state_": {"state": states, "logits": logits, "first_token": 0, **rows},
        "softmax_state_finish": {"state": torch.stack([states, states]), "temperature_tensor": temperature},
        "logprob_entropy_backward_": {"logits": logits, "first_token": 0, **incoming, **rows},
        "linear_logprob_entropy": {
            "hidden": hidden.clone().requires_grad_(), "weight": weight.clone().requires_grad_(), "labels": labels,
            "temperature": temperature, "mask": mask, "logit_softcap": 30.0,
        },
        "kept_logits": {"hidden": hidden, "weight": weight, **spans},
        "kept_logits_backward": {"logits": normal(12).expand(5, -1), "kept_of": length, **incoming, **spans},
        "kept_hidden_grad_": {
            "weight": weight, "offsets": kept.offsets, "undefined": labels < 0, "out": hidden * 0, **places
        },
        "kept_weight_grad_": {"hidden": hidden, "out": weight * 0, **places},
        "wide_product_": {"hidden": hidden, "weight": weight, "out": torch.empty(5, length)},
        "topk_mask": {"scores": scores, "ratio": 0.3, **segments},
        "select_tokens": {"entropy": scores, "advantages": each, "ratio": 0.3, **segments},
        "select_tokens_from_logits": {
            "logits": logits, "advantages": new[0], "ratio": 0.5, "mask": mask, "temperature": temperature
        },
        "compact": {"mask": segments["mask"], "capacity": 2 * length},
        "topk_order_keys": {"scores": scores, "advantages": each, **segments},
        "topk_count_digit": {"keys": keys, "bits": 8, "offsets": offsets, **first},
        "topk_choose_digit_": {"counts": counts, "ratio": 0.3, **first},
        "topk_mask_from_key": {"keys": keys, "search": search, "ties": search[:, 1] + 1, "offsets": offsets},
        "group_advantages": {"rewards": scores.abs(), "offsets": offsets},
        "max_variance_select": {"values": scores, "keep": 3, **segments},
        "importance_ratio": {
            "logprob": new.clone().requires_grad_(), "old_logprob": old, "level": "entropy_group", **groups
        },
        "importance_ratio_backward": {"grad_ratio": old, "ratio": new.exp(), "mask": segments["mask"]},
        "entropy_groups": {"entropy": new.abs(), "quantiles": (0.2, 0.8), **segments},
        "adaptive_clip": {"entropy": new.abs(), "vocab_size": 1000, **groups},
    }  # fmt: skip


def checks(device: torch.device, backend: str) -> Iterator[tuple[str, Difference]]:
    """Yields the name and the worst result of each op. After a device fault, no further op runs."""
    failed = None
    for op in calls(LENGTHS[0]):
        if op == "wide_product_" and device.type != "cpu":
            continue
        worst = worst_of(op, device, backend) if failed is None else _nothing(backend, f"not run: {failed}")
        yield op, worst
        if failed is None and raised(worst) and not _works(device):
            failed = f"the device failed at {op}"


def worst_of(op: str, device: torch.device, backend: str) -> Difference:
    """Runs an op's call for each of ``LENGTHS``, and returns the difference that is the largest share of its allowed
    error. If an error is larger than allowed, returns the first such difference, with the length in its ``output``. If
    a call raises, returns a difference with the exception in its ``output``.
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


def raised(worst: Difference) -> bool:
    """Whether the op raised an exception or did not run, so that there is no result to compare."""
    return worst.index is None and worst.error == math.inf


def _nothing(backend: str, why: str) -> Difference:
    return Difference(backend, why, None, math.inf, 0.0)


def _works(device: torch.device) -> bool:
    """Whether the device still computes. After a kernel fault, every call on the device fails."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except Exception:
        return False
