"""ESPO inside TRL's loss. Its objective: test_espo_terms.py and test_trl_sweep.py. Runs: test_trl_training.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from batches import loss_and_gradients, micro_batch
from test_trl_gradient import with_old_policy
from tiny_trl import VOCABULARY, model, trainer
from transformers import Qwen2Config

from d3s_kernels.integrations.trl.espo import as_espo

ALPHA = 0.1  # so wide that only some ratios are out of range
ESPO = {"importance_sampling_level": "entropy_group", "espo_alpha": ALPHA, "loss_type": "grpo"}
WHOLE: dict[str, Any] = {**ESPO, "tokens": 1.0, "loss_denominator": "all"}  # every token has its gradient


def test_the_vocabulary_is_that_of_the_text() -> None:
    """A vision model has one configuration for each of its parts."""
    batch, values, wide = with_old_policy(micro_batch(9), model()), [], model()
    for vocabulary in (VOCABULARY, VOCABULARY**2):
        made = trainer(policy=wide, **ESPO, tokens=1.0)
        text = Qwen2Config(vocab_size=vocabulary)
        made.model.config.get_text_config = lambda *_, text=text, **__: text
        loss_and_gradients(made, batch)
        values.append(made._metrics["train"]["clip_ratio/region_mean"][0])
    assert values[0] < values[1]  # with the larger vocabulary the range is half as wide


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_a_token_without_an_entropy_is_in_no_group(loss: str) -> None:
    batch = with_old_policy(micro_batch(8), model())
    entropy = torch.rand(batch["old_per_token_logps"].shape)
    entropy[:, 0] = torch.nan
    made = trainer(**{**WHOLE, "loss_type": loss})
    moved, epsilon = as_espo(batch | {"d3s_entropy": entropy}, batch["old_per_token_logps"], entropy, made.args, 61)
    assert not moved["advantages"][:, 0].any()
    assert not epsilon[:, 0].any()
    assert (moved["advantages"][:, 1:][batch["completion_mask"][:, 1:].bool()] != 0).all()


def test_a_batch_is_used_again_as_it_was() -> None:
    batch = with_old_policy(micro_batch(6), model())
    before, made = dict(batch), trainer(**ESPO)
    first, gradient = loss_and_gradients(made, batch)
    assert batch.keys() == before.keys()
    assert all(batch[name] is before[name] for name in batch)
    second, again = loss_and_gradients(made, batch)
    assert second == first
    assert torch.equal(again, gradient)
    assert (made.epsilon_low, made.epsilon_high) == (made.args.epsilon, made.args.epsilon)
