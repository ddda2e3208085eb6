"""Log-probability and entropy of the next token, from logits or straight from the LM head."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments.checks import checked_mask, require_no_tangent, require_tensors, temperature_argument
from .._dispatch.over_supports import row_statistics
from .._lm_head import op
from .._lm_head.problem import LogitsDtype, checked_problem
from ..support.sampling_mask import LabelOutside, SamplingMask, SamplingOptions, supports_of


def entropy(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    max_dense_rows: int | None = None,
) -> Tensor:
    """Returns the entropy of ``softmax(logits / temperature)`` over the last dimension, in nats.

    ``H = -sum_v p_v log p_v``, computed as ``log S - T / S`` (``csrc/core/softmax_state.h`` defines S and T). This form
    stays accurate for peaked rows and for logits far from 0. A logit of ``-inf`` contributes 0. Differentiable in
    ``logits``.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32; stride 1 in the last dimension, any strides in the others.
        temperature: a number above 0 (in [1e-15, 1e15]), a 0-d tensor, or a float tensor that broadcasts to the rows
            ``[...]``. No gradient is computed for it.
        mask: bool, or integer (0 means False) ``[...]``; rows where the mask is False are not read and have entropy 0.
        sampling_mask, max_dense_rows: as in :func:`logprob_entropy`.

    Returns:
        float32 ``[...]``; NaN for a row that has NaN or ``+inf``, or only ``-inf``.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, or a temperature that is not above 0.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> d3s.entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))
        tensor([0.6931, 0.0000])
    """
    require_tensors(logits=logits)
    require_no_tangent(logits=logits)
    mask = checked_mask(mask, logits)
    each = temperature_argument(temperature, logits)
    return row_statistics(logits, None, each, mask, supports_of(sampling_mask, max_dense_rows, logits))[1]


def logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    label_outside: LabelOutside = "nan",
    max_dense_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each row's label and the entropy of the row, in one pass over the logits.

    ``logprob = log_softmax(logits / temperature)[label]``; entropy as in :func:`entropy`. Both are differentiable in
    ``logits``. A gradient that is not needed costs nothing. The backward does not read rows whose incoming gradient is
    0.

    With a ``sampling_mask``, both results are for the distribution that was sampled from: the softmax over only the
    row's support, after the temperature. Only the logits of the support are read; all other logits have gradient 0. If
    the support has one id, the results and the gradient are exactly 0. A row without a support is computed over the
    whole vocabulary.

    Args:
        logits: ``[..., V]``, bfloat16, float16 or float32; stride 1 in the last dimension, any strides in the others.
        labels: int64 or int32 ``[...]``; -100 means no target: logprob 0, entropy as usual.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``.
        mask: bool, or integer (0 means False) ``[...]``; rows where the mask is False are not read, and both results
            are 0.
        sampling_mask: the support of each row of the logits: the ids from which the row's token was sampled. It must be
            on the device of the logits.
        label_outside: the treatment of a label that is not in its row's support. "nan": the log-probability and its
            gradient are NaN; on a CPU, such a label is an error. "include": the label is added to the
            support.
        max_dense_rows: the caller's upper bound on the number of rows that have no support and where ``mask`` is True;
            0 means that there are no such rows. Without a bound, plain PyTorch needs a host sync on a GPU. If there are
            more such rows than the bound, all results and gradients are NaN, except those that are 0 because of
            ``mask`` or a label of -100.

    Returns:
        ``(logprob, entropy)``, float32 ``[...]`` each, in nats.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, a temperature that is not above 0, a label that is
            neither -100 nor in the vocabulary; a support with an id that is not in the vocabulary or comes twice.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> logprob, entropy = d3s.logprob_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
        >>> logprob, entropy
        (tensor([-1.3863,  0.0000]), tensor([1.3863, 1.3863]))
        >>> kept = d3s.SamplingMask.from_lists([[3, 1], []])
        >>> d3s.logprob_entropy(torch.zeros(2, 4), torch.tensor([1, 2]), sampling_mask=kept)
        (tensor([-0.6931, -1.3863]), tensor([0.6931, 1.3863]))
    """
    require_tensors(logits=logits, labels=labels)
    require_no_tangent(logits=logits)
    mask = checked_mask(mask, logits)
    each = temperature_argument(temperature, logits)
    supports = supports_of(sampling_mask, max_dense_rows, logits, label_outside)
    logprob, row_entropy, *_ = row_statistics(logits, labels, each, mask, supports)
    return logprob, row_entropy


def linear_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
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
    sampling_mask: SamplingMask | None = None,
    label_outside: LabelOutside = "nan",
    max_dense_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns :func:`logprob_entropy` of ``hidden @ weight.T + bias``, without holding all logits in memory, unless
    ``keep_logits_bytes`` allows it.

    The backward recomputes logits only for rows whose incoming gradient is not 0: if 10 % of the tokens are kept, it
    does 10 % of the work. Differentiable in ``hidden``, ``weight`` and ``bias``.

    With a ``sampling_mask``, the forward and the backward compute only the logits of the supports: the work for a row
    is proportional to the size of its support. The hidden states of a row whose support has one id are not read. The
    backward recomputes the logits of all supports, except where ``mask`` is False; the rest of its work is only for
    rows whose incoming gradient is not 0.

    ``hidden``, ``weight`` and ``bias`` have the same dtype; or some are float32, and the others are converted to
    float32. The conversion is exact, but then all products take as long as in float32. **Each call** makes a float32
    copy of each tensor that it converts, and keeps the copy until the backward. The backward makes a float32 gradient
    of the same size. The copy and the gradient each take 4 bytes x H for each row of converted hidden states, or 4
    bytes x V x H for a converted weight. In the end, each gradient has the dtype of its argument.

    Args:
        hidden: ``[..., H]``, bfloat16, float16 or float32.
        weight: ``[V, H]``, the dtype of ``hidden``; or one of the two is float32.
        labels: int64 or int32 ``[...]``, one for each row (they are not shifted here); -100 means no target.
        bias: ``[V]``, the dtype of ``hidden`` and ``weight``; or some of the three tensors are float32.
        temperature: a number above 0, a 0-d tensor, or a float tensor that broadcasts to the rows ``[...]``.
        logit_softcap: logits become ``softcap * tanh(logits / softcap)`` before the temperature (Gemma).
        mask: bool, or integer (0 means False) ``[...]``; rows where the mask is False cost nothing, and both results
            are 0.
        logits_dtype: the dtype to which logits are rounded: ``torch.float32``; or the common dtype of hidden states,
            weight and bias, which ``"auto"`` stands for. The common dtype is faster, most of all where a CPU has matrix
            instructions for it: with AMX, a step took 3.3 times as long with float32 logits. In bfloat16 it changes an
            entropy by some hundredths of a nat.

    Sampling masks:
        sampling_mask, label_outside, max_dense_rows: as in :func:`logprob_entropy`. Without ``max_dense_rows``, there
            is one host sync on a GPU.

    On GPUs:
        max_rows: the caller's upper bound on the number of rows that ``mask`` keeps. With this bound, the forward needs
            no host sync. If the bound is exceeded, all outputs are NaN.
        max_grad_rows: the caller's upper bound on the number of rows with a gradient. With this bound, the backward
            needs no host sync. If the bound is exceeded, all gradients are NaN.

    Memory:
        workspace_bytes: the memory for a tile of logits; None means 512 MiB on a GPU and 32 MiB on a CPU. In addition,
            the backward needs 8 to 12 bytes x H for each row with a gradient. If a tile of all these rows and 32,768
            ids (on a CPU 8,192) does not fit into ``workspace_bytes``, the gradient of a weight in half precision needs
            another 4 bytes x H for each id of a tile.
        keep_logits_bytes: the forward keeps up to this many bytes of logits for the backward, which then makes three
            matrix products in place of four. None or 0 means none. For each row, all logits take V elements of
            ``logits_dtype``, rounded up to 64 bytes; if not all fit, the logits of the first ids are kept. Rows are
            those that ``mask`` keeps, if ``max_rows`` is a bound on their number, or else all. No logits are kept with
            a sampling mask, or if no gradient is needed. In a graph of ``torch.compile``, the number of rows must not
            depend on values.
        weight_grad_into: a contiguous tensor of the shape of ``weight``, in float32; or in the weight's dtype, if no
            argument is converted. Every backward **adds** the weight's gradient to this tensor, even a backward that
            asks only for other gradients. No backward zeroes the tensor. Autograd then has no gradient for the weight,
            and hooks on the weight get None. If the weight requires no gradient, nothing is added. Not supported under
            ``torch.compile``. With a sampling mask and ``max_dense_rows=0``, only the tensor's rows of the supports'
            ids are written.

    Returns:
        ``(logprob, entropy)``, float32 ``[...]`` each, in nats.

    Raises:
        ValueError, TypeError: a wrong shape, dtype or device, a temperature or soft cap that is not above 0, a label
            that is neither -100 nor in the vocabulary.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
        >>> logprob, entropy = d3s.linear_logprob_entropy(hidden, weight, torch.tensor([4, 0, 49]))
        >>> logprob[1].backward()  # one row has a gradient: the backward computes one row
        >>> hidden.grad[0].abs().sum()
        tensor(0.)
    """
    problem = checked_problem(
        hidden, weight, labels, bias=bias, temperature=temperature, logit_softcap=logit_softcap, mask=mask,
        max_rows=max_rows, max_grad_rows=max_grad_rows, logits_dtype=logits_dtype, workspace_bytes=workspace_bytes,
        keep_logits_bytes=keep_logits_bytes, weight_grad_into=weight_grad_into,
        supports=SamplingOptions(sampling_mask, label_outside, max_dense_rows).supports,
    )  # fmt: skip
    return op.linear_logprob_entropy(problem, op.adding_to(weight_grad_into))
