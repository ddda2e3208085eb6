"""Batches as TRL leaves them, and what a trainer's update computes of one: scores, forwards and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_trl import GROUP, VOCABULARY
from torch import Tensor
from trl import GRPOTrainer

from d3s_kernels.integrations.trl.batch import SETS


def generation_batch(seed: int, rows: int = 2 * GROUP, prompt: int = 4, completion: int = 10) -> dict[str, Tensor]:
    """Ragged prompts and completions, and advantages of groups, which are all 0 in the second group."""
    random = torch.Generator().manual_seed(seed)
    begins = torch.randint(0, prompt, (rows, 1), generator=random)
    ends = torch.randint(1, completion + 1, (rows, 1), generator=random)
    advantages = torch.randn(rows, generator=random)
    advantages[GROUP : 2 * GROUP] = 0
    mask = (torch.arange(completion) < ends).long()
    return {
        "prompt_ids": torch.randint(2, VOCABULARY, (rows, prompt), generator=random),
        "prompt_mask": (torch.arange(prompt) >= begins).long(),
        "completion_ids": torch.randint(2, VOCABULARY, (rows, completion), generator=random) * mask,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }


def micro_batch(seed: int) -> dict[str, Tensor]:
    """A micro-batch of one group with different advantages."""
    return generation_batch(seed, GROUP)


def rows_of(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    """These rows of a batch, as TRL splits it."""
    return {name: value[rows] if value.dim() else value for name, value in batch.items()}


def with_sets(batch: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The batch with a random set for each token, of 1 to 7 tokens, the token itself among them."""
    random = torch.Generator().manual_seed(seed)
    tokens = batch["completion_ids"].unsqueeze(2)
    others = torch.rand(*tokens.shape[:2], VOCABULARY, generator=random).argsort(dim=2)[..., :6]
    sizes = torch.randint(6, tokens.shape, generator=random)
    others = others.masked_fill((torch.arange(6) >= sizes) | (others == tokens), -1)
    sets = torch.cat([tokens, others], dim=2).int().masked_fill(batch["completion_mask"].unsqueeze(2) == 0, -1)
    return batch | {SETS: sets}


def texts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Prompts with their completions, as a model takes them."""
    names = {"input_ids": "ids", "attention_mask": "mask"}
    return {
        name: torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], dim=1) for name, part in names.items()
    }


# ---- updates ---------------------------------------------------------------------------------------------------------


def logits_of(policy: Any, batch: dict[str, Tensor]) -> Tensor:
    """In float64, those that predict the completions."""
    return policy(**texts(batch)).logits[:, -batch["completion_ids"].shape[1] - 1 : -1].double()


@contextmanager
def forwards(policy: Any) -> Iterator[list[tuple[bool, dict[str, Any]]]]:
    """For each forward of the fused head: whether it has a gradient, and its inputs."""
    seen: list[tuple[bool, dict[str, Any]]] = []
    forward = policy.forward

    def watched(*arguments: Any, **more: Any) -> Any:
        if more.get("fused_lm_head"):
            seen.append((torch.is_grad_enabled(), more))
        return forward(*arguments, **more)

    policy.forward = watched
    yield seen
    policy.forward = forward


def looked_at(patch: pytest.MonkeyPatch, holder: Any, name: str, look: Callable[..., Any]) -> None:
    """From now on, ``look`` gets what a function returns, and its arguments."""
    function = getattr(holder, name)

    def watched(*arguments: Any) -> Any:
        result = function(*arguments)
        look(result, *arguments)
        return result

    patch.setattr(holder, name, watched)


def gradients(made: GRPOTrainer) -> Tensor:
    """The gradients of all parameters as one vector. They are cleared afterwards."""
    found = [parameter.grad for parameter in made.model.parameters() if parameter.requires_grad]
    vector = torch.cat([torch.zeros(0) if grad is None else grad.flatten() for grad in found])
    made.model.zero_grad(set_to_none=True)
    return vector


def loss_and_gradients(made: GRPOTrainer, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    loss = made.compute_loss(made.model, batch)
    loss.backward()
    return loss.item(), gradients(made)
