"""Whether the module of an LM head is all in its weight and bias, since TRL's fused head reads nothing else of it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.functional import linear


class UnsupportedHead(ValueError):
    """An LM head that computes more than a linear layer of its weight and bias."""


def check_head(model: Any) -> None:
    """Refuses heads of which TRL's fused head, and ours, would leave a part out.

    Args:
        model: a model with ``get_output_embeddings``; others are left to TRL.

    Raises:
        UnsupportedHead: the head has an adapter or other trainable parameters, or gives other logits than its weight
            and bias (trl#4612).
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = getattr(head, "_fsdp_wrapped_module", head)  # FSDP's wrapper, in its first version
    if head is None or (isinstance(head, torch.nn.Linear) and type(head).forward is torch.nn.Linear.forward):
        return
    reason = _left_out(head)
    if reason is not None:
        raise UnsupportedHead(
            f"lm_head: got a {type(head).__module__}.{type(head).__qualname__}, {reason}; takes a linear layer, since "
            "log-probabilities are computed from its weight and bias alone. Leave 'lm_head' out of the adapter's "
            "target_modules (modules_to_save=['lm_head'] trains all of it), or merge the adapter first"
        )


def _left_out(head: Any) -> str | None:
    """What its weight and bias leave out of a head."""
    tuners, wrappers = (sys.modules.get(f"peft.{name}") for name in ("tuners.tuners_utils", "utils.other"))
    if tuners is not None and isinstance(head, tuners.BaseTunerLayer):
        return "an adapter, which would be ignored and never trained"
    if wrappers is not None and isinstance(head, wrappers.ModulesToSaveWrapper):
        return None  # its weight is that of the active copy, or the original's while adapters are switched off
    parts = {id(parameter) for name in ("weight", "bias") if (parameter := getattr(head, name, None)) is not None}
    more = [name for name, value in head.named_parameters() if value.requires_grad and id(value) not in parts]
    if more:
        return f"whose {', '.join(more)} would be ignored and never trained"
    return None if _is_linear(head) else "which gives other logits than they do"


@torch.no_grad()
def _is_linear(head: Any) -> bool:
    """Tries one row. A head whose weight is not here, but elsewhere, sharded or quantised, is taken for linear."""
    weight = head.weight
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_floating_point()
    if not plain or weight.is_meta or hasattr(weight, "ds_id"):
        return True
    row = torch.linspace(-1, 1, weight.shape[-1], device=weight.device, dtype=weight.dtype)[None]
    bound = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 0.02
    theirs, expected = head(row).float(), linear(row, weight, getattr(head, "bias", None)).float()
    return bool((theirs - expected).norm() <= bound * expected.norm().clamp(min=1e-6))
