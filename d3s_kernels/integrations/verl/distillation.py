"""Computes verl's top-k distillation loss from the log-probabilities that our LM head returns at the teacher's ids.

verl computes this loss from logits (``verl/trainer/distillation/fsdp/losses.py``). With fused kernels, verl's FSDP
engine reads the loss from the model's output instead (``fused_linear_aux``), but nothing in verl computes it there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import kl_divergence
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils as tu

from ..._lm_head.token_logprobs import TokenLogprobs

NAME = "distillation_use_topk"


class Teacher(NamedTuple):
    """The teacher's K most probable ids for each row of this process's hidden states, ``[rows, K]``."""

    token_ids: Tensor
    logprobs: Tensor


def teacher_of(data: Any, of_this_rank: Callable[[Tensor], Tensor], beside: str) -> Teacher | None:
    """Returns the teacher's ids of a micro-batch, or None if the micro-batch has no top-k loss. ``of_this_rank`` cuts
    out the packed rows of this process.
    """
    if not tu.get_non_tensor_data(data, NAME, False):
        return None
    if not tu.get_non_tensor_data(data, "use_remove_padding", True):
        raise ValueError(f"actor_rollout_ref.model.use_remove_padding: got False; takes True with {NAME} and {beside}")
    return Teacher(*(of_this_rank(data[name].values()) for name in ("teacher_ids", "teacher_logprobs")))


def joined(found: TokenLogprobs) -> tuple[Tensor, Tensor]:
    """Returns the two results of verl's fused head, but the last dimension of the first one also has the
    log-probabilities at the teacher's ids.

    FSDP prepares the backward in hooks of the tensors in the model's output. So everything that the loss reads passes
    through the output.
    """
    return torch.cat([found.logprob.unsqueeze(-1), found.logprobs], dim=-1), found.entropy


def with_losses(output: Any, teacher: Teacher, mask: Tensor | None, loss_function: Any) -> Any:
    """Takes the log-probabilities of :func:`joined` apart, and adds to the model's output what verl reads of a fused
    head with a top-k loss. Rows where ``mask`` is False have the loss 0; no loss of verl reads them.

    ``loss_function`` is the function that would compute the loss from logits. It has verl's configuration of the loss.
    """
    config = getattr(loss_function, "keywords", {}).get("distillation_config")
    function = getattr(loss_function, "func", loss_function)
    if function is not distillation_ppo_loss or config is None:
        raise ValueError(
            f"loss_function: got {getattr(function, '__name__', function)} with {NAME}; takes functools.partial of "
            "verl's distillation_ppo_loss with its distillation_config, as verl's workers make it"
        )
    log_probs = output.log_probs[..., 1:]
    of_teacher = teacher.logprobs.view_as(log_probs)
    student_mass, teacher_mass = log_probs.exp().sum(-1), of_teacher.exp().sum(-1)
    if (least := config.distillation_loss.log_prob_min_clamp) is not None:
        log_probs, of_teacher = log_probs.clamp_min(least), of_teacher.clamp_min(least)
    losses = kl_divergence(log_q=log_probs, log_p=of_teacher)
    if mask is not None:
        losses, student_mass = (each.where(mask.view_as(each), 0) for each in (losses, student_mass))
    output.log_probs = output.log_probs[..., 0]
    output.fused_linear_aux = SimpleNamespace(
        distillation_losses=losses, student_mass=student_mass, teacher_mass=teacher_mass
    )
    return output
