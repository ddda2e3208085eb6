"""Tells which positions of a micro-batch verl will read, and over which supports their log-probabilities are computed.
The heads of both engines use it: :mod:`.head` for FSDP, :mod:`.megatron` for Megatron.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from ...support.sampling_mask import SamplingMask
from .distillation import NAME as DISTILLATION
from .sampling_mask import NOTE, flat_responses, places_of_responses, response_lengths, sampling_mask_of

BACKEND = "d3s"
OPTION = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
_POLICY_UPDATE = ("response_mask", "old_log_probs", "advantages")


class Positions(NamedTuple):
    """The positions of a micro-batch that are read. A position predicts the next token."""

    mask: Tensor  # bool: for packed or padded rows of logits, which are read
    at_most: int | None = None  # an upper bound on the number of rows that are read; None: no bound is known
    supports: SamplingMask | None = None  # a support for each row up to the last that is read
    in_loss_and_old: tuple[Tensor, Tensor] | None = None
    """Set only in a policy update. For each packed position: whether the position is in the loss, and its old
    log-probability.
    """


def fused_kernel_options(engine: Any) -> Any:
    return getattr(getattr(engine, "model_config", None), "fused_kernel_options", None) or {}


def asked_for(engine: Any) -> bool:
    """Returns whether the engine's configuration asks for our head."""
    return bool(fused_kernel_options(engine).get("impl_backend") == BACKEND)


def require_no_supports(data: Any) -> None:
    """Raises a ValueError for a micro-batch with supports. For a head that is not ours."""
    if tu.get_non_tensor_data(data, NOTE, None) is not None:
        raise ValueError(
            f"{NOTE}: got a micro-batch with it; takes actor_rollout_ref.model.use_fused_kernels=true and "
            f"{OPTION}={BACKEND}, since only our LM head takes supports"
        )


def positions_read(data: Any, width: int | None = None) -> Positions | None:
    """Returns which positions of the model's next output will be read, or None if all may be read.

    A policy update reads the tokens that ``response_mask`` marks. A pass without gradients reads all response tokens
    except the tokens of padding rows. Any other loss may read all positions. A caller that asks for the model's output
    may also read all positions. ``width`` is as in :func:`~.sampling_mask.sampling_mask_of`.
    """
    field = tu.get_non_tensor_data(data, NOTE, None)
    if field is not None and tu.get_non_tensor_data(data, DISTILLATION, False):
        raise ValueError(f"{DISTILLATION}: got True with {NOTE}; takes False, since a teacher has no supports")
    in_loss = torch.is_grad_enabled() and all(name in data for name in _POLICY_UPDATE)
    everything = "responses" not in data or "response_mask" not in data or (torch.is_grad_enabled() and not in_loss)
    if field is None and (everything or tu.get_non_tensor_data(data, "return_model_output", False)):
        return None

    read = flat_responses(data, data["response_mask"]).bool()  # one value for each token of all responses
    if not in_loss:
        lengths = response_lengths(data)
        row = torch.arange(len(lengths), device=read.device).repeat_interleave(lengths, output_size=len(read))
        # The response mask of verl's padding rows is all 0.
        is_real = torch.zeros_like(lengths).index_add(0, row, read.to(lengths.dtype)) > 0
        read = is_real[row]
    total, places = len(data["input_ids"].values()), places_of_responses(data)
    mask = _at(total, places, read)
    in_loss_and_old = (mask, _at(total, places, flat_responses(data, data["old_log_probs"]))) if in_loss else None
    if width is not None:
        mask = _at(width * len(data["input_ids"].offsets().diff()), places_of_responses(data, width), read)
    supports = None if field is None else sampling_mask_of(data, field, width=width)[0]
    return Positions(mask, None if in_loss else len(read), supports, in_loss_and_old)


def _at(rows: int, places: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(rows).index_copy(0, places, values)


def with_empty_rows(supports: SamplingMask, rows: int) -> SamplingMask:
    """Adds rows without a support at the end, until there are ``rows``."""
    more = rows - supports.rows
    return SamplingMask(supports.token_ids, torch.cat([supports.offsets, supports.offsets[-1:].expand(more)]))


def with_old(outputs: dict[str, Any], offsets: Tensor, in_loss_and_old: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """Returns the engine's outputs, but tokens outside the loss get their old log-probabilities, so that the importance
    ratio of these tokens is 1. ``offsets`` are those of ``input_ids``.
    """
    if in_loss_and_old is None or "log_probs" not in outputs:
        return outputs
    in_loss, old = in_loss_and_old
    values = outputs["log_probs"].values()
    values = torch.where(in_loss, values, old.to(values.dtype))
    return outputs | {"log_probs": torch.nested.nested_tensor_from_jagged(values, offsets)}
