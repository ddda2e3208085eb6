"""Which tokens an update computes and measures. test_trl_sweep.py compares the gradients of all losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import (
    forwards,
    generation_batch,
    logged_together,
    logits_of,
    loss_and_gradients,
    micro_batch,
    rows_of,
)
from tiny_trl import GROUP, model, trainer

import d3s_kernels as d3s
from d3s_kernels.integrations.trl.batch import UNMEASURED
from d3s_kernels.integrations.trl.columns import MayCut, trimmed

CLIPPED = {"epsilon": 0.05, "epsilon_high": 0.1}  # so narrow that some ratios are clipped


def with_old_policy(batch: dict[str, Tensor], policy: Any, reference: bool = False) -> dict[str, Tensor]:
    """Adds log-probabilities of an older policy close to this one, and, if asked for, of a reference."""
    with torch.no_grad():
        logprob = d3s.logprob_entropy(logits_of(policy, batch).float(), batch["completion_ids"])[0]
    random = torch.Generator().manual_seed(9)
    names = ["old_per_token_logps"] + ["ref_per_token_logps"] * reference
    return batch | {name: logprob + 0.2 * torch.randn(logprob.shape, generator=random) for name in names}


def test_a_process_with_masked_rollouts_alone_adds_nothing_to_what_is_logged() -> None:
    """TRL takes a single column for values of whole sequences, and would count it whatever the mask says."""
    made = trainer(loss_type="grpo", **CLIPPED)
    made.beta = 0.3
    batch, masked = (with_old_policy(micro_batch(seed), model(), reference=True) for seed in (3, 4))
    masked["completion_mask"] *= 0
    alone = logged_together(made, [batch])
    together = logged_together(made, [trimmed(masked, None, MayCut(True, True)), batch])
    assert alone["clip_ratio/region_mean"] > 0
    for name in ("entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert together[name] == pytest.approx(alone[name]), name


# ---- tokens known before the update ----------------------------------------------------------------------------------


def known_before(made: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch = dict(batch)
    made._choose_tokens_of_batch(batch)
    return batch


@pytest.mark.parametrize("multiple", [None, 3])
def test_the_cut_update_forwards_what_is_kept_only(multiple: int | None) -> None:
    """In the widths that TRL pads to."""
    made = trainer(entropy_from="rollout", tokens=0.05, pad_to_multiple_of=multiple)
    known = known_before(made, micro_batch(10))
    kept, step = known["d3s_kept"], multiple or 1
    with forwards(made.model) as seen:
        made.compute_loss(made.model, known).backward()
    last = int(kept.any(0).nonzero().max()) + 1
    found = [(list(inputs["input_ids"].shape), int((inputs["labels"] != -100).sum())) for _, inputs in seen]
    assert found == [([int(kept.any(1).sum()), -(-(4 + last) // step) * step], int(kept.sum()))]
    assert last == 4 < 10  # so that the width is no multiple of 3, and columns are left out
    assert kept.any(1).sum() < GROUP


def test_nothing_is_cut_where_tokens_depend_on_each_other_or_on_images() -> None:
    made = trainer(entropy_from="rollout")
    known = known_before(made, micro_batch(11))
    assert made._tokens_are_independent(known)
    assert not made._tokens_are_independent(known | {"num_images": [1] * GROUP})
    made.aux_loss_enabled = True
    assert not made._tokens_are_independent(known)
    made.aux_loss_enabled, made.beta = False, 0.1
    assert not made._tokens_are_independent(known)
    for option in ({"importance_sampling_level": "sequence"}, {"loss_type": "vespo"}, {"entropy_coef": 0.1}):
        assert not trainer(entropy_from="rollout", **option)._tokens_are_independent(known)


@pytest.mark.parametrize("apart", [False, True])
def test_logged_entropies_are_those_that_were_measured(apart: bool) -> None:
    """The second group has no advantages, so that no pass scores it. It may be one process's only group."""
    made, batch = trainer(entropy_from="rollout"), generation_batch(3)
    scored, mask = made._score(made.model, batch, compute_entropy=True)[1], batch["completion_mask"].bool()
    known = known_before(made, batch)
    assert torch.equal(known[UNMEASURED], mask & (torch.arange(2 * GROUP) >= GROUP).unsqueeze(1))
    parts = [known]
    if apart:
        parts = [rows_of(known, part) for part in (slice(0, GROUP), slice(GROUP, None))]
        for part in parts:
            part |= made._entropy_pass(part)
    logged, kept = logged_together(made, parts), known["d3s_kept"]
    measured = mask & (kept | (batch["advantages"] != 0)[:, None])
    assert kept.sum() < measured.sum() < mask.sum()
    expected = {"entropy": measured, "d3s/entropy_kept": kept, "d3s/entropy_dropped": measured & ~kept}
    for name, tokens in expected.items():
        assert logged[name] == pytest.approx(scored[tokens].mean().item(), rel=1e-4), name


@pytest.mark.parametrize("drop_zeros", [False, True])
def test_without_advantages_the_kept_tokens_alone_are_measured(drop_zeros: bool) -> None:
    made = trainer(entropy_from="rollout", drop_zeros=drop_zeros)
    batch = micro_batch(3) | {"advantages": torch.zeros(GROUP)}
    scored = made._score(made.model, batch, compute_entropy=True)[1]
    known = known_before(made, batch)
    made.compute_loss(made.model, known)
    made.log(logs := {})
    found = {name: value for name, value in logs.items() if "entropy" in name}
    mean = scored[known["d3s_kept"]].mean().item()
    assert found == ({} if drop_zeros else pytest.approx({"entropy": mean, "d3s/entropy_kept": mean}, rel=1e-4))


def test_a_micro_batch_without_a_kept_token_is_legal() -> None:
    made = trainer(entropy_from="rollout")
    known = known_before(made, micro_batch(12))
    known["d3s_kept"] = torch.zeros_like(known["d3s_kept"])
    value, gradient = loss_and_gradients(made, known)
    assert math.isfinite(value)
    assert len(gradient) > 0 == gradient.count_nonzero()
