"""Chooses the tokens that get a gradient: exact top-K% masks, by |A| * H (D3S, arXiv 2509.22115) or another rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from .._arguments.checks import (
    as_bool,
    checked_mask,
    require_readable,
    require_scope,
    require_tensors,
    require_whole,
    temperature_argument,
)
from .._dispatch import ops
from .._dispatch.over_supports import row_statistics
from .._rules.arguments import select_tokens_arguments, topk_mask_arguments
from .._rules.rules import PREFIX_RULES, entropy_quantile
from ..support.sampling_mask import SamplingMask, supports_of
from .random_prefixes import Prefixes, random_prefixes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TokenRule = Literal[
    "advantage_entropy", "entropy", "advantage", "random", "entropy_quantile", "prefix", "prefix_advantage_entropy"
]
Placement = Literal["whole", "global", "pieces"]


class TokenSelection(NamedTuple):
    """The kept tokens, with the entropies, counts and thresholds for a trainer. All tensors stay on the device."""

    mask: Tensor
    """bool, the shape of the entropy."""
    entropy: Tensor
    """float32, nats."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """int32: the number of kept tokens in each segment; 0-d for ``scope="batch"``. It is the denominator of the loss.
    """
    threshold: Tensor
    """float32: the lowest kept score of each segment; ``+inf`` if no token is kept."""
    weight: Tensor | None = None
    """float32, the shape of the entropy: the factor for each token's loss, with the rules that cut prefixes
    (:func:`d3s_kernels.random_prefixes`); 0 for dropped tokens. None with all other rules, whose factor is 1.
    """


def topk_mask(
    scores: Tensor,
    ratio: float | Tensor | None = None,
    *,
    k: int | Tensor | None = None,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    drop_zeros: bool = False,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Placement = "whole",
) -> Tensor:
    """Marks exactly k scores of each segment, the largest ones; ties go to the lower index.

    ``k = min(n, max(1, ceil(ratio * n)))``, where n is the number of scores in the segment that are neither masked nor
    NaN. The product ``ratio * n`` is corrected for rounding, so that 0.07 of 100 is 7. NaN is never marked and does not
    change k.

    Args:
        scores: ``[..., n]``, each row is a segment; or ``[n]`` with ``offsets``. float32, bfloat16 or float16.
        ratio: in (0, 1]: a number, or a 0-d float64 or float32 tensor, which is read on the device. (The product is
            corrected by 4 rounding steps of the ratio's dtype.)
        k: the number of scores to mark in each segment, instead of ``ratio``: a number, or a 0-d int64 or int32 tensor,
            which is read on the device. If a segment has fewer scores, all are marked.
        mask: bool, or integer (0 means False), the shape of ``scores``. Scores where the mask is False are left out and
            are not counted in n.
        drop_zeros: leave out scores of 0 too; then fewer than k scores may be marked.

    Ragged batches:
        offsets: int32 or int64 ``[segments + 1]``, from 0 to n (flash-attention's ``cu_seqlens``).
        max_segment: the caller's upper bound on the length of a segment; an optional hint for GPUs.

    Across ranks:
        process_group: the ranks that hold scores: a process group, or a mesh of one dimension. The scores of all ranks,
            concatenated along the first dimension in rank order, are treated as one tensor. Each rank gets its piece of
            this tensor's mask. So a 1-D tensor without offsets is one segment over all ranks, with one k. A rank may
            have no scores.
        placement: only with a process group: how the segments (the rows, or the segments of ``offsets``) are placed on
            the ranks. "whole": each segment lies on one rank; a selection within segments sends nothing. "global":
            ``offsets`` are for the concatenation of all ranks' 1-D tensors and are the same on every rank; a segment
            may be cut anywhere between ranks (Ulysses). "pieces": every rank has a piece of every segment (ring
            attention); a piece may be empty. With "pieces", rows must have the same leading shape on all ranks, or each
            rank's own ``offsets`` must have the same number of segments; among equal scores, the lower rank wins.

    Returns:
        bool, the shape of ``scores``.

    Raises:
        ValueError, TypeError: neither or both of ratio and k, ratio outside (0, 1], k below 1, a wrong shape, dtype,
            device or offsets. With a process group, the rank with the wrong argument raises before it sends anything.
            Under ``D3S_KERNELS_CHECK=1``, all ranks raise. They then also raise if an argument differs between ranks,
            but must be the same on all ranks.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.topk_mask(torch.tensor([3.0, 1.0, 3.0, 3.0, torch.nan]), 0.5)
        tensor([ True, False,  True, False, False])
    """
    if process_group is not None:
        from ..distributed import tokens as across_ranks  # here, since some builds of torch have no process groups

        layout = across_ranks.Layout(process_group, placement, offsets, max_segment)
        return across_ranks.topk_mask(scores, ratio, k, mask, drop_zeros, layout)
    segments = offsets, max_segment, False
    return ops.topk_mask(*topk_mask_arguments(scores, ratio, k, mask, segments, drop_zeros))


def select_tokens(
    entropy: Tensor,
    advantages: Tensor | None,
    ratio: float | Tensor,
    *,
    rule: TokenRule = "advantage_entropy",
    mask: Tensor | Prefixes | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    scope: Literal["batch", "sequence"] = "batch",
    drop_zeros: bool = False,
    generator: torch.Generator | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Placement = "whole",
) -> TokenSelection:
    """Keeps the tokens with the largest scores: the share ``ratio`` of all tokens. The default score is
    ``|advantage| * entropy`` (D3S).

    ========================== ================================= ==================================================
    ``rule``                   score                             source
    ========================== ================================= ==================================================
    "advantage_entropy"        ``|A| * H``                       D3S, token level
    "entropy"                  ``H``                             80/20 (high-entropy tokens); advantages are not read
    "advantage"                ``|A|``                           the other half of D3S's score; entropies are not read
    "random"                   a random number                   S-GRPO's share of random tokens; neither is read
    "entropy_quantile"         ``H``, all at or above a quantile TRL's ``top_entropy_quantile``; advantages not read
    "prefix"                   none: all before a random cut     NAT's random prefixes; entropies are not read
    "prefix_advantage_entropy" ``|A| * H``, before a random cut  NAT and D3S together
    ========================== ================================= ==================================================

    Scores are computed in float32 during the selection and never stored. ``scope="batch"`` pools all tokens, as D3S's
    formula does. With an outcome reward, ``|A|`` is constant within a sequence, so that with scope "sequence" only the
    entropy would decide. Counts, ties and NaN are as in :func:`topk_mask`. With the rule "advantage", nearly all scores
    tie. Then the index decides: of equal scores, the scores that come first in the batch are kept. The result has no
    gradient.

    "entropy_quantile" keeps exactly the same tokens as TRL on one process: every token whose entropy is at least
    ``torch.quantile(entropies, 1 - ratio)``, interpolated. Prefer "entropy", since "entropy_quantile" keeps more than
    the share if entropies tie, keeps nothing if an entropy is NaN, fails for more than 2^24 tokens, and causes a host
    sync. "entropy_quantile" always pools the batch, so ``offsets`` have no effect. It refuses ``drop_zeros``, and so
    does "random".

    The last two rules cut each sequence with :func:`d3s_kernels.random_prefixes`. "prefix" keeps all tokens before the
    cut, on average the share ``ratio``, which is at least 0.5. "prefix_advantage_entropy" cuts with the ratio 0.5, and
    keeps the share ``ratio`` of the tokens before the cuts. Multiply each token's loss by the result's ``weight``. If
    sequences are cut before the forward, the tokens after a cut need not be forwarded: then pass the cuts as ``mask``.

    Args:
        entropy: ``[..., T]``, each row is a sequence; or ``[N]`` with ``offsets``. float32, bfloat16 or float16.
        advantages: one for each token, one for each sequence (``[B]`` for ``[B, T]``, ``[S]`` with offsets), or a 0-d
            tensor. A shape that fits tokens and sequences means one for each token. None is allowed if the rule does
            not read advantages. With "prefix", advantages are optional and only for ``drop_zeros``.
        ratio: in (0, 1]: a number, or a 0-d float64 or float32 tensor, which is read on the device.
        rule: see the table. Sources: D3S, arXiv 2509.22115; 80/20, 2506.01939; S-GRPO, 2504.20834; NAT, 2603.06619.
        mask: bool, or integer (0 means False), the shape of ``entropy``: True at the tokens of the completion. With the
            last two rules, it may be the result of :func:`d3s_kernels.random_prefixes`: then nothing is cut again.
        scope: "batch" pools all tokens, "sequence" keeps the share of each sequence.
        drop_zeros: leave out scores of 0 too (if all rewards of a group are equal, all scores of the group are 0).
        generator: for "random" and for cuts: a generator on the device of ``entropy``, or None for torch's default one.
            ``torch.compile(fullgraph=True)`` requires None. Ranks may use the same seed.

    Ragged batches:
        offsets: int32 or int64 ``[S + 1]``, from 0 to N.
        max_segment: the caller's upper bound on the length of a sequence; an optional hint for GPUs.

    Across ranks:
        process_group: the ranks that hold tokens, as in :func:`topk_mask`: "batch" pools the tokens of all ranks and
            keeps one exact share of them; count and threshold are over all ranks.
        placement: as in :func:`topk_mask`. With "whole", scope "sequence" needs no communication, and ``offsets`` and
            ``advantages`` cover only the rank's own sequences. If a rank has as many tokens as sequences, its
            advantages are taken as per token. With "global" and "pieces", advantages per sequence must be the same on
            every rank. If every rank has as many tokens as there are sequences, advantages are taken as per token.

    Returns:
        :class:`TokenSelection`. Its ``entropy`` is the argument ``entropy``. With "entropy_quantile", its ``threshold``
        is the quantile.

    Raises:
        ValueError, TypeError: as :func:`topk_mask`; an unknown rule; a generator with a rule other than "random".

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> entropy = torch.tensor([[0.1, 2.0, 0.3], [1.5, 0.2, 0.9]])
        >>> kept = d3s.select_tokens(entropy, torch.tensor([1.0, -2.0]), 0.5)
        >>> kept.mask, kept.count
        (tensor([[False,  True, False],
                [ True, False,  True]]), tensor(3, dtype=torch.int32))
        >>> d3s.select_tokens(entropy, None, 0.2, rule="entropy").mask
        tensor([[False,  True, False],
                [ True, False, False]])
    """
    if isinstance(rule, str) and rule in PREFIX_RULES:
        if not isinstance(mask, Prefixes):
            require_tensors(entropy=entropy)
            if entropy.dim() == 0:
                raise ValueError("entropy: got a 0-d tensor; takes [..., T], or [N] with offsets")
            mask = random_prefixes(
                torch.ones_like(entropy, dtype=torch.bool) if mask is None else mask,
                ratio if rule == "prefix" else 0.5, offsets=offsets, generator=generator,
                process_group=process_group, placement=placement,
            )  # fmt: skip
        if rule == "prefix":
            ratio, advantages = 1.0, torch.ones((), device=entropy.device) if advantages is None else advantages
        before = select_tokens(
            entropy, advantages, ratio, rule=PREFIX_RULES[rule], mask=mask.mask, offsets=offsets,
            max_segment=max_segment, scope=scope, drop_zeros=drop_zeros, process_group=process_group,
            placement=placement,
        )  # fmt: skip
        return before._replace(weight=torch.where(before.mask, mask.weight, 0.0))
    if isinstance(mask, Prefixes):
        raise TypeError(
            f"mask: got Prefixes with rule {rule!r}; takes them with {' or '.join(map(repr, PREFIX_RULES))}"
        )
    if process_group is not None:
        from ..distributed import tokens as across_ranks

        layout = across_ranks.Layout(process_group, placement, offsets, max_segment)
        _, (chosen, count, threshold) = across_ranks.select_tokens(
            entropy, advantages, ratio, rule, mask, scope, drop_zeros, generator, layout
        )
        return TokenSelection(chosen, entropy, count, threshold)
    segments = offsets, max_segment, require_scope(scope, "sequence")
    if rule == "entropy_quantile":
        if scope != "batch":
            raise ValueError("scope: got 'sequence' with rule 'entropy_quantile'; takes 'batch'")
        if drop_zeros:
            raise ValueError("drop_zeros: got True with rule 'entropy_quantile'; takes False")
        require_readable(entropy=entropy, advantages=advantages, ratio=ratio, mask=mask, offsets=offsets)
    arguments = select_tokens_arguments(entropy, advantages, ratio, rule, mask, segments, drop_zeros, generator)
    if rule == "entropy_quantile":
        ops.check("select_tokens", *arguments)
        chosen, count, threshold = entropy_quantile(entropy, float(ratio), checked_mask(mask, entropy))
    else:
        chosen, count, threshold = ops.select_tokens(*arguments)
    return TokenSelection(chosen, entropy, count, threshold)


def select_tokens_from_logits(
    logits: Tensor,
    advantages: Tensor,
    ratio: float | Tensor,
    *,
    mask: Tensor | None = None,
    offsets: Tensor | None = None,
    max_segment: int | None = None,
    temperature: float | Tensor = 1.0,
    scope: Literal["batch", "sequence"] = "batch",
    drop_zeros: bool = False,
    sampling_mask: SamplingMask | None = None,
    max_dense_rows: int | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
    placement: Placement = "whole",
) -> TokenSelection:
    """Computes entropies from ``logits``, and selects tokens as :func:`select_tokens` does. Without a
    ``sampling_mask``, this is a single op.

    With a ``sampling_mask``, the entropy of a token is over its support only. A token whose support has one id has
    score 0. Such a token still counts as one of the tokens, but ``drop_zeros`` leaves it out.

    Args:
        logits: ``[..., T, V]``; or ``[N, V]`` with ``offsets``. float32, bfloat16 or float16.
        advantages: ``[...]``, one for each sequence; or as in :func:`select_tokens`.
        ratio: the share of the tokens to keep, in (0, 1].
        mask: bool, or integer (0 means False), the shape of ``logits`` without its last dimension. Rows where the mask
            is False are not read and have entropy 0.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows.
        scope, drop_zeros: as in :func:`select_tokens`.

    Sampling masks:
        sampling_mask, max_dense_rows: as in :func:`d3s_kernels.logprob_entropy`, but only for this rank's rows.

    Ragged batches:
        offsets, max_segment: as in :func:`select_tokens`.

    Across ranks:
        process_group, placement: as in :func:`select_tokens`.

    Returns:
        :class:`TokenSelection`, without gradients.

    Raises:
        ValueError, TypeError: as :func:`topk_mask` and :func:`d3s_kernels.entropy`.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> logits = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
        >>> d3s.select_tokens_from_logits(logits, torch.tensor([0.5]), 0.5).mask
        tensor([[False,  True]])
    """
    if process_group is not None:
        from ..distributed import tokens as across_ranks

        @torch.no_grad()
        def entropy_of_rows() -> Tensor:
            require_readable(logits=logits, temperature=temperature, mask=mask)
            require_tensors(logits=logits)
            rows, numbers = checked_mask(mask, logits), temperature_argument(temperature, logits)
            supports = supports_of(sampling_mask, max_dense_rows, logits)
            return row_statistics(logits, None, numbers, rows, supports)[1]

        layout = across_ranks.Layout(process_group, placement, offsets, max_segment)
        entropy, (chosen, count, threshold) = across_ranks.select_tokens(
            entropy_of_rows, advantages, ratio, "advantage_entropy", mask, scope, drop_zeros, None, layout
        )
        return TokenSelection(chosen, entropy, count, threshold)
    require_tensors(logits=logits)
    segments = offsets, max_segment, require_scope(scope, "sequence")
    arguments = select_tokens_arguments(
        logits, advantages, ratio, "advantage_entropy", mask, segments, drop_zeros, None
    )
    numbers, supports = temperature_argument(temperature, logits), supports_of(sampling_mask, max_dense_rows, logits)
    if supports.ids is None:
        chosen, entropy, count, threshold = ops.select_tokens_from_logits(*arguments, *numbers)
        return TokenSelection(chosen, entropy, count, threshold)
    _, *others = arguments
    with torch.no_grad():
        entropy = row_statistics(logits, None, numbers, others[3], supports)[1]
        chosen, count, threshold = ops.select_tokens(entropy, *others)
    return TokenSelection(chosen, entropy, count, threshold)


def compact(mask: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns the indices at which a flattened mask is True, in a tensor whose size does not depend on the mask.

    Args:
        mask: bool, or integer (0 means False), any shape.
        capacity: the length of ``indices``.

    Returns:
        ``(indices, count)``: int64 ``[capacity]``, ascending, with -1 after the last index; int64 ``[1]``, the number
        of True values. If this number exceeds ``capacity``, ``indices`` has only the first ``capacity`` indices.

    Raises:
        ValueError, TypeError: a mask of another dtype, a capacity below 0.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.compact(torch.tensor([[False, True], [True, True]]), 4)
        (tensor([ 1,  2,  3, -1]), tensor([3]))
    """
    require_tensors(mask=mask)
    if capacity is None:
        raise TypeError("capacity: got None; takes a whole number")
    require_whole(capacity=capacity)
    indices, count = ops.compact(as_bool("mask", mask), capacity)
    return indices, count
