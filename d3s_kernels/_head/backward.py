"""The backward of the LM head: it recomputes each tile of logits, writes its gradient over it, and takes two products.

Only rows whose gradient is not 0 are computed. Where ranks share the vocabulary, each rank does this with its shard,
and the ranks sum their gradients of the hidden states (``shard.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .picked import Picked
from .problem import HeadProblem
from .products import add_product, without_autocast
from .shard import Shard
from .tiles import Tiles, of_rows

_op = torch.ops.d3s_kernels


@without_autocast
def backward_of_shard(
    shard: Shard,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    temperature: float,
    temperature_tensor: Tensor | None,
    logit_softcap: float | None,
    mask: Tensor | None,
    max_grad_rows: int | None,
    logits_dtype: torch.dtype,
    workspace_bytes: int | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    head = HeadProblem(
        shard, hidden, weight, labels, bias, temperature, temperature_tensor, logit_softcap, mask, logits_dtype,
        workspace_bytes,
    ).checked_head()  # fmt: skip
    want_hidden, want_weight, want_bias = wanted
    count = labels.numel()
    active = torch.zeros(count, dtype=torch.bool, device=hidden.device)
    if grad_logprob is not None:
        active |= (grad_logprob.reshape(count) != 0) & (labels.reshape(count) != -100)
    if grad_entropy is not None:
        active |= grad_entropy.reshape(count) != 0
    if mask is not None:
        active &= mask.reshape(count)
    if want_hidden:  # its rows are summed over the ranks, so all ranks must pick the same ones
        active = shard.anyones_(active)
    picked = Picked.where(active, max_grad_rows)

    def gather(values: Tensor) -> Tensor:
        return picked.gather(values.reshape(count, *values.shape[hidden.dim() - 1 :]))

    rows, targets, h, m, s = (gather(values) for values in (hidden, labels, entropy, row_max, log_sum))
    g_logprob, g_entropy = (None if grad is None else gather(grad) for grad in (grad_logprob, grad_entropy))
    if g_logprob is not None and shard.ranks is None and not hidden.is_cpu:
        # Labels on a GPU are not checked: one that is no token gives NaN.
        g_logprob = torch.where(targets < weight.shape[0], g_logprob, torch.nan)
    temperatures = temperature_tensor
    if temperatures is not None and temperatures.dim() > 0:
        temperatures = picked.gather_temperatures(temperatures.reshape(count))

    tiles = Tiles.cut(rows, head, workspace_bytes)
    grad_rows = rows.new_zeros(rows.shape if want_hidden else 0, dtype=torch.float32)
    # The tiles fill these gradients; without rows there are no tiles, and they are zeros.
    fresh = weight.new_empty if rows.shape[0] else weight.new_zeros
    grad_weight = fresh(weight.shape if want_weight else (0,))
    grad_bias = fresh(weight.shape[:1] if want_bias else (0,))
    several = rows.shape[0] > tiles.row_step
    # The outer loop is over tokens: the gradient of a slice of the weight is complete when its tiles are done, and only
    # needs a float32 sum of the slice's size.
    for t in tiles.token_slices():
        weight_sum = weight.new_zeros((t.stop - t.start, weight.shape[1]), dtype=torch.float32) if several else None
        bias_sum = weight.new_zeros(t.stop - t.start, dtype=torch.float32)
        for r in tiles.row_slices():
            tile = head.logits(rows[r], t, tiles.room(r, t))
            slope = None if logit_softcap is None else 1 - (tile / logit_softcap).square()
            _op.logprob_entropy_backward_.default(
                of_rows(g_logprob, r), of_rows(g_entropy, r), tile, targets[r], h[r], m[r], s[r],
                shard.first_token + t.start, temperature, of_rows(temperatures, r),
            )  # fmt: skip
            if slope is not None:
                tile.mul_(slope)
            if want_bias:
                bias_sum += tile.sum(0, dtype=torch.float32)
            tile = tile.to(weight.dtype)
            if want_hidden:
                add_product(grad_rows[r], tile, weight[t])
            if want_weight:
                if weight_sum is not None:
                    add_product(weight_sum, tile.t(), rows[r])
                else:
                    torch.mm(tile.t(), rows[r], out=grad_weight[t])
        if want_weight and weight_sum is not None:
            grad_weight[t] = weight_sum
        if want_bias:
            grad_bias[t] = bias_sum
    # The shards' parts cancel, as those of the tokens do. If they were rounded before the sum, the error would grow
    # with the number of ranks.
    grad_hidden = shard.total_(grad_rows).to(hidden.dtype)
    if want_hidden:
        grad_hidden = picked.scatter(grad_hidden, count).view(hidden.shape)
    return grad_hidden, picked.poison_(grad_weight), picked.poison_(grad_bias)
