"""The forward of the LM head: it merges one tile of logits at a time into the rows' softmax states, and drops the tile.

A row's result has the same bits as from its whole logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .picked import Picked
from .problem import HeadProblem, require_bounds
from .products import without_autocast
from .shard import Shard
from .tiles import Tiles, of_rows

_op = torch.ops.d3s_kernels


def no_logits(rows: int, like: Tensor) -> Tensor:
    """The initial states ``[rows, 4]``. The label's logit starts as NaN, and stays so if the label is no token."""
    state = like.new_empty((rows, 4), dtype=torch.float32)
    for column, value in enumerate((torch.finfo(torch.float32).min, 0.0, 0.0, torch.nan)):
        state[:, column] = value
    return state


@without_autocast
def forward_of_shard(
    shard: Shard,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    temperature_tensor: Tensor | None = None,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    max_rows: int | None = None,
    max_grad_rows: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    workspace_bytes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = HeadProblem(
        shard, hidden, weight, labels, bias, temperature, temperature_tensor, logit_softcap, mask, logits_dtype,
        workspace_bytes,
    ).checked_head()  # fmt: skip
    require_bounds(max_rows=max_rows, max_grad_rows=max_grad_rows)
    shape = hidden.shape[:-1]
    count = labels.numel()
    if mask is None and max_rows is not None and count > max_rows:
        nan = hidden.new_full(shape, torch.nan, dtype=torch.float32)
        return nan, nan.clone(), nan.clone(), nan.clone()
    rows, targets = hidden.reshape(count, hidden.shape[-1]), labels.reshape(count)
    temperatures = temperature_tensor
    if temperatures is not None and temperatures.dim() > 0:
        temperatures = temperatures.reshape(count)

    picked = None
    if mask is not None:
        picked = Picked.where(mask.reshape(count), max_rows)
        rows, targets = picked.gather(rows), picked.gather(targets)
        if temperatures is not None and temperatures.dim() > 0:
            temperatures = picked.gather_temperatures(temperatures)

    tiles = Tiles.cut(rows, head, workspace_bytes)
    state = no_logits(len(rows), rows)
    for r in tiles.row_slices():
        for t in tiles.token_slices():
            logits = head.logits(rows[r], t, tiles.room(r, t))
            first_token = shard.first_token + t.start
            _op.softmax_state_.default(state[r], logits, targets[r], first_token, temperature, of_rows(temperatures, r))
    outputs = _op.softmax_state_finish.default(shard.everyones(state), temperature, temperatures)
    outputs[0].masked_fill_(targets == -100, 0.0)
    if picked is not None:
        outputs = tuple(picked.scatter(output, count) for output in outputs)
    logprob, entropy, row_max, log_sum = (output.view(shape) for output in outputs)
    return logprob, entropy, row_max, log_sum
