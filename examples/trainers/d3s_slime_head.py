"""slime: an update without logits, in which the LM head gets only the tokens that need a gradient.

Copy this file, and ``d3s_slime.py``, to a folder that is on the PYTHONPATH of all ranks::

    --custom-megatron-before-train-step-hook-path d3s_slime_head.install
    --custom-megatron-before-log-prob-hook-path d3s_slime_head.remove
    --loss-type custom_loss --custom-loss-function-path d3s_slime_head.policy_loss

``d3s_slime.choose_tokens`` gives the advantage 0 to all tokens that it does not choose, and these tokens then cost
nothing in the LM head. The signatures were read in slime at 624b824, 2026-08-21.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from d3s_slime import SLIME, require
from torch import Tensor

UNKNOWN = (
    "use_tis", "get_mismatch_metrics", "use_opsm", "custom_pg_loss_reducer_function_path", "recompute_loss_function",
    "enable_mtp_training", "allgather_cp", "overlap_moe_expert_parallel_comm",
)  # fmt: skip
head: Any = None  # the LMHead of this process, while it is installed


def install(args: Any, rollout_id: int, step_id: int, model: list[Any], *_: Any) -> None:
    """slime, before a training step: the model keeps hidden states for :func:`policy_loss`, in place of logits.

    ValueError: a step without this loss, an option that the loss does not know, or no hook for :func:`remove`.
    """
    global head
    if getattr(model[0], "role", "actor") != "actor":
        return  # a critic has no LM head
    for name, ours in (("custom_loss_function", "policy_loss"), ("custom_megatron_before_log_prob_hook", "remove")):
        path = getattr(args, f"{name}_path")
        require(path == f"d3s_slime_head.{ours}", f"{name}_path", path, f"d3s_slime_head.{ours}")
    require(args.loss_type == "custom_loss", "loss_type", args.loss_type, "'custom_loss'")
    require(args.advantage_estimator != "gspo", "advantage_estimator", "gspo", "one with a ratio for each token")
    for name in UNKNOWN:  # slime's loss does more with them, or calls the model in another way
        given = getattr(args, name, None)
        require(not given, name, given, "no value, because d3s_slime_head.policy_loss does not know it")
    require(args.rollout_top_p == 1, "rollout_top_p", args.rollout_top_p, "1.0, which needs no sampling masks")
    if head is None:
        head = import_module("d3s_kernels.integrations.megatron").LMHead(model[-1])
        head.install()


def remove(*_: Any) -> None:
    """slime, before a pass without a gradient, which computes log-probabilities from logits."""
    global head
    if head is not None:
        head.remove()
    head = None


def policy_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's policy loss and metrics for hidden states, with slime's own functions. ``logits`` has no columns.

    Only tokens with an advantage get to the LM head, unless a KL or an entropy term needs all tokens. A token that does
    not counts in the metrics as one whose log-probability has not changed, and whose entropy is 0.
    """
    require(head is not None, "custom_megatron_before_train_step_hook_path", None, "d3s_slime_head.install")
    slime, (rows, labels) = import_module("slime.utils.ppo_utils"), rows_of_responses(batch)
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    require(bool(old), "log_probs", old, "those of a pass before the update, or use_rollout_logprobs")
    old, advantages, read = torch.cat(old), torch.cat(batch["advantages"]), batch["full_loss_masks"][0, rows].bool()
    if not (args.use_kl_loss or args.entropy_coef):
        read = read & (advantages != 0)
    shape, packed = batch["tokens"].shape, batch["tokens"].new_zeros
    logprob, entropy = head.logprob_entropy(
        packed(shape).index_put((torch.zeros_like(rows), rows), labels),
        mask=packed(shape, dtype=torch.bool).index_put((torch.zeros_like(rows), rows), read),
        temperature=args.rollout_temperature, logits_dtype=args.params_dtype,  # as slime rounds the old ones
    )  # fmt: skip
    log_probs, entropy = torch.where(read, logprob[0, rows], old), entropy[0, rows]
    ppo_kl, clip = old - log_probs, (args.eps_clip, args.eps_clip_high)
    if args.advantage_estimator == "cispo":
        losses, clipped = slime.compute_cispo_loss(ppo_kl, log_probs, advantages, *clip)
    else:
        losses, clipped = slime.compute_policy_loss(ppo_kl, advantages, *clip, eps_clip_c=args.eps_clip_c)
    values = {"pg_loss": losses, "entropy_loss": entropy, "pg_clipfrac": clipped, "ppo_kl": ppo_kl}
    if batch.get("rollout_log_probs"):
        compared = log_probs if args.use_rollout_logprobs else old
        values["train_rollout_logprob_abs_diff"] = (compared - torch.cat(batch["rollout_log_probs"])).abs()
    if args.use_kl_loss:
        ratio = (-ppo_kl).exp() if args.use_unbiased_kl else None
        values["kl_loss"] = slime.compute_approx_kl(
            log_probs, torch.cat(batch["ref_log_probs"]), kl_loss_type=args.kl_loss_type, importance_ratio=ratio
        )
    metrics = {name: sum_of_sample_mean(of_tokens) for name, of_tokens in values.items()}
    loss = metrics["pg_loss"] - args.entropy_coef * metrics["entropy_loss"]
    if args.use_kl_loss:
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, {name: value.detach().clone() for name, value in {"loss": loss, **metrics}.items()}


def rows_of_responses(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of each token of the responses on this rank: the packed row that predicts it, and its id."""
    context = import_module("megatron.core.parallel_state").get_context_parallel_world_size()
    rows, labels, start = [], [], 0
    lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    for tokens, (total, response) in zip(batch["unconcat_tokens"], lengths, strict=True):
        if context == 1:
            pieces, width = [(total - response - 1, total - response, total)], total
        else:  # two chunks of the sequence
            offsets = import_module(f"{SLIME}.cp_utils").get_logits_and_tokens_offset_with_cp
            size, chunks, places, ids = offsets(total, response)
            each = enumerate(zip(chunks, places, ids, strict=True))
            pieces, width = [(half * size + p[0] - c[0], *i) for half, (c, p, i) in each], 2 * size
        for row, first, end in pieces:
            rows.append(torch.arange(start + row, start + row + end - first, device=tokens.device))
            labels.append(tokens[first:end])
        start += width
    return torch.cat(rows), torch.cat(labels)
