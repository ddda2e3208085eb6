"""Checks verl's configuration. With sampling masks, also checks the rows and the workers' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from ...selection.options import option_names, options_from
from .._head_options import HeadOptions
from .sampling_mask import wrong_number

OPTION = "trainer.v1.d3s_sync.sampling_mask_field"
_STRATEGIES = ("fsdp", "fsdp2", "megatron")
FUSED = "actor_rollout_ref.model.fused_kernel_options"


def require_supports(field: str, rows: dict[str, tuple[Any, Tensor, Tensor]]) -> Tensor:
    """Returns the size of each token's support, in one tensor, row after row. The size is 0 where the response mask is
    0. ``rows`` maps the key of each row to the row's supports, response and response mask. Raises a ValueError for the
    first row whose supports do not match its tokens.
    """
    sizes: list[int] = []
    for key, (supports, response, mask) in rows.items():
        if supports is None:
            raise ValueError(
                f"{OPTION}: got {field!r}, which row {key} does not have in its extra_fields; takes a rollout that "
                "puts it there: verl's own servers return no supports (docs/verl.md)"
            )
        if len(supports) != len(response):
            raise wrong_number(field, key, len(supports), len(response))
        for place, (token, ids, counts) in enumerate(zip(response.tolist(), supports, mask.tolist(), strict=True)):
            if counts and token not in ids:
                raise ValueError(
                    f"{field}: got a support of {len(ids)} ids at token {place} of row {key}, without the token "
                    f"{token} that was drawn; takes the supports that the tokens were drawn from"
                )
            sizes.append(len(ids) if counts else 0)
    return torch.tensor(sizes)


def require_used(sizes: Tensor, entropy: Tensor) -> None:
    """Raises a RuntimeError if the workers computed entropies over more tokens than the supports contain.

    A worker without this library silently ignores the supports. The entropy over a support is at most the logarithm of
    the support's size, so a larger entropy shows that a worker has ignored the support.
    """
    excess = (entropy - sizes.log())[sizes > 0]
    if len(excess) and float(excess.max()) > 1e-2:
        raise RuntimeError(
            f"{OPTION}: the workers have not used the supports: the entropy of a token is {float(excess.max()):.3g} "
            "above the logarithm of its support's size. Load the library in each worker (VERL_USE_EXTERNAL_PLUGINS)"
        )


def require_config(config: Any) -> None:
    """Raises a ValueError if ``config``, verl's whole configuration, does not allow log-probabilities over supports.

    The trainer mode calls this if ``sampling_mask_field`` is set. A training loop that sets ``meta_info[NOTE]`` itself
    must also call this function.
    """
    takes: dict[str, Sequence[Any]] = {f"{FUSED}.impl_backend": ("d3s",)}
    takes["actor_rollout_ref.rollout.multi_turn.enable"] = (None, False)
    _require_values(config, takes, "sampling masks")
    require_head(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p >= 1 and rollout.top_k <= 0:
        raise ValueError(
            f"actor_rollout_ref.rollout.top_p: got {rollout.top_p} with top_k={rollout.top_k}, which cut nothing off; "
            "takes top_p below 1 or top_k above 0 with sampling masks"
        )


def require_head(config: Any) -> None:
    """Raises a ValueError if verl's configuration combines our LM head with options that it does not support."""
    asked_for = OmegaConf.select(config, f"{FUSED}.impl_backend") == "d3s"
    head_options(OmegaConf.select(config, FUSED), asked_for)
    if not asked_for:
        return
    actor, off = "actor_rollout_ref.actor", (None, False)
    takes: dict[str, Sequence[Any]] = {
        "actor_rollout_ref.model.use_fused_kernels": (True,),
        f"{actor}.strategy": _STRATEGIES,
        "actor_rollout_ref.ref.strategy": _STRATEGIES,
        "actor_rollout_ref.model.mtp.enable": off,
        f"{actor}.calculate_sum_pi_squared": off,
        "distillation.enabled": off,
    }
    for section in ("actor", "ref"):
        if OmegaConf.select(config, f"actor_rollout_ref.{section}.strategy") == "megatron":
            megatron = f"actor_rollout_ref.{section}.megatron"
            takes |= {f"{megatron}.use_remove_padding": (None, True), f"{megatron}.dynamic_context_parallel": off}
    _require_values(config, takes, f"{FUSED}.impl_backend=d3s")


def head_options(fused_kernel_options: Mapping[str, Any] | None, is_ours: bool) -> HeadOptions:
    """Returns the options of our LM head, which are in the same section as verl's own options of its fused kernels.
    Raises a ValueError for a bad value. If the head is not ours (``is_ours``), raises a ValueError for any value.
    """
    given = fused_kernel_options or {}
    values = {name: given[name] for name in option_names(HeadOptions) if given.get(name) is not None}
    for name, value in values.items():
        if not is_ours:
            raise ValueError(
                f"{FUSED}.{name}: got {value!r}; takes actor_rollout_ref.model.use_fused_kernels=true and "
                f"{FUSED}.impl_backend=d3s beside it, since only our LM head has this option"
            )
    return options_from(HeadOptions, values, f"{FUSED}.")


def _require_values(config: Any, takes: dict[str, Sequence[Any]], beside: str) -> None:
    for key, accepted in takes.items():
        value = OmegaConf.select(config, key)
        if value not in accepted:
            words = " or ".join(repr(each) for each in accepted if each is not None)
            raise ValueError(f"{key}: got {value!r}; takes {words} with {beside}")
