"""Log-probabilities at given ids of each row, over the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments.checks import (
    checked_mask,
    require_no_tangent,
    require_tensors,
    temperature_argument,
)
from .._lm_head import op
from .._lm_head import token_logprobs as given_ids
from .._lm_head.problem import WHOLE, LogitsDtype, checked_problem
from .._lm_head.token_logprobs import TokenLogprobs, require_ids_of_rows, with_labels


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> TokenLogprobs:
    """Returns the log-probabilities of K given ids of each row, normalised over the whole vocabulary, in one pass over
    the logits.

    ``logprobs = log_softmax(logits / temperature)`` at ``token_ids``. On-policy distillation compares student and
    teacher at such ids: ``docs/distillation.md`` has its losses. The gradient of the logit of id v is

    ``dz_v = (sum_k g_k 1[v = id_k] + g_y 1[v = label] - p_v G + g_t 1[v in tail] p_v / P_tail
    - g_H p_v (log p_v + H)) / temperature``, with ``G = sum_k g_k + g_t + g_y``

    where p is the softmax, and g_k, g_t, g_y and g_H are the incoming gradients of ``logprobs``, ``tail_logprob``,
    ``logprob`` and ``entropy``. The backward does not read rows without an incoming gradient.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32; stride 1 in the last dimension, any strides in the others.
        token_ids: int32 or int64 ``[..., K]``, in any order; -1 stands for no id, anywhere in a row. If an id comes
            twice, each has its own result and gradient, and the tail leaves the id out once. K may be 0.
        labels: int64 or int32 ``[...]``; -100 or None means no label. A label may be one of the given ids.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``.
        mask: bool, or integer (0 means False) ``[...]``; rows where the mask is False are not read, and all their
            results are 0.

    Returns:
        :class:`TokenLogprobs`. All results of a row are NaN if the row has NaN or ``+inf``, or only ``-inf``. On a GPU,
        an id that is neither -1 nor in the vocabulary makes its row NaN.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, a temperature that is not above 0, an id that is neither
            -1 nor in the vocabulary.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> found = d3s.token_logprobs(torch.zeros(1, 4), torch.tensor([[2, 0, -1]]))
        >>> found.logprobs, found.tail_logprob
        (tensor([[-1.3863, -1.3863,    -inf]]), tensor([-0.6931]))
    """
    require_ids_of_rows(token_ids, "logits", logits)
    require_no_tangent(logits=logits)
    labels = with_labels(labels, token_ids)
    require_tensors(logits=logits, labels=labels)
    each, mask = temperature_argument(temperature, logits), checked_mask(mask, logits)
    return given_ids.token_logprobs(logits, token_ids, labels, WHOLE, each, mask)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    labels: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: LogitsDtype = torch.float32,
    workspace_bytes: int | None = None,
    keep_logits_bytes: int | None = None,
    weight_grad_into: Tensor | None = None,
) -> TokenLogprobs:
    """Returns :func:`token_logprobs` of ``hidden @ weight.T + bias``. By default, it never holds all logits in memory.

    The forward and the backward are those of :func:`d3s_kernels.linear_logprob_entropy`, with the same arguments: the
    backward recomputes logits only for rows with an incoming gradient. Beside the results, the workspace and the logits
    that ``keep_logits_bytes`` allows, the forward holds K + 5 float32 values for each row.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32.
        weight: ``[V, H]``, the dtype of ``hidden``; or one of the two is float32.
        token_ids, labels: as in :func:`token_logprobs`, for the rows of ``hidden``.
        bias, temperature, logit_softcap, mask: as in :func:`d3s_kernels.linear_logprob_entropy`.
        max_rows, max_grad_rows, logits_dtype, workspace_bytes, keep_logits_bytes, weight_grad_into: as there.

    Returns:
        :class:`TokenLogprobs`.

    Raises:
        ValueError, TypeError: in the same cases as :func:`token_logprobs` and
            :func:`d3s_kernels.linear_logprob_entropy`.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        >>> found = d3s.linear_token_logprobs(hidden, weight, torch.tensor([[4, 7], [0, -1], [49, 49]]))
        >>> found.logprobs[2].sum().backward()  # one row has a gradient: the backward computes one row
        >>> hidden.grad[0].abs().sum()
        tensor(0.)
    """
    require_ids_of_rows(token_ids, "hidden", hidden)
    problem = checked_problem(
        hidden, weight, with_labels(labels, token_ids), bias=bias, temperature=temperature,
        logit_softcap=logit_softcap, mask=mask, max_rows=max_rows, max_grad_rows=max_grad_rows,
        logits_dtype=logits_dtype, workspace_bytes=workspace_bytes, keep_logits_bytes=keep_logits_bytes,
        weight_grad_into=weight_grad_into,
    )  # fmt: skip
    return given_ids.linear_token_logprobs(problem, token_ids, op.adding_to(weight_grad_into))
