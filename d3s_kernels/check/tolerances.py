"""Exact results and allowed errors, which ``compare``, the doctor and the tests use; and the fixed calls that the
doctor makes. The allowed errors are only as large as float32 requires.

The exact results of a public function come from ``reference.py``. The exact results of an op come from plain PyTorch on
the CPU. This is enough, since an op is only a step of a public function, and the whole function is compared with
``reference.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._dispatch import backends
from .._dispatch.libraries import schema_of
from ..support.sampling_mask import SamplingMask

Arguments = Mapping[str, Any]
# A function that gets an exact result and the arguments of the call, and returns the allowed error. The shape of the
# allowed error broadcasts to the shape of the result.
Allowed = Callable[[Tensor, Arguments], Tensor]


@dataclass(frozen=True)
class Row:
    """The exact results of an op or a public function, and the allowed errors of the results and gradients."""

    means: Callable[..., Any]
    """The function that computes the exact results from the arguments of the call. If the op writes to tensors, these
    tensors are the first results. A result that is None is not compared.
    """
    results: Mapping[str, Allowed]
    gradients: Mapping[str, Allowed] = field(default_factory=dict)
    """For each argument that has a gradient, the allowed error of this gradient."""
    from_found: bool = False
    """Whether ``means`` also gets the results of the checked call, as its argument ``found``. The entropies in these
    results have rounding errors, and ``means`` computes the kept tokens that follow exactly from these very entropies.
    """


# ---- how far a result may be off -------------------------------------------------------------------------------------


def equal(exact: Tensor, arguments: Arguments) -> Tensor:
    return torch.zeros(())


def near(absolute: float, relative: float = 0.0) -> Allowed:
    return lambda exact, arguments: absolute + relative * exact.double().abs().nan_to_num(posinf=0)


entropy = near(1e-5)  # nats
# The relative term is needed for logits far below the maximum: it allows for the four roundings in (z - max) /
# temperature - log S.
logprob = near(1e-5, 2**-22)


def rounding(dtype: torch.dtype) -> float:
    """Returns the allowed error of a gradient in this dtype, as a share of the gradient's norm."""
    return 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps


def _temperature(arguments: Arguments) -> Tensor:
    return torch.as_tensor(arguments.get("temperature", 1.0), dtype=torch.float64)


def _incoming(arguments: Arguments) -> Any:
    """Returns for each row the sum of |incoming gradient| / temperature, or 0 if there are no incoming gradients."""
    names = "grad_logprob", "grad_entropy", "grad_tail_logprob", "grad_logprobs"
    grads = {name: grad.double().abs().nan_to_num() for name in names if (grad := arguments.get(name)) is not None}
    if "grad_logprobs" in grads:  # of several ids for each row
        grads["grad_logprobs"] = grads["grad_logprobs"].sum(-1)
    return sum(grad / _temperature(arguments) for grad in grads.values())


def gradient_of_logits(exact: Tensor, arguments: Arguments) -> Tensor:
    """Allows an error for each row: a share of the norm of the row's gradient, plus the rounding error that remains
    where terms of the gradient cancel.
    """
    dtype = arguments["logits"].dtype
    norm = exact.double().nan_to_num().norm(dim=-1) + torch.finfo(dtype).smallest_normal  # subnormals: constant steps
    limit: Tensor = rounding(dtype) * norm + 4e-6 * _incoming(arguments)
    return limit.unsqueeze(-1)


def gradient_of_ratios(exact: Tensor, arguments: Arguments) -> Tensor:
    """Allows any gradient where the ratio is next to a bound, since the gradient jumps to 0 at the bound."""
    call = {name: part for name, part in arguments.items() if name != "grad_ratio"}
    ratio = reference.importance_ratio(**call | {"log_bounds": (-math.inf, math.inf)})
    default = (-20, 20) if arguments.get("level", "token") == "token" else (-math.inf, 10)
    distances = [(ratio.detach().log() - bound).abs() for bound in arguments.get("log_bounds") or default]
    return near(1e-8, 1e-5)(exact, arguments).masked_fill(torch.minimum(*distances) < 1e-4, math.inf)


def of_head(name: str) -> Allowed:
    """Returns the function that computes the allowed error for ``name``: a result of the LM head, or an argument whose
    gradient is checked. For a gradient, each element is allowed the same error: a bound on the norm of the errors of
    all elements.

    The error of a logit is assumed to be a few rounding steps of the terms in its sum. All other errors are derived
    from the error of the logits, to first order.
    """

    def allowed(exact: Tensor, arguments: Arguments) -> Tensor:
        hidden, weight = (arguments[part].detach() for part in ("hidden", "weight"))
        bias = None if arguments.get("bias") is None else arguments["bias"].detach()
        shift = 2**-21 * reference._head_logits(hidden.abs(), weight.abs(), None if bias is None else bias.abs(), None)
        dtype = arguments.get("logits_dtype") or torch.float32
        if (dtype := hidden.dtype if dtype == "auto" else dtype) != torch.float32:
            shift = shift + 8 * torch.finfo(dtype).eps * reference._head_logits(hidden, weight, bias, None).abs()
        shift = shift.nan_to_num(posinf=0).amax(-1) / _temperature(arguments)
        if name in ("logprob", "logprobs", "tail_logprob"):
            return logprob(exact, arguments) + 2 * (shift.unsqueeze(-1) if name == "logprobs" else shift)
        if name == "entropy":
            return 1e-5 + 2 * shift * (1 + exact.double().nan_to_num())
        factors = {"hidden": weight.double().norm(dim=-1).amax(), "weight": hidden.double().norm(dim=-1), "bias": 1.0}
        share, least = rounding(hidden.dtype), torch.finfo(hidden.dtype).smallest_normal  # subnormals: constant steps
        limit: Tensor = share * (exact.double().nan_to_num().norm() + least * exact.numel() ** 0.5)
        error_of_logits = (share + 2 * shift) * _incoming(arguments) + share * least * len(weight) ** 0.5
        return limit + (error_of_logits * factors[name]).nan_to_num().norm()

    return allowed


def topk_of_head(
    found: Mapping[str, Tensor], hidden: Tensor, weight: Tensor, k: int, **options: Any
) -> tuple[Any, ...]:
    """Returns the exact results for the ids in ``found``, if these are the ids of the k largest logits up to rounding.
    Otherwise, returns the ids of the k largest.
    """
    exact = reference.linear_topk_logprobs(hidden, weight, k, **options)
    ids, head = found["token_ids"], {"hidden": hidden, "weight": weight, **options}
    at_ids = reference.linear_token_logprobs(hidden, weight, ids, **options)
    near_enough = of_head("logprobs")(exact.logprobs, head)
    differ = (at_ids.logprobs - exact.logprobs).nan_to_num(0, posinf=0, neginf=0).abs() > near_enough
    in_order = ids.sort(-1).values
    repeated = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    wrong = differ | (repeated.any(-1, keepdim=True)) | ((ids == -1) != (exact.token_ids == -1))
    logprobs = at_ids.logprobs.where(ids >= 0, exact.logprobs)
    return torch.where(wrong, exact.token_ids, ids), logprobs, at_ids.tail_logprob, at_ids.entropy


# ---- public functions ------------------------------------------------------------------------------------------------


def from_logits(found: Mapping[str, Tensor], logits: Tensor, **options: Any) -> tuple[Any, ...]:
    """Returns the selection that follows exactly from the entropies in ``found``. Only the field ``entropy`` of this
    selection does not come from ``found``: it has the exact entropies.
    """
    of_choice = signature(reference.select_tokens).parameters
    of_entropy = {name: options.pop(name) for name in [*options] if name not in of_choice}
    exact = reference.entropy(logits, mask=options.get("mask"), **of_entropy)
    return reference.select_tokens(found["entropy"], **options)._replace(entropy=exact)


_SELECTION = {"mask": equal, "entropy": entropy, "count": equal, "threshold": equal, "weight": near(0, 1e-6)}

_OF_TOKENS = dict.fromkeys(("logprobs", "tail_logprob", "logprob"), logprob)

FUNCTIONS: dict[str, Row] = {
    "entropy": Row(reference.entropy, {"entropy": entropy}, {"logits": gradient_of_logits}),
    "logprob_entropy": Row(
        reference.logprob_entropy, {"logprob": logprob, "entropy": entropy}, {"logits": gradient_of_logits}
    ),
    "linear_logprob_entropy": Row(
        reference.linear_logprob_entropy,
        {name: of_head(name) for name in ("logprob", "entropy")},
        {name: of_head(name) for name in ("hidden", "weight", "bias")},
    ),
    "token_logprobs": Row(
        reference.token_logprobs, {**_OF_TOKENS, "entropy": entropy}, {"logits": gradient_of_logits}
    ),
    "linear_token_logprobs": Row(
        reference.linear_token_logprobs,
        {name: of_head(name) for name in (*_OF_TOKENS, "entropy")},
        {name: of_head(name) for name in ("hidden", "weight", "bias")},
    ),
    "topk_logprobs": Row(
        reference.topk_logprobs,
        {"token_ids": equal, "logprobs": logprob, "tail_logprob": logprob, "entropy": entropy},
    ),
    "linear_topk_logprobs": Row(
        topk_of_head,
        {"token_ids": equal} | {name: of_head(name) for name in ("logprobs", "tail_logprob", "entropy")},
        from_found=True,
    ),
    "topk_mask": Row(reference.topk_mask, {"mask": equal}),
    "select_tokens": Row(reference.select_tokens, _SELECTION),
    "select_tokens_from_logits": Row(from_logits, _SELECTION, from_found=True),
    "random_prefixes": Row(
        reference.random_prefixes, {"mask": equal, "weight": near(0, 1e-6), "count": equal}
    ),
    "shared_tokens": Row(reference.shared_tokens, {"shared": equal}),
    "compact": Row(reference.compact, {"indices": equal, "count": equal}),
    "group_advantages": Row(reference.group_advantages, {"advantages": near(1e-9, 2**-22)}),
    "groups_without_spread": Row(reference.groups_without_spread, {"same": equal}),
    "variance_mass": Row(reference.variance_mass, {"groups": equal}),
    "max_variance_select": Row(reference.max_variance_select, {"mask": equal}),
    "select_rollouts": Row(reference.select_rollouts, {"mask": equal}),
    "importance_ratio": Row(
        reference.importance_ratio, {"ratio": near(1e-37, 1e-5)}, {"logprob": gradient_of_ratios}
    ),
    "entropy_groups": Row(reference.entropy_groups, {"groups": equal}),
    "adaptive_clip": Row(reference.adaptive_clip, {"epsilon": near(1e-10, 1e-6)}),
}  # fmt: skip


# ---- fixed calls for d3s doctor --------------------------------------------------------------------------------------

# The lengths of rows and segments: one is very short, one is below the block size of a GPU kernel, and one is several
# blocks long.
LENGTHS = (8, 333, 5000)


@cache
def calls(length: int) -> dict[str, dict[str, Any]]:
    """Returns the arguments of one call for each op, except for ops that need a process group. The arguments are the
    same in every report. If an op has a public function, the arguments are for this function.
    """
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # Five rows of logits. In the first row, some ids have probability 0. The logits of the second row are far from 0.
    # The fourth row is masked. The sampling mask has three ids for the first row, one id for the second row, and no ids
    # for the third row, so that the third row is dense.
    logits, labels = 3 * normal(5, length), torch.tensor([2, -100, 7, 0, 5])
    logits[0, 3::3], logits[1] = -math.inf, logits[1] + 1000
    mask, temperature = torch.tensor([True, True, True, False, True]), torch.tensor([1.0, 0.7, 2.0, 1.0, 0.9])
    kept = SamplingMask(torch.tensor([0, 1, 2, 3, 4, 5, 7]).int(), torch.tensor([0, 3, 4, 4, 5, 7]))
    supports = {"support_ids": kept.token_ids, "support_offsets": kept.offsets}
    with_supports = {"labels": labels, "mask": mask, **supports}
    rows = {"labels": labels, "temperature_tensor": temperature}
    states = torch.stack([logits.amax(-1), 1 + normal(5) ** 2, -(normal(5) ** 2), logits[:, 0]], -1)
    incoming = {"grad_logprob": normal(5), "grad_entropy": normal(5)}
    incoming |= {"entropy": torch.ones(5), "row_max": logits.amax(-1), "log_sum": torch.ones(5)}
    hidden, weight = normal(5, 24).bfloat16(), normal(length, 24).bfloat16()
    token_ids = torch.tensor([[0, 3, 3], [7, -1, 1], [2, 5, 1], [0, 1, 2], [-1, -1, -1]])
    of_ids = {"token_ids": token_ids, **rows}
    taken = {"taken": normal(5, 3).masked_fill(token_ids == 3, math.nan), "state": states}
    of_rows = {"tail_logprob": -normal(5).abs(), "logprob": -normal(5).abs(), "entropy": torch.ones(5)}
    of_rows |= {"grad_logprobs": normal(5, 3), "grad_tail_logprob": normal(5)}
    of_rows["logprobs"] = -normal(5, 8).abs().gather(1, token_ids.clamp(min=0))  # the same for equal ids
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
        "logprob_entropy_no_grad": {
            "logits": logits, "labels": labels, "temperature_tensor": temperature, "mask": mask,
        },
        "logprob_entropy_backward": {"logits": logits.bfloat16(), "mask": mask, **incoming, **rows},
        "softmax_state_": {"state": states, "logits": logits, **rows},
        "softmax_state_finish": {"state": torch.stack([states, states]), "temperature_tensor": temperature},
        "logprob_entropy_backward_": {"logits": logits, **incoming, **rows},
        "logprob_entropy_backward_rows_": {
            "logits": logits.flip(0), "rows": torch.arange(4, -1, -1), "grad_logits": torch.empty(5, length).bfloat16(),
            **incoming, **rows,
        },
        "linear_logprob_entropy": {
            "hidden": hidden.clone().requires_grad_(), "weight": weight.clone().requires_grad_(), "labels": labels,
            "temperature": temperature, "mask": mask, "logit_softcap": 30.0,
        },
        "token_logprobs": {
            "logits": logits.clone().requires_grad_(), "token_ids": token_ids, "labels": labels, "mask": mask,
            "temperature": temperature,
        },
        "linear_token_logprobs": {
            "hidden": hidden.clone().requires_grad_(), "weight": weight.clone().requires_grad_(), "labels": labels,
            "token_ids": token_ids, "temperature": temperature, "mask": mask, "logit_softcap": 30.0,
        },
        "token_softmax_state_": {"logits": logits, **taken, **of_ids},
        "token_logprobs_finish": {"temperature_tensor": temperature, "token_ids": token_ids, **taken},
        "token_logprobs_gradient": {"mask": mask, "grad_logprob": normal(5), "grad_entropy": None, **of_rows, **of_ids},
        "put_token_gradients_": {
            "gradient": logits.bfloat16(), "token_ids": token_ids, "labels": labels,
            "values": token_ids.new_zeros(5, 4).float(),
        },
        "topk_logprobs": {"logits": logits, "k": 5, "temperature": temperature, "mask": mask},
        "linear_topk_logprobs": {
            "hidden": hidden, "weight": weight, "k": 5, "temperature": temperature, "mask": mask, "logit_softcap": 30.0
        },
        "topk_softmax_state_": {
            "state": states, "best": torch.full((5, 5), torch.iinfo(torch.int64).min), "logits": logits,
            "temperature_tensor": temperature, "mask": mask,
        },
        "support_rows": {"values": logits, "mask": mask, "max_dense_rows": 1, **supports},
        "support_logprob_entropy_": {
            **{name: torch.zeros(5) for name in ("logprob", "entropy", "row_max", "log_sum")}, "logits": logits,
            "temperature_tensor": temperature, **with_supports,
        },
        "support_softmax_state_": {
            "state": states, "logits": logits, "temperature_tensor": temperature, **with_supports
        },
        "support_logprob_entropy_backward_": {
            "grad_logits": torch.zeros(5, length).bfloat16(), "logits": logits.bfloat16(), **incoming,
            "temperature_tensor": temperature, **with_supports,
        },
        "support_logits": {"hidden": hidden, "weight": weight, **with_supports},
        "support_logits_backward": {
            "logits": normal(12).expand(5, -1), "support_of": length, **incoming, **with_supports
        },
        "support_hidden_grad_": {
            "weight": weight, "offsets": kept.offsets, "undefined": labels < 0, "out": hidden * 0, **places
        },
        "support_weight_grad_": {"hidden": hidden, "out": weight * 0, **places},
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


# ---- ops -------------------------------------------------------------------------------------------------------------


def written_arguments(op: str) -> list[str]:
    return [part.name for part in schema_of(op).arguments if part.alias_info is not None and part.alias_info.is_write]


def of_step(exact: Tensor, arguments: Arguments) -> Tensor:
    rule = near(1e-5, rounding(exact.dtype)) if exact.dtype.is_floating_point else equal
    return rule(exact, arguments)


def of_maximum(exact: Tensor, arguments: Arguments) -> Tensor:
    """Allows any maximum for a row with NaN."""
    return of_step(exact, arguments).masked_fill(exact.isnan(), math.inf)


def of_gradient(exact: Tensor, arguments: Arguments) -> Tensor:
    """Allows an error of up to a share of (1 + the gradient's norm)."""
    dtypes = [part.dtype for part in arguments.values() if isinstance(part, Tensor) and part.is_floating_point()]
    limit: Tensor = max(map(rounding, dtypes)) * (1 + exact.double().nan_to_num().norm())
    return limit


def row_of_op(op: str) -> Row:
    """Returns the :class:`Row` of an op. Plain PyTorch on the CPU computes the exact results."""
    written, call = written_arguments(op), getattr(torch.ops.d3s_kernels, op).default

    def means(**arguments: Any) -> tuple[Any, ...]:
        if op == "wide_product_":  # this op exists only on CPUs; plain PyTorch has no kernel for it
            return (arguments["hidden"].float() @ arguments["weight"].float().T,)
        if any(isinstance(part, Tensor) and part.requires_grad for part in arguments.values()):
            for name, part in arguments.items():  # leaf tensors are float64 here, but no op takes float64
                if isinstance(part, Tensor) and part.is_floating_point():
                    arguments[name] = part.float()
        with backends.forced("torch"):
            results = call(**arguments)
        results = (results,) if isinstance(results, Tensor) else results or ()
        return *(arguments.get(name) for name in written), *results

    names = [*written, *(part.name or "result" for part in schema_of(op).returns)]
    results = {name: of_maximum if name in ("row_max", "state") else of_step for name in names}
    return Row(means, results, dict.fromkeys(("logits", "hidden", "weight", "bias", "logprob"), of_gradient))
