"""logprob_entropy of a vocabulary that is sharded across ranks: the ranks' softmax states are gathered and merged.

A group is passed by its registered name, as in torch's own functional collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forward import no_logits
from .shard import Shard

_op = torch.ops.d3s_kernels


def forward_op(
    logits: Tensor,
    labels: Tensor,
    first_token: int,
    group_name: str,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    mask: Tensor | None = None,
    sampling_ids: Tensor | None = None,
    sampling_offsets: Tensor | None = None,
    include_label: bool = False,
    max_dense_rows: int | None = None,
) -> tuple[Tensor, ...]:
    shape = logits.shape[:-1]
    state = no_logits(shape.numel(), logits)
    _op.softmax_state_.default(
        state, logits, labels, first_token, temperature, temperature_tensor, mask,
        sampling_ids, sampling_offsets, include_label, max_dense_rows,
    )  # fmt: skip
    if temperature_tensor is not None and temperature_tensor.dim() > 0:
        temperature_tensor = temperature_tensor.reshape(-1)
    everyones = Shard.of_group(first_token, group_name).everyones(state)
    outputs = _op.softmax_state_finish.default(everyones, temperature, temperature_tensor)
    outputs[0].masked_fill_(labels.reshape(-1) == -100, 0.0)
    if mask is not None:
        for output in outputs:
            output.masked_fill_(~mask.reshape(-1), 0.0)
    return tuple(output.view(shape) for output in outputs)
