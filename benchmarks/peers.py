"""The peers: the same computations as trainers do them today.

TRL's functions are imported from TRL (trl_peers.py). The others are written here as in their users' code, each in its
best form: batched and vectorised wherever torch can do it.
"""

import math
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import d3s_kernels as d3s

from . import inputs, trl_peers
from .targets import TRL_TRITON

# The name that tables have for the code that TRL runs on this device. On a GPU, this is TRL's own Triton kernel; on a
# CPU, these are torch functions.
ON_GPU = trl_peers.ON_GPU
TRL = TRL_TRITON if ON_GPU else "TRL"
Peer = Callable[..., object]
PAIRS_AT_ONCE = 1 << 17  # pairs of a row and a support's id; with 3,584 features, their products take 940 MB


def from_trl(peer: Peer) -> Peer | None:
    """A peer that calls TRL's functions on logits; None if these cannot be imported."""
    return peer if (trl_peers.TRITON if ON_GPU else trl_peers.utils()) else None


def looping(peer: Peer) -> Peer | None:
    """A peer that loops over rows or values in Python; None on a GPU, where it takes seconds and shows nothing."""
    return None if ON_GPU else peer


# Log-probability and entropy from logits ------------------------------------------------------------------------------


def plain(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The straightforward formula, in float32."""
    logps = logits.float().log_softmax(-1)
    return logps.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logps.exp() * logps).sum(-1)


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Our own formula, H = log S - T / S. Written for torch.compile, which fuses it into few passes."""
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)
    below = logits - highest
    weight = below.exp()
    total = weight.sum(-1)
    entropy = total.log() - (below * weight).sum(-1) / total
    chosen = (logits.gather(-1, labels.unsqueeze(-1)) - highest).squeeze(-1)
    return chosen - total.log(), entropy


def verl(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """verl's formulas without flash-attention, on flat [tokens, vocabulary] logits in their own precision."""
    logits, shape = logits.flatten(0, -2), labels.shape
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    rows = zip(logits, labels.flatten(), strict=True)
    logprob = torch.stack([F.log_softmax(row, -1).gather(-1, label) for row, label in rows])
    return logprob.view(shape), entropy.view(shape)


def trl_grpo(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's function, as GRPO calls it: the entropy is only a metric, without a gradient."""
    if ON_GPU:
        logprob, entropy = trl_peers.TRITON(logits, labels)
        return logprob, entropy.detach()
    return trl_peers.utils().selective_log_softmax_and_entropy(logits, labels, entropy_requires_grad=False)


def trl_entropy_bonus(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's function, as TRL calls it with an entropy bonus in the loss: the entropy has a gradient."""
    if ON_GPU:
        return trl_peers.TRITON(logits, labels)
    return trl_peers.utils().selective_log_softmax_and_entropy(logits, labels, entropy_requires_grad=True)


def trl_entropy(logits: Tensor) -> Tensor:
    if ON_GPU:
        return trl_peers.TRITON(logits, torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device))[1]
    return trl_peers.utils().entropy_from_logits(logits)


def trl_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's LM head. Like ours, it never stores all logits: it works on chunks of the vocabulary."""
    size = getattr(trl_peers.utils(), "_CHUNKED_LOGPROB_CHUNK_SIZE", 8_192)
    return trl_peers.CHUNKED.apply(hidden, weight, None, labels, 1.0, size, None, 1.0, ("entropy",))[:2]


@cache
def liger_module() -> ModuleType | None:
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")  # otherwise Liger waits for the GPU
    return trl_peers.imported("liger_kernel.ops.fused_linear_scaled_cross_entropy") if ON_GPU else None


@cache
def liger() -> Callable | None:
    """Liger's head with entropy; None where this machine lacks it. On Hopper it needs the `cutedsl` extra."""
    hopper = inputs.device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    module = liger_module() if not hopper or find_spec("cutlass") else None  # importing it takes seconds
    if module is None:
        return None
    try:
        module._resolve_implementation(inputs.device)  # here, Liger imports what the device needs
    except ImportError as problem:
        warnings.warn(f"Liger's head is missing among the peers: {problem}", stacklevel=2)
        return None
    return module.LigerFusedLinearScaledCrossEntropyFunction.apply


def liger_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Liger's head at temperature 1, with the entropy, no ignored label, and one tile of rows for each cluster."""
    loss, entropy = liger()(hidden, weight, labels, 1.0, -100, 1, True)
    return -loss, entropy


def verl_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """verl's head in PyTorch, 512 rows at a time, as adapted by Liger for GPUs that Liger's kernels do not support."""
    formula = liger_module()._FusedLinearPPOFallbackFunction
    loss, entropy = formula.apply(hidden, weight, labels, 1.0, -100, True)
    return -loss, entropy


@cache
def verl_kernel() -> Callable | None:
    """verl's head in Triton, `use_fused_kernels` with the backend `triton`; None where this machine lacks it."""
    if inputs.device.type != "cuda" or not find_spec("verl"):
        return None
    module = trl_peers.imported_alone("verl.utils.kernel", "kernels", "linear_cross_entropy")  # it imports kernels late
    return module and (lambda *tensors: module.linear_cross_entropy(*tensors, 1.0, "none"))


def torchs_head(chunks: bool) -> Callable[..., tuple[Tensor]] | None:
    """torch's LM head, with a loss for each token but no entropy; None before torch 2.13. With `chunks`, it computes a
    few rows at a time; otherwise, it stores all logits.
    """
    head = getattr(F, "linear_cross_entropy", None)
    options = torch.nn.LinearCrossEntropyOptions() if head and chunks else None
    return head and (lambda hidden, weight, labels: (-head(hidden, weight, labels, reduction="none", options=options),))


def unsloth() -> Callable | None:
    """Unsloth's head of GRPO; None where this machine lacks it. On a GPU it needs Unsloth itself, whose import changes
    TRL and transformers. On a CPU, bench_unsloth.py imports the part of Unsloth that needs no GPU.
    """
    there = not ON_GPU or (find_spec("unsloth") and trl_peers.imported("unsloth"))
    module = trl_peers.imported("unsloth_zoo.fused_losses.fused_linear") if there else None
    return module and module.fused_linear_logprobs


def unsloth_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy is only a metric, without a gradient, as in Unsloth's GRPO."""
    return unsloth()(hidden, weight, labels, return_entropy=True, entropy_requires_grad=False)


def quack() -> Callable | None:
    """quack's cross entropy of logits; None if this machine lacks it, or lacks its compiler."""
    module = trl_peers.imported("quack.cross_entropy") if ON_GPU and find_spec("cutlass") else None
    return module and module.cross_entropy


def quack_logprob(logits: Tensor, labels: Tensor) -> tuple[Tensor]:
    """The log-probability alone: quack has no entropy. Its head returns a sum or mean of losses, so it is no peer."""
    loss = quack()(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return (-loss.view(labels.shape),)


def compiled(function: Callable) -> Callable | None:
    """The compiled function; None if torch.compile does not work here (no C++ compiler, or no Triton)."""
    try:
        torch.compile(torch.neg)(torch.ones(8, device=inputs.device))
    except Exception:
        return None
    return torch.compile(function, dynamic=False)


# Over the tokens that a sampling mask keeps ---------------------------------------------------------------------------


def filled(logits: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    """Replays sampling masks as slime does: sets the logits outside the supports to -inf, and passes all logits to our
    op.
    """
    ids = kept.padded
    keeps = torch.zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
    keeps = keeps.scatter_(-1, torch.where(ids < 0, logits.shape[-1], ids), True)[..., :-1]
    return d3s.logprob_entropy(logits.masked_fill(~keeps, -math.inf), kept.labels)


def gathered(logits: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    """Gathers the logits of the supports, padded to the longest support, and computes with only these, as prime-rl
    does.
    """
    return of_padded(logits.gather(-1, kept.padded.clamp(min=0)), kept)


def of_padded(logits: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, from the logits of `kept.padded`."""
    ids = kept.padded
    logps = logits.float().masked_fill(ids < 0, -math.inf).log_softmax(-1)
    logprob = torch.where(ids == kept.labels.unsqueeze(-1), logps, 0.0).sum(-1)
    return logprob, -(logps.exp() * logps.masked_fill(ids < 0, 0.0)).sum(-1)


def all_logits(hidden: Tensor, weight: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    """Replays sampling masks from hidden states as prime-rl does: computes the logits of all ids, and gathers the
    logits of the supports. prime-rl cuts the vocabulary into chunks and recomputes the logits in the backward, which is
    slower. Here there are no chunks, since all logits fit into memory.
    """
    return gathered(F.linear(hidden, weight), kept)


def kept_columns_padded(hidden: Tensor, weight: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    """Replays sampling masks from hidden states as SkyRL does: computes only the logits of the supports and of
    padding.
    """
    ids = kept.padded
    row = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    return of_padded(of_pairs(hidden, weight, row, ids.flatten().clamp(min=0)).view(ids.shape), kept)


def kept_columns(hidden: Tensor, weight: Tensor, kept: inputs.Kept) -> tuple[Tensor, Tensor]:
    """Computes only the logits of the supports, without padding, as SkyRL proposes."""
    ids, lengths = kept.mask.token_ids, kept.mask.offsets.diff()
    row = torch.repeat_interleave(lengths, output_size=len(ids))
    logits = of_pairs(hidden, weight, row, ids)
    zeros = torch.zeros_like(kept.labels, dtype=torch.float32)
    highest = (zeros - math.inf).scatter_reduce(0, row, logits.detach(), "amax")
    below = logits - highest[row]
    mass = below.exp()
    total = zeros.index_add(0, row, mass)
    chosen = zeros.index_add(0, row, torch.where(ids == kept.labels[row], below, 0.0))
    return chosen - total.log(), total.log() - zeros.index_add(0, row, mass * below) / total


def of_pairs(hidden: Tensor, weight: Tensor, row: Tensor, ids: Tensor) -> Tensor:
    """Computes one logit for each pair of a row and an id. The pairs are processed in chunks, and the backward
    recomputes each chunk: on a GPU, the products of all pairs would not fit into memory at the same time.
    """

    def product(row: Tensor, ids: Tensor) -> Tensor:
        return (hidden.index_select(0, row) * weight.index_select(0, ids)).sum(-1)

    if len(row) <= PAIRS_AT_ONCE:
        return product(row, ids).float()
    chunks = zip(row.split(PAIRS_AT_ONCE), ids.split(PAIRS_AT_ONCE), strict=True)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(product, *chunk, **options) for chunk in chunks]).float()


# Masks of the highest scores ------------------------------------------------------------------------------------------


def topk_scatter(scores: Tensor, ratio: float) -> Tensor:
    return topk_of_each(scores, math.ceil(ratio * scores.shape[-1]))


def topk_of_each(scores: Tensor, k: int) -> Tensor:
    kept = scores.topk(k, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, kept, True)


def flashinfer_indices() -> Callable | None:
    """FlashInfer's top-K of padded rows of different lengths; None where this machine lacks it."""
    module = trl_peers.imported("flashinfer.topk") if ON_GPU and find_spec("flashinfer") else None
    return module and module.top_k_ragged_transform


def kthvalue(scores: Tensor, ratio: float) -> Tensor:
    rank = scores.shape[-1] - math.ceil(ratio * scores.shape[-1]) + 1
    return scores >= scores.kthvalue(rank, keepdim=True).values


def quantile(scores: Tensor, ratio: float) -> Tensor:
    """The threshold of TRL's `top_entropy_quantile`."""
    return scores >= scores.quantile(1 - ratio, dim=-1, keepdim=True)


def trl_token_mask(logits: Tensor, advantages: Tensor, ratio: float) -> Tensor:
    """Scores |A| H from TRL's entropy, masked by TRL's quantile over the batch."""
    scores = advantages.abs().unsqueeze(-1) * trl_entropy(logits).float()
    return quantile(scores.flatten(), ratio)


# Rollouts -------------------------------------------------------------------------------------------------------------


def max_variance(values: Tensor, keep: int) -> Tensor:
    """Marks the `keep` values of each row that together have the largest variance. It sorts the row, forms running
    sums, and compares all splits in one pass.
    """
    ordered, order = values.sort(dim=-1)
    centred = ordered.double() - ordered.mean(-1, keepdim=True)
    low, high = centred[..., :keep], centred[..., -keep:].flip(-1)
    sums = torch.stack([low, low.square(), high, high.square()]).cumsum(-1)
    low_sum, low_square, high_sum, high_square = F.pad(sums, (1, 0))
    total, square = low_sum + high_sum.flip(-1), low_square + high_square.flip(-1)
    from_bottom = (square - total.square() / keep).argmax(-1, keepdim=True)
    position = torch.arange(values.shape[-1], device=values.device)
    kept = (position < from_bottom) | (position >= values.shape[-1] - keep + from_bottom)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def pods(values: Tensor, keep: int) -> Tensor:
    """PODS's loop over the splits, batched over the groups as in its multi-GPU trainer."""
    order = values.argsort(dim=-1, descending=True)
    best = order[:, :keep]
    variances = values.gather(-1, best).var(dim=-1)
    for top in range(keep):
        split = torch.cat([order[:, :top], order[:, top - keep :]], dim=-1)
        spread = values.gather(-1, split).var(dim=-1)
        better = spread > variances
        if better.any():
            variances = torch.where(better, spread, variances)
            best = torch.where(better.unsqueeze(-1), split, best)
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, best, True)


def trl_advantages(rewards: Tensor) -> Tensor:
    """`scale_rewards="group"`, on the flat rewards that TRL gathers from all ranks."""
    groups, size = rewards.shape
    flat = rewards.flatten()
    mean = torch.nanmean(flat.view(-1, size), dim=1).repeat_interleave(size, dim=0)
    std = trl_peers.utils().nanstd(flat.view(-1, size), dim=1).repeat_interleave(size, dim=0)
    return torch.nan_to_num((flat - mean) / (std + 1e-4), nan=0.0).view(groups, size)


def verl_advantages(rewards: Tensor) -> Tensor:
    """verl's loop over groups and rollouts (GRPO, outcome rewards)."""
    groups, size = rewards.shape
    scores = rewards.flatten().clone()
    owner = [group for group in range(groups) for _ in range(size)]
    members: dict[int, list[Tensor]] = {}
    for row, group in enumerate(owner):
        members.setdefault(group, []).append(scores[row])
    mean = {group: torch.stack(rows).mean() for group, rows in members.items()}
    std = {group: torch.stack(rows).std() for group, rows in members.items()}
    for row, group in enumerate(owner):
        scores[row] = (scores[row] - mean[group]) / (std[group] + 1e-6)
    return scores.view(groups, size)
