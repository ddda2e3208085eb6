"""sampling_mask in a training run: log-probabilities and entropies are those of the distribution that was sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
import trl.trainer.utils as trl_utils
from batches import generation_batch, gradients, logits_of, looked_at, loss_and_gradients, with_sets
from peft import LoraConfig
from tiny_trl import GROUP, VOCABULARY, arguments, model, trainer

from d3s_kernels.integrations.trl.batch import SETS
from d3s_kernels.integrations.trl.head import OurHead, ScoredModel
from d3s_kernels.selection.metrics import NAMES, PADDING_NAMES, SAMPLING_NAMES

CUT: dict[str, Any] = {"top_p": 0.9, "top_k": 50, "temperature": 0.8}
ON = CUT | {"sampling_mask": True}


def by_hand(policy: Any, batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the sets, from all logits in float64."""
    logits = logits_of(policy, batch) / temperature
    members = (batch[SETS].unsqueeze(3) == torch.arange(logits.shape[2])).any(2)
    members |= ~members.any(2, keepdim=True)  # padding, which is not looked at
    logp = logits.masked_fill(~members, -torch.inf).log_softmax(2)
    entropy = -(logp.exp() * logp.masked_fill(~members, 0)).sum(2)
    return logp.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2), entropy


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2, "beta": 0.1},
        {"beta": 0.1, "peft_config": LoraConfig(target_modules=["q_proj"])},
        {"entropy_from": "rollout"},
        {"steps_per_generation": 4, "importance_sampling_level": "entropy_group"},
        {"generation_kwargs": {"top_p": 0.7, "min_p": 0.02}, "off_policy_mask_threshold": 1.0, "pad_to_multiple_of": 8},
    ],
    ids=["old, reference and policy", "an adapter", "tokens before", "entropy groups", "other cuts, and padding"],
)
def test_all_scores_of_a_run_are_those_of_the_sets(
    options: dict[str, Any], saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first update these are the sampler's own."""
    made, frozen, seen = trainer(policy=saved, max_steps=2, **ON | options), model(), []

    def see(loss: Any, *_: Any) -> None:
        seen.append((loss.inputs, *(part.detach().clone() for part in loss.scores[:2])))

    looked_at(monkeypatch, made, "_score_for_loss", see)
    made.train()
    batch, logprob, entropy = seen[0]
    mask, (expected, of_set) = batch["completion_mask"].bool(), by_hand(frozen, batch, 0.8)
    for name in {"sampling_per_token_logps", "old_per_token_logps", "ref_per_token_logps"} & batch.keys():
        if name != "old_per_token_logps" or "entropy_group" not in options.values():  # as_espo moves the old ones
            assert_close(batch[name][mask], expected[mask])
    if "entropy_from" in options:  # tokens without a gradient are not scored in the update
        mask = batch["d3s_kept"]
    assert_close(logprob[mask], expected[mask])
    assert_close(entropy[mask], of_set[mask])
    assert ("beta" in options) == ("ref_per_token_logps" in batch)
    (row, *_) = [row for row in made.state.log_history if "loss" in row]
    assert {name for name in row if name.startswith("d3s/")} == {
        *NAMES, *PADDING_NAMES, *SAMPLING_NAMES, "d3s/num_tokens_kept", "d3s/updates_without_tokens"
    } - {"d3s/flops_saved"}  # fmt: skip
    assert 1 <= row["d3s/set_size_mean"] <= row["d3s/set_size_p99"] <= 50
    assert 0 <= row["d3s/set_singletons"] < 1
    assert 0.5 < row["d3s/set_mass"] < 1
    assert 1 - row["d3s/set_size_mean"] / VOCABULARY <= row["d3s/set_head_flops_saved"] < 1


# ---- where scores are computed ---------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_sets() -> None:
    made = trainer(tokens=1.0, loss_type="grpo", **ON)
    batch = with_sets(generation_batch(3, GROUP))
    _, found = loss_and_gradients(made, batch)
    mask = batch["completion_mask"]
    logprob, _ = by_hand(made.model, batch, 0.8)
    of_rows = (logprob * mask).sum(1) / mask.sum(1)
    # In the first update a ratio is 1, so the loss has the gradient of -advantage x log-probability.
    (-(of_rows * batch["advantages"]).mean() / made.args.gradient_accumulation_steps).backward()
    expected = gradients(made)
    assert expected.norm() > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_head_that_can_have_no_sets_says_why() -> None:
    sharded = model(tie_word_embeddings=False)
    weight = sharded.get_output_embeddings().weight
    weight.ds_id = 0  # as ZeRO-3 marks a parameter
    hidden, labels = torch.zeros(1, 1, 16), torch.tensor([[2, 3]])

    def head(labels: Tensor) -> Any:
        return trl_utils._ChunkedLogProbFunction.apply(hidden[0], weight, None, labels[0, 1:], 1.0, 16)

    message = r"sampling_mask: got True: .*, because ZeRO-3 takes .*; and TRL"
    with pytest.raises(RuntimeError, match=message):
        ScoredModel(head, OurHead(), torch.tensor([[[3, 4]]], dtype=torch.int32))(labels=labels)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_leaves_tokens_out_is_taken() -> None:
    for options in ({"top_k": 5}, {"min_p": 0.1}, {"generation_kwargs": {"typical_p": 0.9, "max_time": 60.0}}):
        assert arguments(sampling_mask=True, **options).max_kept == 512
    assert not arguments(repetition_penalty=1.1).sampling_mask  # the default refuses nothing


def test_tokens_of_other_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_func: got one with sampling_mask; takes none: tokens of other turns"):
        trainer(rollout_func=lambda prompts, trainer: {}, **ON)


def test_a_run_whose_sets_are_too_large_stops_and_names_the_token() -> None:
    message = r"max_kept: got 4, but token 0 of rollout 0 was drawn from 6 tokens; takes"
    with pytest.raises(ValueError, match=message):
        trainer(sampling_mask=True, top_k=6, max_kept=4).train()
    made = trainer(**ON)
    with pytest.raises(RuntimeError, match="sampling_mask: no sets were recorded; takes completions of _generate_sin"):
        made._add_sets(generation_batch(1), None)
