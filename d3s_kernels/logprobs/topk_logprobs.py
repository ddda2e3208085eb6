"""The k largest log-probabilities of each row, from logits or straight from the LM head."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments.checks import checked_mask, require_no_tangent, require_tensors, require_whole, temperature_argument
from .._lm_head import topk_logprobs as largest
from .._lm_head.problem import WHOLE, LogitsDtype, checked_problem
from .._lm_head.topk_logprobs import TopkLogprobs


def topk_logprobs(
    logits: Tensor, k: int, *, temperature: float | Tensor = 1.0, mask: Tensor | None = None
) -> TopkLogprobs:
    """Returns the k largest log-probabilities of each row and their ids, normalised over the whole vocabulary.

    A teacher's side of distillation: a student learns from ``token_ids`` and ``logprobs``, and :func:`token_logprobs`
    returns the student's log-probabilities at the same ids. The selection is exact, and the same on every device.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32; stride 1 in the last dimension, any strides in the others.
        k: 1 to 1,024, and at most V.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``.
        mask: bool, or integer (0 means False) ``[...]``; rows where the mask is False are not read. Their ids are -1,
            and all other results are 0.

    Returns:
        :class:`TopkLogprobs`. If a row has NaN or ``+inf``, or only ``-inf``, all its results except the ids are NaN.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, a temperature that is not above 0, a k that is not
            allowed.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> found = d3s.topk_logprobs(torch.tensor([[0.0, 1.0, -torch.inf, 1.0]]), 2)
        >>> found.token_ids, found.logprobs, found.tail_logprob
        (tensor([[1, 3]], dtype=torch.int32), tensor([[-0.8620, -0.8620]]), tensor([-1.8620]))
    """
    require_tensors(logits=logits)
    require_no_tangent(logits=logits)
    require_whole(k=k)
    each, mask = temperature_argument(temperature, logits), checked_mask(mask, logits)
    return largest.topk_logprobs(logits, k, WHOLE, each, mask)


def linear_topk_logprobs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    logits_dtype: LogitsDtype = torch.float32,
    workspace_bytes: int | None = None,
) -> TopkLogprobs:
    """Returns :func:`topk_logprobs` of ``hidden @ weight.T + bias``, without ever holding all logits in memory.

    Each tile of logits is searched for larger logits than the k largest so far. Beside the results and the workspace,
    the call holds 3 k + 8 values of 4 bytes for each row.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32.
        weight: ``[V, H]``, the dtype of ``hidden``; or one of the two is float32.
        k: 1 to 1,024, and at most V.
        bias, temperature, logit_softcap: as in :func:`d3s_kernels.linear_logprob_entropy`.
        mask: bool, or integer (0 means False) ``[...]``; rows where the mask is False cost nothing. Their ids are -1,
            and all other results are 0.
        max_rows: the caller's upper bound on the number of rows that ``mask`` keeps. With this bound, there is no host
            sync on a GPU. If the bound is exceeded, all ids are -1, and all other results are NaN.
        logits_dtype, workspace_bytes: as in :func:`d3s_kernels.linear_logprob_entropy`. With logits in half precision,
            more logits are equal.

    Returns:
        :class:`TopkLogprobs`.

    Raises:
        ValueError, TypeError: in the same cases as :func:`topk_logprobs` and
            :func:`d3s_kernels.linear_logprob_entropy`.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> found = d3s.linear_topk_logprobs(torch.ones(3, 8), torch.arange(50.0).expand(8, -1).T, 4)
        >>> found.token_ids[0]
        tensor([49, 48, 47, 46], dtype=torch.int32)
    """
    require_whole(k=k)
    problem = checked_problem(
        hidden, weight, largest.no_labels(hidden), bias=bias, temperature=temperature, logit_softcap=logit_softcap,
        mask=mask, max_rows=max_rows, logits_dtype=logits_dtype, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    return largest.linear_topk_logprobs(problem, k)
