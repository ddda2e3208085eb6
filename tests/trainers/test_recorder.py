"""The recorder in transformers' generate: what it records is what was sampled from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from peft import LoraConfig, get_peft_model
from tiny_trl import EOS, PAD, model, run_example
from transformers import TemperatureLogitsWarper

from d3s_kernels.support.recorder import Recorder, recording

ROWS, STEPS = 4, 70  # more steps than are held at once
PROMPTS = torch.tensor([[PAD, 3], [4, 5], [6, 7], [8, 9]])
INPUTS = {"input_ids": PROMPTS, "attention_mask": (PROMPTS != PAD).long()}


def generated(policy: Any = None, max_kept: int = 512, **options: Any) -> tuple[Recorder, list[list[int]], Any]:
    """The recorder, the completions, and all that transformers returns."""
    policy = model() if policy is None else policy
    everything = {"do_sample": True, "max_new_tokens": STEPS, "output_scores": True, "output_logits": True}
    with recording(policy, max_kept) as recorder:
        found = policy.generate(**INPUTS, return_dict_in_generate=True, **everything | options)
    return recorder, until_the_end(found.sequences), found


def until_the_end(tokens: Tensor) -> list[list[int]]:
    """The completions as TRL cuts them."""
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in tokens[:, 2:].tolist()]


def test_example() -> None:
    run_example(recording, model=model(), prompts=INPUTS, completions=until_the_end)


def test_the_temperatures_of_several_warpers_multiply() -> None:
    recorder, scores = Recorder(16), torch.randn(1, 9)
    for processor in recorder.around([TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(3.0)]):
        scores = processor(torch.zeros(1, 1, dtype=torch.long), scores)
    log_mass = recorder.recorded([[4]]).log_mass
    torch.testing.assert_close(log_mass, torch.zeros_like(log_mass))  # no token was left out


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}),
        (torch.float32, {"temperature": 1.5, "min_p": 0.05, "top_k": None, "max_new_tokens": 8}),
        (torch.float32, {"temperature": 1.0, "top_k": 1, "max_new_tokens": 8}),
        (torch.float32, {"temperature": 0.7, "top_k": 5, "suppress_tokens": [2, 3], "max_new_tokens": 8}),
        (torch.float32, {"temperature": 2.0, "top_k": 60, "max_new_tokens": 64}),
        (torch.bfloat16, {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "max_new_tokens": 8}),
    ],
    ids=str,
)
def test_the_sets_are_the_scores_that_were_sampled_from(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A generation in half precision is recorded in float32."""
    policy = model().to(dtype)
    torch.manual_seed(5)
    recorder, completions, found = generated(policy, **options)
    recorded = recorder.recorded(completions)
    assert (recorded.sets.dtype, recorded.logprob.dtype) == (torch.int32, torch.float32)
    for row, tokens in enumerate(completions):
        for step, token in enumerate(tokens):
            scores, logits = found.scores[step][row], found.logits[step][row].float()
            kept = (scores > -torch.inf).nonzero().flatten().tolist()
            ours = recorded.sets[row, step]
            assert sorted(ours[ours >= 0].tolist()) == kept
            assert token in kept
            mass = torch.softmax(logits / options["temperature"], 0)[kept].sum().log()
            torch.testing.assert_close(recorded.logprob[row, step], scores.log_softmax(0)[token])
            torch.testing.assert_close(recorded.log_mass[row, step], mass)
        assert (recorded.sets[row, len(tokens) :] == -1).all()
        assert (recorded.logprob[row, len(tokens) :] == 0).all()
    assert recorded.sets.shape[:2] == recorded.logprob.shape == (ROWS, max(map(len, completions)))
    assert recorded.sets.shape[2] == int((recorded.sets >= 0).sum(2).max())  # no column for nothing
    wider = recorded.in_columns(80)
    assert wider.sets.shape[:2] == wider.log_mass.shape == wider.logprob.shape == (ROWS, 80)
    assert (wider.sets[:, -1] == -1).all()


def test_a_model_with_adapters_is_recorded() -> None:
    policy = get_peft_model(model(), LoraConfig(target_modules=["q_proj"]))
    recorder, completions, _ = generated(policy, top_k=3, max_new_tokens=4)
    assert recorder.recorded(completions).sets.shape[2] == 3
    base = policy.get_base_model()
    assert "_get_logits_processor" not in vars(base), "the model is as it was"
    base._get_logits_processor = own = base._get_logits_processor  # somebody else's
    with recording(policy, 8):
        assert base._get_logits_processor != own
    assert vars(base)["_get_logits_processor"] is own


CHANGING: dict[str, dict[str, Any]] = {
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.2},
    "SequenceBiasLogitsProcessor": {"sequence_bias": {(4,): 2.0}},
    "function": {"logits_processor": [lambda tokens, scores: scores]},
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_scores_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"generate: it changes scores by {name}, which the sets"):
        generated(top_k=5, max_new_tokens=2, **CHANGING[name])


def test_completions_of_another_generation_are_refused() -> None:
    recorder, completions, _ = generated(top_k=1, max_new_tokens=3)
    for other in (completions[:2], [[*completions[0], 5, 6, 7], *completions[1:]], []):
        with pytest.raises(RuntimeError, match="completions: 3 steps of generation were recorded for"):
            recorder.recorded(other)
    with pytest.raises(RuntimeError, match="0 steps of generation were recorded for 4 completions"):
        Recorder(4).recorded(completions)
    recorder, completions, _ = generated(top_k=1, max_new_tokens=3)
    recorder._drawn[0] = torch.full_like(recorder._drawn[0], -torch.inf)
    with pytest.raises(RuntimeError, match="completions: token 0 of rollout 0 could not be drawn from its set"):
        recorder.recorded(completions)
