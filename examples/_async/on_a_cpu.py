"""TRL's asynchronous trainer on a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def use_a_cpu() -> None:
    """Replaces the two parts of TRL's trainer that need a GPU."""
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None  # then it logs no MFU
    async_grpo_trainer.register_tree_attention = register_tree_attention


def register_tree_attention() -> None:
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor, tree_cu_seqlens_k: Tensor, scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """TRL's attention for prefix trees, in plain PyTorch, for a CPU: the tokens of a segment see those of its path."""
    outputs = []
    bounds = (tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist())
    for (begin, end), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        path = tree_kv_index[first:last]
        seen = torch.ones(end - begin, len(path), dtype=torch.bool).tril(len(path) - (end - begin))
        own, keys, values = query[:, :, begin:end], key[:, :, path], value[:, :, path]
        outputs.append(scaled_dot_product_attention(own, keys, values, seen, scale=scaling, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), None
