"""In TRL, the tokens that a wrong response shares with a right one of its group get no gradient (GTPO)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import assert_same_gradient, generation_batch, loss_and_gradients
from tiny_trl import GROUP, model, trainer

from d3s_kernels import shared_tokens
from d3s_kernels.integrations.trl.batch import SHARED

ALL: dict[str, Any] = {"rollouts": 1.0, "tokens": 1.0}


def alike(seed: int = 5) -> dict[str, Tensor]:
    """A generation batch whose completions begin alike, and whose second token is a tool's."""
    batch = generation_batch(seed)
    batch["completion_ids"][:, :4] = torch.tensor([3, 4, 5, 6])
    batch["completion_ids"] *= batch["completion_mask"]
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"]).index_fill_(1, torch.tensor([1]), 0)
    return batch


def expected(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The tokens of the loss, and which of them are shared."""
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    return mask, shared_tokens(batch["completion_ids"], batch["advantages"].view(-1, GROUP), mask)


@pytest.mark.parametrize(("loss_type", "denominator"), [("grpo", "kept"), ("dapo", "all")])
def test_they_get_no_gradient(loss_type: str, denominator: str) -> None:
    """With all other tokens kept, in the update and before it. Both denominators then count all tokens of the loss, as
    with tokens that are off-policy.
    """
    mask, shared = expected(alike())
    assert 0 < shared.sum() < mask.sum()
    policy, found = model(), []
    for entropy_from in ("update", "rollout"):
        made = trainer(
            policy=policy, drop_shared_tokens=True, entropy_from=entropy_from, loss_type=loss_type,
            loss_denominator=denominator, **ALL,
        )  # fmt: skip
        batch = made._keep_rollouts(alike())
        assert batch[SHARED].equal(shared[:, : batch[SHARED].shape[1]])
        if made._tokens_before_update:
            made._choose_tokens_of_batch(batch)
        found.append(loss_and_gradients(made, batch)[1])
        logged = made._metrics["train"]
        assert int(logged["d3s/tokens_kept"][0]) == (mask & ~shared).sum()
        assert float(logged["d3s/shared_share"][0]) == pytest.approx(float(shared.sum() / mask.sum()))
        assert "d3s/off_policy_share" not in logged
    assert_same_gradient(found[0], found[1])

    made = trainer(policy=policy, loss_type=loss_type, loss_denominator="all", **ALL)
    batch = made._keep_rollouts(alike())
    batch["d3s_kept"], batch["d3s_threshold"] = batch["completion_mask"].bool() & ~shared, torch.zeros(())
    batch["d3s_weight"] = torch.ones(())
    batch["d3s_entropy"], batch["d3s_trusted"] = torch.zeros(shared.shape), batch["completion_mask"].bool()
    assert_same_gradient(found[0], loss_and_gradients(made, batch)[1])


def test_a_group_on_two_processes_is_compared_as_a_whole() -> None:
    """This process has the last 4 rows of a group of 8, and fewer columns than the other one."""
    made, batch = trainer(drop_shared_tokens=True), alike()
    batch["completion_mask"][12:, 8:] = 0
    mask, shared = expected(batch)
    here = {name: value[12:, :8] for name, value in batch.items() if value.dim() > 1} | {"advantages": None}
    padded = batch["completion_ids"].masked_fill(~mask, -1)

    def gather(own: Tensor) -> Tensor:
        assert own.equal(padded[12:])
        return padded

    def pad_across(own: Tensor, dim: int, pad_index: int) -> Tensor:
        return torch.nn.functional.pad(own, (0, 2), value=pad_index)

    made.accelerator = SimpleNamespace(process_index=3, pad_across_processes=pad_across, gather=gather)
    found = made._shared_with_right_ones(here, batch["advantages"].view(-1, GROUP))
    assert found.equal(shared[12:, :8])
