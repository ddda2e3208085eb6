"""miles: its loss gets only the tokens that D3S chooses from each micro-batch.

Copy this file, and ``d3s_slime.py``, which has the rollouts of both trainers, to a folder that is on the PYTHONPATH of
all ranks::

    --loss-type custom_loss --custom-loss-function-path d3s_miles.token_loss
    --custom-megatron-before-train-step-hook-path d3s_miles.start_step  # for a share of tokens that changes

slime's way, ``d3s_slime.choose_tokens``, needs the data of a rollout step, which miles hands to no hook. The signatures
were read at 31f1ca9, 2026-08-21; newer versions have another name for the module of the losses.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from d3s_slime import chosen, require, selection_of_tokens
from torch import Tensor
from torch.nn.functional import pad

import d3s_kernels as d3s
from d3s_kernels.distributed import vocab_parallel_logprob_entropy

progress: float | None = None  # the share of training that is done, set by start_step


def start_step(args: Any, rollout_id: int, *_: Any) -> None:
    global progress  # tells the loss how much of training is done
    progress = d3s.progress_of(rollout_id, args.num_rollout)


def token_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """miles' policy loss, with the advantage 0 for tokens that are not chosen, and ``d3s/token_share`` as a metric. The
    pool is the micro-batches of all data-parallel ranks. ValueError: an unfit option."""
    package, mpu = "miles.backends.training_utils", import_module("megatron.core.parallel_state")
    try:
        losses = import_module(f"{package}.loss.hub.losses")
    except ModuleNotFoundError:  # where it was at 31f1ca9
        losses = import_module(f"{package}.loss_hub.losses")
    selection, layout = selection_of_tokens(args, batch, mpu), getattr(args, "qkv_format", "thd")
    start, end = selection.options.token_ratio_start, selection.options.token_ratio_end
    require(start == end or progress is not None, "d3s_token_ratio_end", end, f"{start}, unless start_step is called")
    require(layout == "thd", "qkv_format", layout, "'thd'")
    vocabulary, first = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
    pairs = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    of_responses = torch.cat([torch.arange(total) >= total - response for total, response in pairs])
    # The row before a token predicts it. Rows at the end are padding.
    read = pad(of_responses[1:], (0, logits.shape[1] - len(of_responses) + 1)).to(logits.device)
    no_label = torch.full_like(read, -100, dtype=torch.int64)
    _, entropy = vocab_parallel_logprob_entropy(
        logits[0].detach(), no_label, first, vocabulary, temperature=args.rollout_temperature or 1.0, mask=read
    )
    advantages, kept = chosen(selection, batch, entropy[read], progress or 0.0, mpu.get_data_parallel_group())
    loss, metrics = losses.policy_loss_function(args, {**batch, "advantages": advantages}, logits, sum_of_sample_mean)
    return loss, {**metrics, "d3s/token_share": sum_of_sample_mean(kept.float()).detach()}
