"""Checks of verl's configuration and, with sampling masks, of the rows and of the workers' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from .sampling_mask import wrong_number

OPTION = "trainer.v1.d3s_sync.sampling_mask_field"
FUSED = "actor_rollout_ref.model.fused_kernel_options"


def require_sets(field: str, rows: dict[str, tuple[Any, Tensor, Tensor]]) -> Tensor:
    """Raises a ValueError for the first row whose sets do not match its sampled tokens.

    Args:
        rows: for each key the row's sets, its response and its response mask.

    Returns:
        The size of each token's set, row after row; 0 where the mask is 0.
    """
    sizes: list[int] = []
    for key, (sets, response, mask) in rows.items():
        if sets is None:
            raise ValueError(
                f"{OPTION}: got {field!r}, which row {key} does not have in its extra_fields; takes a rollout that "
                "puts it there: verl's own servers return no sets (docs/verl.md)"
            )
        if len(sets) != len(response):
            raise wrong_number(field, key, len(sets), len(response))
        for place, (token, of_token, counts) in enumerate(zip(response.tolist(), sets, mask.tolist(), strict=True)):
            if counts and token not in of_token:
                raise ValueError(
                    f"{field}: got a set of {len(of_token)} ids at token {place} of row {key}, without the token "
                    f"{token} that was drawn; takes the sets that the tokens were drawn from"
                )
            sizes.append(len(of_token) if counts else 0)
    return torch.tensor(sizes)


def require_used(sizes: Tensor, entropy: Tensor) -> None:
    """Raises a RuntimeError if the workers computed entropies over more tokens than the sets have.

    verl's engine ignores what it does not know, so a worker without this library would ignore the sets silently. The
    entropy over a set is at most the logarithm of its size.
    """
    excess = (entropy - sizes.log())[sizes > 0]
    if len(excess) and float(excess.max()) > 1e-2:
        raise RuntimeError(
            f"{OPTION}: the workers have not used the sets: the entropy of a token is {float(excess.max()):.3g} above "
            "the logarithm of its set's size. Load the library in each worker (VERL_USE_EXTERNAL_PLUGINS)"
        )


def require_config(config: Any) -> None:
    """Raises a ValueError for a configuration of verl in which log-probabilities of sets cannot be computed.

    The trainer mode calls it if its option asks for sets. A custom loop that sets ``meta_info[NOTE]`` must call it.

    Args:
        config: verl's whole configuration.
    """
    parallel, one = "ulysses_sequence_parallel_size", (None, 1)
    takes: list[tuple[str, Sequence[Any]]] = [
        (f"{FUSED}.impl_backend", ("d3s",)),
        *(
            (f"actor_rollout_ref.{of}{parallel}", one)
            for of in ("actor.", "actor.fsdp_config.", "ref.", "ref.fsdp_config.")
        ),
        ("actor_rollout_ref.rollout.multi_turn.enable", (None, False)),
    ]
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
    if OmegaConf.select(config, f"{FUSED}.impl_backend") != "d3s":
        return
    actor, off = "actor_rollout_ref.actor", (None, False)
    takes: list[tuple[str, Sequence[Any]]] = [
        ("actor_rollout_ref.model.use_fused_kernels", (True,)),
        (f"{actor}.strategy", ("fsdp", "fsdp2")),
        ("actor_rollout_ref.ref.strategy", ("fsdp", "fsdp2")),
        ("actor_rollout_ref.model.mtp.enable", off),
        (f"{actor}.calculate_sum_pi_squared", off),
        ("distillation.enabled", off),
    ]
    _require_values(config, takes, f"{FUSED}.impl_backend=d3s")


def _require_values(config: Any, takes: Sequence[tuple[str, Sequence[Any]]], beside: str) -> None:
    for key, values in takes:
        given = OmegaConf.select(config, key)
        if given not in values:
            accepted = " or ".join(repr(value) for value in values if value is not None)
            raise ValueError(f"{key}: got {given!r}; takes {accepted} with {beside}")
