"""A reference implementation of the public functions, in plain PyTorch and float64. Imports nothing.

Each function has the name, the arguments and the results of a public function of ``d3s_kernels``, but no process groups
and no ``weight_grad_into``, the destination of a gradient. The code is written to be read: it loops over rows and
segments, and has no argument checks. It defines how ops treat ties, NaN, masks and empty segments, and the tests
compare the library with it.

Logits are reduced in float64. The results are float64 (the ops return float32), and autograd can differentiate them.
Scores are float32, as in the ops, so that the same scores tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Temperature = float | Tensor


class SamplingMask(Protocol):
    """Like d3s_kernels.SamplingMask: the support of row i is token_ids[offsets[i]:offsets[i + 1]]; a row without ids is
    computed over the whole vocabulary.
    """

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor: ...


class TokenSelection(NamedTuple):
    mask: Tensor
    entropy: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    threshold: Tensor
    weight: Tensor | None = None


class Prefixes(NamedTuple):
    mask: Tensor
    weight: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


# ---- vocabulary: logits [..., V] -> one value for each row -----------------------------------------------------------


def entropy(
    logits: Tensor,
    *,
    temperature: Temperature = 1.0,
    mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    max_dense_rows: int | None = None,
) -> Tensor:
    """Returns H = -sum p log p in nats, with p = softmax(logits / temperature)."""
    no_targets = torch.full(logits.shape[:-1], -100, device=logits.device)
    options: dict[str, Any] = {"mask": mask, "sampling_mask": sampling_mask, "max_dense_rows": max_dense_rows}
    return logprob_entropy(logits, no_targets, temperature=temperature, **options)[1]


def logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: Temperature = 1.0,
    mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    label_outside: str = "nan",
    max_dense_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log p of each row's label (0 if the label is -100), and the entropy of each row.

    With a sampling mask, the logits outside a row's support are replaced by -inf without being read. If a support has
    only one id, the logit of this id is not read either. All results are NaN if more than `max_dense_rows` unmasked
    rows have no support.
    """
    no_target = labels == -100
    targets = labels.long().masked_fill(no_target, 0).unsqueeze(-1)
    mask = torch.ones_like(no_target) if mask is None else mask
    read = logits
    if sampling_mask is not None:
        inside = _inside(logits, labels, sampling_mask, label_outside)
        dense = (sampling_mask.offsets.diff() == 0).to(logits.device).view(logits.shape[:-1])
        single = inside & (inside.sum(-1, keepdim=True) == 1) & ~dense.unsqueeze(-1)
        read = torch.where(inside, logits, -math.inf).masked_fill(single, 0)
    read = read.masked_fill(~mask.unsqueeze(-1), 0)  # masked rows are not read: NaN in them has no effect
    per_row = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device).unsqueeze(-1)
    log_p = torch.log_softmax(read.double() / per_row, -1)
    logprob = log_p.gather(-1, targets).squeeze(-1)
    finite = log_p.masked_fill(log_p == -math.inf, 0)  # so 0 log 0 and its gradient are 0
    row_entropy = -(log_p.exp() * finite).sum(-1)
    if sampling_mask is not None:
        exceeded = max_dense_rows is not None and int((dense & mask).sum()) > max_dense_rows
        outside = ~inside.gather(-1, targets).squeeze(-1) & ~no_target
        undefined = row_entropy.isnan() | exceeded
        logprob = _nan_where((undefined | outside) & mask, logprob, logits)
        row_entropy = _nan_where(undefined & mask, row_entropy, logits)
    return logprob.masked_fill(no_target | ~mask, 0), row_entropy.masked_fill(~mask, 0)


def _nan_where(rows: Tensor, results: Tensor, logits: Tensor) -> Tensor:
    """Makes the results of the marked rows NaN, and so the gradients of all their logits, even outside the support."""
    factor = torch.zeros_like(results).masked_fill(rows, math.nan)
    return results + factor * logits.double().nan_to_num(0, 0, 0).sum(-1)


def _inside(logits: Tensor, labels: Tensor, sampling_mask: SamplingMask, label_outside: str) -> Tensor:
    """Returns for each row which ids are in its support. A row without a support has all ids."""
    inside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    ends = pairwise(sampling_mask.offsets.tolist())
    for row, label, (begin, end) in zip(
        inside.view(-1, inside.shape[-1]), labels.flatten().tolist(), ends, strict=True
    ):
        ids = sampling_mask.token_ids[begin:end].long()
        if ((ids < 0) | (ids >= len(row))).any():
            continue  # an invalid id: no id is inside, so the row's results are NaN
        row[ids] = True
        if label_outside == "include" and label != -100:
            row[label] = True
        row |= begin == end
    return inside


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Temperature = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: torch.dtype | Literal["auto"] = torch.float32,
    workspace_bytes: int | None = None,
    keep_logits_bytes: int | None = None,
    sampling_mask: SamplingMask | None = None,
    label_outside: str = "nan",
    max_dense_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns logprob_entropy of the logits hidden @ weight.T + bias.

    `logits_dtype`, `workspace_bytes` and `keep_logits_bytes` have no effect here: in the library, they change only
    rounding, memory and time. All results are NaN if more than `max_rows` rows are unmasked; all gradients are NaN if
    more than `max_grad_rows` rows have a gradient.
    """
    logits = _head_logits(hidden, weight, bias, logit_softcap)
    options: dict[str, Any] = {"sampling_mask": sampling_mask, "max_dense_rows": max_dense_rows}
    options |= {"temperature": temperature, "mask": mask, "label_outside": label_outside}
    results = torch.stack(logprob_entropy(logits, labels, **options))
    rows = labels.numel() if mask is None else int(mask.sum())
    if max_rows is not None and rows > max_rows:
        results = results * math.nan
    if max_grad_rows is not None and results.requires_grad:
        exceeded: list[bool] = []

        def count(grad: Tensor) -> None:
            with_gradient = ((grad[0] != 0) & (labels != -100)) | (grad[1] != 0)
            exceeded.append(int((with_gradient if mask is None else with_gradient & mask).sum()) > max_grad_rows)

        results.register_hook(count)  # type: ignore[no-untyped-call]
        # All other gradients are computed from the gradient of the logits, so they become NaN too.
        logits.register_hook(lambda grad: grad * math.nan if any(exceeded) else grad)  # type: ignore[no-untyped-call]
    logprob, row_entropy = results
    return logprob, row_entropy


class TokenLogprobs(NamedTuple):
    logprobs: Tensor
    tail_logprob: Tensor
    logprob: Tensor
    entropy: Tensor


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: Temperature = 1.0,
    mask: Tensor | None = None,
) -> TokenLogprobs:
    """Returns log p of each given id (-inf for the id -1), of all ids together that are not given, and of the label;
    and the entropy. p is the softmax over the whole vocabulary.
    """
    labels = torch.full(logits.shape[:-1], -100, device=logits.device) if labels is None else labels
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    logprob, row_entropy = logprob_entropy(logits, labels, temperature=temperature, mask=mask)
    per_row = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device).unsqueeze(-1)
    log_p = torch.log_softmax(logits.double().masked_fill(~mask.unsqueeze(-1), 0) / per_row, -1)
    ids, none = token_ids.long().clamp(min=0), token_ids == -1
    given = torch.zeros(logits.shape, dtype=torch.int64, device=logits.device)
    given.scatter_add_(-1, ids, (~none).long())
    tail = log_p.masked_fill(given > 0, -math.inf)
    empty = (tail == -math.inf).all(-1, keepdim=True)  # its log-probability is a constant
    of_tail = torch.logsumexp(tail.masked_fill(empty, 0), -1).masked_fill(empty.squeeze(-1), -math.inf)
    of_tail = of_tail + 0 * row_entropy.detach()  # NaN in a row of NaN, even if all of its ids are given
    of_ids = log_p.gather(-1, ids).masked_fill(none, -math.inf)
    return TokenLogprobs(
        of_ids.masked_fill(~mask.unsqueeze(-1), 0), of_tail.masked_fill(~mask, 0), logprob, row_entropy
    )


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: Temperature = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: torch.dtype | Literal["auto"] = torch.float32,
    workspace_bytes: int | None = None,
    keep_logits_bytes: int | None = None,
) -> TokenLogprobs:
    """Returns token_logprobs of the logits hidden @ weight.T + bias, with the same bounds on the rows as
    linear_logprob_entropy.
    """
    logits = _head_logits(hidden, weight, bias, logit_softcap)
    found = token_logprobs(logits, token_ids, labels, temperature=temperature, mask=mask)
    rows = logits.shape[:-1].numel() if mask is None else int(mask.sum())
    if max_rows is not None and rows > max_rows:
        found = TokenLogprobs(*(result * math.nan for result in found))
    if max_grad_rows is not None and logits.requires_grad:

        def checked(grad: Tensor) -> Tensor:  # a row with an incoming gradient nearly always has one here
            return grad * math.nan if int((grad != 0).any(-1).sum()) > max_grad_rows else grad

        logits.register_hook(checked)  # type: ignore[no-untyped-call]
    return found


class TopkLogprobs(NamedTuple):
    token_ids: Tensor
    logprobs: Tensor
    tail_logprob: Tensor
    entropy: Tensor


def topk_logprobs(
    logits: Tensor, k: int, *, temperature: Temperature = 1.0, mask: Tensor | None = None
) -> TopkLogprobs:
    """Returns the ids of the k largest logits of each row, the largest first, and of equal logits the lower id first;
    their log-probabilities, the log-probability of all other ids together, and the entropy. NaN is not among the
    largest; where a row has too few numbers, the id is -1.
    """
    numbers = logits.detach().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    order = torch.sort(numbers, dim=-1, descending=True, stable=True).indices
    # NaN is moved behind the row's numbers, some of which may be -inf.
    order = order.gather(-1, torch.sort(logits.isnan().gather(-1, order).int(), dim=-1, stable=True).indices)
    ids = order[..., :k].masked_fill(logits.isnan().gather(-1, order[..., :k]), -1)
    found = token_logprobs(logits, ids, temperature=temperature, mask=mask)
    undefined = found.entropy.isnan().unsqueeze(-1)
    if mask is not None:
        ids = ids.masked_fill(~mask.bool().unsqueeze(-1), -1)
    logprobs = found.logprobs.masked_fill(undefined, math.nan)
    return TopkLogprobs(ids.int(), logprobs, found.tail_logprob, found.entropy)


def linear_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: Temperature = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    logits_dtype: torch.dtype | Literal["auto"] = torch.float32,
    workspace_bytes: int | None = None,
) -> TopkLogprobs:
    """Returns topk_logprobs of the logits hidden @ weight.T + bias. If more rows are kept than max_rows, all ids are
    -1, and all other results NaN.
    """
    logits = _head_logits(hidden, weight, bias, logit_softcap)
    found = topk_logprobs(logits, k, temperature=temperature, mask=mask)
    rows = logits.shape[:-1].numel() if mask is None else int(mask.sum())
    if max_rows is not None and rows > max_rows:
        ids, *floats = found
        found = TopkLogprobs(torch.full_like(ids, -1), *(result * math.nan for result in floats))
    return found


def _head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_softcap: float | None) -> Tensor:
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    return logits if logit_softcap is None else logit_softcap * torch.tanh(logits / logit_softcap)


# ---- tokens: segments of scores -> masks -----------------------------------------------------------------------------


def topk_mask(
    scores: Tensor,
    ratio: float | Tensor | None = None,
    *,
    k: int | Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    drop_zeros: bool = False,
) -> Tensor:
    """In each segment, marks the k highest scores that are neither masked nor NaN; ties go to the lowest index."""
    flat, usable = scores.flatten(), _usable(scores, mask)
    return _in_each(_segments(scores, offsets), _highest, flat, usable, k, ratio, drop_zeros).view(scores.shape)


def random_prefixes(
    mask: Tensor,
    ratio: float | Tensor = 0.5,
    *,
    offsets: Tensor | None = None,
    draws: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Prefixes:
    """Cuts each sequence of T tokens after its c-th token, where c is drawn from m, ..., T. Weighs each token before
    the cut by the inverse of the probability that the token is before the cut.
    """
    segments, present = _segments(mask, offsets), mask.flatten().bool()
    kept, weight = torch.zeros_like(present), torch.zeros(present.shape, dtype=torch.float64, device=mask.device)
    if draws is None:
        draws = torch.rand(len(segments), dtype=torch.float64, generator=generator)
    share = round(2 * float(ratio) - 1, 7)  # without rounding errors, as k of a ratio
    for (begin, end), draw in zip(segments, draws.flatten().tolist(), strict=True):
        places = [place for place in range(begin, end) if present[place]]
        total = len(places)
        least = max(1, math.ceil(round(share * total, 7)))
        cut = min(least + math.floor(draw * (total - least + 1)), total)
        for t, place in enumerate(places[:cut], 1):
            kept[place] = True
            weight[place] = (total - least + 1) / (total - max(t, least) + 1)
    return Prefixes(kept.view(mask.shape), weight.float().view(mask.shape), kept.sum())


TOKEN_RULES = (
    "advantage_entropy",
    "entropy",
    "advantage",
    "random",
    "entropy_quantile",
    "prefix",
    "prefix_advantage_entropy",
)


def select_tokens(
    entropy: Tensor,
    advantages: Tensor | None,
    ratio: float | Tensor,
    *,
    rule: str = "advantage_entropy",
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    scope: str = "batch",
    drop_zeros: bool = False,
    generator: torch.Generator | None = None,
) -> TokenSelection:
    """Computes a score for each token by the rule. Keeps the tokens with the highest scores of the whole batch or of
    each sequence, as topk_mask does. The rule "entropy_quantile" instead keeps the tokens whose entropy is at or above
    TRL's quantile of the whole batch.
    """
    if rule == "entropy_quantile":
        return _entropy_quantile(entropy, float(ratio), mask)
    if rule in ("prefix", "prefix_advantage_entropy"):
        present = torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask
        cut = random_prefixes(present, ratio if rule == "prefix" else 0.5, offsets=offsets, generator=generator)
        if rule == "prefix":
            entropy_or_one, ratio = torch.ones_like(entropy), 1.0
            advantages = torch.ones(()) if advantages is None else advantages
        else:
            entropy_or_one = entropy
        options: dict[str, Any] = {"mask": cut.mask, "offsets": offsets, "scope": scope, "drop_zeros": drop_zeros}
        before = select_tokens(entropy_or_one, advantages, ratio, **options)
        return before._replace(entropy=entropy, weight=torch.where(before.mask, cut.weight, 0.0))
    if rule == "random":
        scores = _random_scores(entropy, generator)
    elif rule == "entropy":
        scores = entropy.float()
    elif rule in ("advantage", "advantage_entropy"):
        assert advantages is not None
        scores = _per_token(advantages, entropy, offsets).float().abs()
        scores = scores if rule == "advantage" else scores * entropy.float()
    else:
        raise ValueError(f"rule: got {rule!r}, which is no rule of tokens")
    flat, segments = scores.flatten(), _segments(scores, offsets)
    sizes: Sequence[int] = entropy.shape[:-1] if offsets is None else (len(segments),)
    if scope == "batch":
        segments, sizes = [(0, len(flat))], ()
    chosen = _in_each(segments, _highest, flat, _usable(scores, mask), None, ratio, drop_zeros)
    kept = [flat[begin:end][chosen[begin:end]] for begin, end in segments]
    counts = torch.tensor([len(part) for part in kept], dtype=torch.int32, device=flat.device)
    lowest = [float(part.min()) if len(part) else math.inf for part in kept]
    thresholds = torch.tensor(lowest, dtype=torch.float32, device=flat.device)
    return TokenSelection(chosen.view(entropy.shape), entropy, counts.view(sizes), thresholds.view(sizes))


def select_tokens_from_logits(
    logits: Tensor,
    advantages: Tensor,
    ratio: float | Tensor,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    temperature: Temperature = 1.0,
    scope: str = "batch",
    drop_zeros: bool = False,
    sampling_mask: SamplingMask | None = None,
    max_dense_rows: int | None = None,
) -> TokenSelection:
    """Computes the entropies of the logits, and calls select_tokens. Masked rows are not read; their entropy is 0."""
    options: dict[str, Any] = {"mask": mask, "sampling_mask": sampling_mask, "max_dense_rows": max_dense_rows}
    row_entropy = entropy(logits.detach(), temperature=temperature, **options).float()
    return select_tokens(row_entropy, advantages, ratio, mask=mask, offsets=offsets, scope=scope, drop_zeros=drop_zeros)


def compact(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns the ascending flat indices of true values, padded with -1, and how many true values there are. If there
    are more than `capacity`, only the first `capacity` indices are returned.
    """
    found = mask.flatten().nonzero().flatten()
    indices = torch.full((capacity,), -1, dtype=torch.int64, device=mask.device)
    indices[: len(found)] = found[:capacity]
    return indices, torch.tensor([len(found)], device=mask.device)


def _random_scores(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws positive floats that are not subnormal. All bit patterns are equally likely, so that the k highest scores
    are a random subset.
    """
    bits = torch.randint(0x00800000, 0x7F800000, like.shape, dtype=torch.int32, device=like.device, generator=generator)
    return bits.view(torch.float32)


def _entropy_quantile(entropy: Tensor, ratio: float, mask: Tensor | None) -> TokenSelection:
    """Keeps entropies at or above torch's interpolated quantile. If entropies tie, more than the share `ratio` may be
    kept. If an entropy is NaN, nothing is kept.
    """
    values = entropy.detach().float()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    present = values[mask]
    threshold = torch.quantile(present, 1 - ratio) if len(present) else values.new_tensor(math.inf)
    chosen = (values >= threshold) & mask
    return TokenSelection(chosen, entropy, chosen.sum().int(), threshold)


def _per_token(advantages: Tensor, entropy: Tensor, offsets: Tensor | None) -> Tensor:
    """Expands advantages (per token, per sequence or 0-d) to one advantage for each token. A shape that fits both
    tokens and sequences is taken as per token.
    """
    if advantages.dim() == 0 or advantages.shape == entropy.shape:
        return advantages.expand_as(entropy)
    if offsets is not None:
        return advantages.repeat_interleave(offsets.diff())
    return advantages.unsqueeze(-1).expand_as(entropy)


def _usable(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Returns a flat mask that is False for masked scores and for NaN. Such scores are never chosen, and are not
    counted when a ratio is applied.
    """
    usable = ~scores.isnan()
    return (usable if mask is None else usable & mask).flatten()


def _highest(
    scores: Tensor,
    usable: Tensor,
    k: int | Tensor | None,
    ratio: float | Tensor | None = None,
    drop_zeros: bool = False,
) -> Tensor:
    """Marks the k highest usable scores. If `k` is None, it is the share `ratio` of the number of usable scores,
    rounded up, and at least 1.

    Before the product with `ratio` is rounded up, 4 rounding steps of the ratio's dtype are subtracted from it.
    Otherwise a rounding error could push the product past a whole number: 0.07 of 100 has to be 7, although 0.07 * 100
    is above 7 in floating point.
    """
    candidates = usable.nonzero().flatten()
    if k is None:
        assert ratio is not None
        slack = 2**-21 if isinstance(ratio, Tensor) and ratio.dtype == torch.float32 else 2**-50
        k = max(1, math.ceil(float(ratio) * len(candidates) * (1 - slack)))
    order = scores[candidates].argsort(descending=True, stable=True)  # equal scores stay in the order of their indices
    kept = candidates[order[: int(k)]]
    if drop_zeros:  # zeros are counted in k, and then dropped
        kept = kept[scores[kept] != 0]
    return torch.zeros_like(usable).index_fill(0, kept, True)


def shared_tokens(
    token_ids: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    groups: Sequence[Hashable] | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Marks the longest beginning and the longest end that a response with a negative advantage shares with any right
    response of its group. The common end is searched in the rest of the shorter response, after the common beginning.
    """
    flat, present = token_ids.flatten(), _usable(token_ids.float(), mask)
    responses = [begin + present[begin:end].nonzero().flatten() for begin, end in _segments(token_ids, offsets)]
    group_of = groups or [place // advantages.shape[1] for place in range(len(responses))]
    ids, advantage = [flat[places].tolist() for places in responses], advantages.flatten().tolist()
    marked = torch.zeros_like(present)
    for wrong, right in product(range(len(responses)), repeat=2):
        if group_of[wrong] == group_of[right] and advantage[wrong] < 0 < advantage[right]:
            one, other = ids[wrong], ids[right]
            first = last = 0
            while first < min(len(one), len(other)) and one[first] == other[first]:
                first += 1
            while last < min(len(one), len(other)) - first and one[-1 - last] == other[-1 - last]:
                last += 1
            marked[responses[wrong][:first]] = True
            marked[responses[wrong][len(one) - last :]] = True
    return marked.view(token_ids.shape)


# ---- rollouts: groups of rewards or advantages -----------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, *, offsets: Tensor | None = None, scale: str = "group", eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    """Returns (R - group mean) / (std + eps), with the std of the group or of the whole batch; scale="none" does not
    divide.

    A NaN reward is left out of mean and std, and its advantage is 0. All advantages are 0 in a group whose rewards are
    equal up to rounding.
    """
    flat = rewards.double().flatten()
    advantages, batch_std = torch.zeros_like(flat), _std(flat, ddof)
    for begin, end in _segments(rewards, offsets):
        group = flat[begin:end]
        scored = group[~group.isnan()]
        centred = group - scored.mean()  # not nanmean(): with it, inf - inf may become 0
        std = _std(group, ddof) if scale == "group" else batch_std
        scaled = centred if scale == "none" else centred / (std + eps)
        nothing = group.isnan() | (centred == 0)  # a reward equal to the mean has advantage 0, even if the divisor is 0
        nothing |= len(scored) == 1  # a group of one has advantage 0, even if its reward is infinite
        nothing |= bool(scored.isfinite().all()) and _without_spread(scored, _rounding(rewards.dtype))
        advantages[begin:end] = scaled.masked_fill(nothing, 0)
    return advantages.float().view(rewards.shape)


def groups_without_spread(rewards: Tensor, *, offsets: Tensor | None = None, tolerance: float | None = None) -> Tensor:
    """Marks the groups whose finite rewards are all equal, except for rounding."""
    if tolerance is None:
        tolerance = _rounding(rewards.dtype)
    flat, same = rewards.double().flatten(), []
    for begin, end in _segments(rewards, offsets):
        group = flat[begin:end]
        same.append(_without_spread(group[group.isfinite()], tolerance))
    return torch.tensor(same, dtype=torch.bool).view(rewards.shape[:-1] if offsets is None else -1)


def variance_mass(rewards: Tensor, share: float, *, offsets: Tensor | None = None) -> Tensor:
    """Marks the fewest groups whose variances add up to the share of the sum over all groups.

    In the order of descending variances, neighbours that differ by at most 1e-5 tie. The share counts as reached if at
    most 1e-5 of it is missing. Groups without spread have the variance 0 and are never marked.
    """
    flat, variances = rewards.double().flatten(), []
    for begin, end in _segments(rewards, offsets):
        finite = flat[begin:end][flat[begin:end].isfinite()]
        same = _without_spread(finite, _rounding(rewards.dtype))
        variances.append(0.0 if same else float(finite.var(correction=0)))
    ties: list[list[int]] = []
    for group in sorted(range(len(variances)), key=lambda group: -variances[group]):
        if not ties or variances[group] < variances[ties[-1][-1]] * (1 - 1e-5):
            ties.append([])
        ties[-1].append(group)
    marked, reached = torch.zeros(len(variances), dtype=torch.bool), 0.0
    for group in (group for tie in ties for group in sorted(tie)):
        if variances[group] > 0 and (share == 1 or reached < share * (1 - 1e-5) * math.fsum(variances)):
            marked[group] = True
            reached += variances[group]
    return marked.view(rewards.shape[:-1] if offsets is None else -1)


def _std(values: Tensor, ddof: int) -> Tensor:
    scored = values[~values.isnan()]
    freedom = len(scored) - ddof
    return ((scored - scored.mean()).square().sum() / freedom).sqrt() if freedom > 0 else values.new_zeros(())


def _rounding(dtype: torch.dtype) -> float:
    """Returns the largest relative difference at which rewards still count as equal. For the half-precision dtypes, it
    is one rounding step of the dtype. For float32 and float64, it is about eight rounding steps of the dtype. Integers
    have the tolerance of float64.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return torch.finfo(dtype).eps
    return 1e-6 if dtype == torch.float32 else 2e-15


def _without_spread(values: Tensor, tolerance: float) -> bool:
    return len(values) < 2 or bool(values.max() - values.min() <= tolerance * values.abs().max().clamp(min=1))


def max_variance_select(
    values: Tensor,
    keep: int | Tensor,
    *,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """In each segment, marks the `keep` values that together have the largest variance. If a segment has fewer usable
    values, all of them are marked.
    """
    return select_rollouts(values, keep, offsets=offsets, scope="group", mask=mask)


ROLLOUT_RULES = ("max_variance", "highest", "largest_abs", "percentile", "random")


def select_rollouts(
    advantages: Tensor,
    keep: int | Tensor,
    *,
    rule: str = "max_variance",
    offsets: Tensor | None = None,
    scope: str = "batch",
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Marks `keep` rollouts of each group by the rule, or `keep * groups` rollouts of the whole batch."""
    if rule not in ROLLOUT_RULES:
        raise ValueError(f"rule: got {rule!r}, which is no rule of rollouts")
    values = _random_scores(advantages, generator) if rule == "random" else advantages
    values = (values.abs() if rule == "largest_abs" else values).double().flatten()
    usable = advantages.isfinite() if mask is None else advantages.isfinite() & mask
    k, segments = int(keep), _segments(advantages, offsets)
    if scope == "batch":
        k, segments = k * len(segments), [(0, len(values))]
    choose = {"max_variance": _most_varied, "percentile": _evenly_spaced}.get(rule, _highest)
    return _in_each(segments, choose, values, usable.flatten(), k).view(advantages.shape)


def _most_varied(values: Tensor, usable: Tensor, k: int, equal: float = 1e-12) -> Tensor:
    """Marks the k values with the largest variance. They are the i lowest and the k - i highest values for some i in
    0..k (PODS, Lemma 3.1), so all i are tried.

    With rewards of 0 and 1, many i (the number of lowest values that are marked) give the same variance. Variances
    count as equal if they differ from the largest by at most the share ``equal``. Of all i whose variances count as
    equal to the largest, the largest i is taken, so that the fewest of the highest values are marked.
    """
    kept = usable.nonzero().flatten()
    n = len(kept)
    if n > k:
        kept = kept[values[kept].argsort(stable=True)]  # by value, then by index; -0 equals 0
        shifted = values[kept] - values[kept[n // 2]]  # avoids cancellation where large values differ little
        sum_low, sum_high = _first_sums(shifted, k), _first_sums(shifted.flip(0), k).flip(0)
        square_low, square_high = _first_sums(shifted**2, k), _first_sums(shifted.flip(0) ** 2, k).flip(0)
        spread = k * (square_low + square_high) - (sum_low + sum_high) ** 2  # k^2 times the variance, for i = 0..k
        low = int((spread >= spread.max() * (1 - equal)).nonzero().max())
        kept = torch.cat([kept[:low], kept[n - (k - low) :]])
    return torch.zeros_like(usable).index_fill(0, kept, True)


def _first_sums(values: Tensor, k: int) -> Tensor:
    """Returns the sums of the first 0, 1, ... k values."""
    return torch.cat([values.new_zeros(1), values[:k].cumsum(0)])


def _evenly_spaced(values: Tensor, usable: Tensor, k: int) -> Tensor:
    """Marks k of the n usable values: for each i in 0..k - 1, the value whose rank is nearest to (i + 0.5) / k * (n -
    1). Ranks are counted from 0. If two ranks are equally near, the lower rank is taken.
    """
    kept = usable.nonzero().flatten()
    n = len(kept)
    if n > k:
        kept = kept[values[kept].argsort(stable=True)]
        # Rounding x half down is ceil(x - 1/2); in integers: ceil(((2 i + 1) (n - 1) - k) / (2 k)).
        kept = kept[[-((k - (2 * i + 1) * (n - 1)) // (2 * k)) for i in range(k)]]
    return torch.zeros_like(usable).index_fill(0, kept, True)


# ---- tokens: their weights in a loss ---------------------------------------------------------------------------------


def importance_ratio(
    logprob: Tensor,
    old_logprob: Tensor,
    mask: Tensor | None = None,
    *,
    level: str = "token",
    groups: Tensor | None = None,
    denominator: str = "self",
    log_bounds: tuple[float, float] | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """Returns pi / pi_old of each token (level "token"), or its geometric mean over the token's sequence or group.

    The mean has no gradient. It is multiplied by the token's pi / sg[pi] ("self") or pi / pi_old ("old"); sg stops the
    gradient. Tokens outside the mask or in no group have ratio 1. If the incoming gradient is 0, the gradient is 0,
    even if the ratio is infinite or NaN.
    """
    log_bounds = log_bounds or ((-20, 20) if level == "token" else (-math.inf, 10))
    present, new = _in_groups(logprob, mask, groups), logprob.double().flatten()
    log_ratio = new - old_logprob.detach().double().flatten()
    if level != "token":
        means = _group_means(log_ratio.detach(), present, groups, _segments(logprob, offsets))
        log_ratio = means + (new - new.detach() if denominator == "self" else log_ratio)
    found: Tensor = _BoundedRatio.apply(log_ratio[present], *log_bounds)  # type: ignore[no-untyped-call]
    ratio = torch.ones_like(new, requires_grad=False)
    return ratio.masked_scatter(present, found).view(logprob.shape)


class _BoundedRatio(torch.autograd.Function):
    """Computes exp(x) with x clamped to bounds; the derivative is 0 outside the bounds. If the incoming gradient is 0,
    the gradient is 0: the chain rule alone would give NaN if exp(x) is infinite.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ratio = x.clamp(low, high).exp()
        ctx.save_for_backward(ratio, (x < low) | (x > high))
        return ratio

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ratio, beyond = ctx.saved_tensors
        return (grad * ratio).masked_fill(beyond | (grad == 0), 0), None, None


def entropy_groups(
    entropy: Tensor,
    mask: Tensor | None = None,
    quantiles: Sequence[float] = (0.8,),
    *,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    scope: str = "sequence",
) -> Tensor:
    """Returns the number of cuts below each token's entropy, or -1 outside the mask. Exactly the share 1 - q of the
    tokens is above the cut of quantile q.
    """
    flat, usable = entropy.flatten(), _usable(entropy, mask)
    groups = -(~usable).to(torch.int8)
    for begin, end in _segments(entropy, offsets) if scope == "sequence" else [(0, flat.numel())]:
        part = slice(begin, end)
        n = int(usable[part].sum())
        for q in quantiles:
            k = max(1, math.ceil((1 - q) * n * (1 - 2**-50 / (1 - q))))  # (1 - 0.9994) * 35,000 is 21, despite rounding
            groups[part] += _highest(flat[part], usable[part], k)
    return groups.view(entropy.shape)


def adaptive_clip(
    entropy: Tensor,
    groups: Tensor,
    mask: Tensor | None = None,
    *,
    vocab_size: int,
    alpha: float = 0.02,
    offsets: Tensor | None = None,
) -> Tensor:
    """Returns alpha / log(vocab_size) times the mean entropy of the token's group in its sequence; 0 for a token that
    is in no group.
    """
    present = _in_groups(entropy, mask, groups)
    means = _group_means(entropy.double().flatten(), present, groups, _segments(entropy, offsets))
    return (alpha / math.log(vocab_size) * means).view(entropy.shape)


def _in_groups(tokens: Tensor, mask: Tensor | None, groups: Tensor | None) -> Tensor:
    """Returns the flat mask of the unmasked tokens that are in a group."""
    present = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    return (present if groups is None else present & (groups >= 0)).flatten()


def _group_means(values: Tensor, present: Tensor, groups: Tensor | None, segments: list[tuple[int, int]]) -> Tensor:
    """Returns the mean of `values` over each token's group or sequence. Tokens that are not `present` are left out of
    the means, and get 0.
    """
    group = torch.zeros_like(values) if groups is None else groups.flatten()
    means = torch.zeros_like(values)
    for begin, end in segments:
        tokens = begin + present[begin:end].nonzero().flatten()
        for number in set(group[tokens].tolist()):
            members = tokens[group[tokens] == number]
            means[members] = values[members].mean()
    return means


# ---- segments --------------------------------------------------------------------------------------------------------


def _segments(values: Tensor, offsets: Tensor | None) -> list[tuple[int, int]]:
    """Returns (begin, end) of each segment in the flat tensor. Without offsets, each row is a segment."""
    if offsets is not None:
        return list(pairwise(offsets.tolist()))
    length = values.shape[-1]
    return [(row * length, (row + 1) * length) for row in range(math.prod(values.shape[:-1]))]


def _in_each(
    segments: list[tuple[int, int]], choose: Callable[..., Tensor], values: Tensor, usable: Tensor, *options: Any
) -> Tensor:
    """Returns the flat mask of the values that `choose` marks in each segment."""
    chosen = torch.zeros_like(usable)
    for begin, end in segments:
        chosen[begin:end] = choose(values[begin:end], usable[begin:end], *options)
    return chosen
