"""What the integration relies on is in this TRL; a change of it, tried on copies, is found, here or while training."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import trl.trainer.grpo_trainer as trls
import trl.trainer.utils as trl_utils
import trl_surface as surface
from peft import LoraConfig
from tiny_trl import generated, trainer
from trl_surface import check_loss

from d3s_kernels.integrations.trl import D3STrainer, UnknownTRL
from d3s_kernels.selection.loss_weights import DENOMINATORS

SOURCE = Path(trls.__file__).read_text(encoding="utf-8")
REWARDS = "        # Merge extra_fields from"
# Text of TRL's source with what stands there instead, options of the trainer, and the error.
IN_THE_FIRST_STEP: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "an expected pass does not come": (
        {"if self.args.gradient_accumulation_steps % generate_every != 0 or (": "if False or ("}, {"num_iterations": 2},
        r"no pass came for old_per_token_logps, which the loss needs",
    ),
    "a pass is read before the rewards": (
        {REWARDS: f"        self._drift = old_per_token_logps.mean()\n{REWARDS}"}, {"num_iterations": 2},
        r"mean reads log-probabilities before the rollouts are chosen",
    ),
    "a pass fills another field": (
        {'output["old_per_token_logps"] = old': 'output["logps"] = old'}, {"num_iterations": 2},
        r"old_per_token_logps: the batch .* does not have there what the pass for it returned",
    ),
    "the loss asks for scores with another argument": (
        {"            compute_entropy=True,": "            1,\n            compute_entropy=True,"}, {},
        r"no token was selected in this step",
    ),
    "a new field in the batch": (
        {"        return output\n": '        output["weights"] = completion_mask\n        return output\n'}, {},
        r"its batch has weights, which is not known",
    ),
}  # fmt: skip


def other_order(source: str) -> dict[str, str]:
    """The reference's pass before that of the old policy."""
    start = source.index("            # Compute the per-token log probabilities for the reference model")
    reference = source[start : source.index(REWARDS)]
    first = "            # If the generation and optimization steps are misaligned"
    return {reference: "", first: reference + first}


@pytest.fixture
def with_trls() -> Iterator[Callable[[dict[str, str]], None]]:
    """Puts a changed copy of TRL's trainer in the place of the class that ours overrides."""
    bases = D3STrainer.__bases__

    def changed(replaced: dict[str, str]) -> None:
        source = SOURCE
        for old, new in replaced.items():
            assert old in source, old
            source = source.replace(old, new)
        module = ModuleType(trls.__name__)
        module.__package__ = "trl.trainer"
        exec(source, vars(module))
        D3STrainer.__bases__ = (*bases[:-1], module.GRPOTrainer)

    yield changed
    D3STrainer.__bases__ = bases


def made(saved: str, **options: Any) -> Any:
    return trainer(policy=saved, max_steps=1, max_completion_length=3, **{"loss_type": "grpo", **options})


def assert_refused(ours: Any, message: str) -> None:
    """In the first step: the optimizer has not moved."""
    with pytest.raises(UnknownTRL, match=message):
        ours.train()
    assert ours.state.global_step == 0


def test_the_loss_reads_what_it_read() -> None:
    """If this or the next test fails, TRL has changed: see CONTRIBUTING."""
    assert surface.read_by(trls.GRPOTrainer._compute_loss) == set(surface.LOSS_READS.split())


@pytest.mark.parametrize("name", surface.PARAMETERS)
def test_parameters_are_as_they_were(name: str) -> None:
    if name.startswith(surface.HEAD) and not hasattr(trl_utils, "_use_triton"):
        pytest.skip("before 1.16 TRL's head needs Triton")
    module, *path = name.split(".")
    found = functools.reduce(getattr, path, importlib.import_module(f"trl.trainer.{module}"))
    assert " ".join(inspect.signature(found).parameters) == surface.PARAMETERS[name]


@pytest.mark.parametrize("name", surface.DISTILLATION)
def test_parameters_of_distillation_are_as_they_were(name: str) -> None:
    """What the loss does with them, the tests of the trainers compare."""
    pytest.importorskip("trl", minversion="1.16")
    module, _, path = name.partition(":")
    found = functools.reduce(getattr, path.split("."), importlib.import_module(f"trl.{module}"))
    assert " ".join(inspect.signature(found).parameters) == surface.DISTILLATION[name]


def test_a_term_that_the_selection_does_not_cover_is_seen(with_trls: Callable, saved: str) -> None:
    """By its gradient: here, a KL term with another denominator."""
    with_trls({"self.beta * per_token_kl\n": "self.beta * per_token_kl * mask.sum(-1, keepdim=True)\n"})
    with pytest.raises(AssertionError, match="of tokens that are alike"):
        check_loss(made(saved, beta=1e-4), D3STrainer.__bases__[-1]._compute_loss)


@pytest.mark.parametrize("change", IN_THE_FIRST_STEP)
def test_a_change_is_refused_in_the_first_step(change: str, with_trls: Callable, saved: str) -> None:
    replaced, options, message = IN_THE_FIRST_STEP[change]
    with_trls(replaced)
    assert_refused(made(saved, **options), message)


@pytest.mark.parametrize("adapters", [False, True])
def test_passes_in_another_order_give_the_same_batch(adapters: bool, with_trls: Callable, saved: str) -> None:
    """A pass is told by the model that it scores with, or by the model's adapters."""
    options: dict[str, Any] = {"num_iterations": 2, "beta": 0.1}
    if adapters:
        options["peft_config"] = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    batches = []
    for replaced in ({}, other_order(SOURCE)):
        with_trls(replaced)
        torch.manual_seed(3)
        batches.append(generated(made(saved, **options)))
    expected, found = batches
    assert found.keys() == expected.keys() >= {"old_per_token_logps", "ref_per_token_logps"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert not torch.allclose(found["old_per_token_logps"], found["ref_per_token_logps"]) or not adapters


@pytest.mark.parametrize("loss", DENOMINATORS)
def test_every_loss_of_trl_is_taken(loss: str) -> None:
    """With all that TRL can add to it, and with micro-batches of any share of a generation batch."""
    ours = trainer(loss_type=loss, gradient_accumulation_steps=4, steps_per_generation=2, use_bias_correction_kl=True)
    metrics = copy.deepcopy(ours._metrics)
    added: dict[str, Any] = {
        "beta": 0.1, "_entropy_bonus_enabled": True, "use_adaptive_entropy": True, "aux_loss_enabled": True,
        "off_policy_mask_threshold": 0.5, "use_vllm": True,
    }  # fmt: skip
    before = dict(vars(ours))
    for level in ("token", "sequence"):
        for name, value in {"importance_sampling_level": level, **added}.items():
            setattr(ours, name, value)  # with those before
            check_loss(ours, trls.GRPOTrainer._compute_loss)
        vars(ours).update(before)
    assert ours._metrics == metrics  # nothing is logged
    assert ours._entropy_window_stats is None


# ---- the selection is seen to act ------------------------------------------------------------------------------------


class UnslothGRPOTrainer(trls.GRPOTrainer):
    """As Unsloth's trainer, computes log-probabilities in its loss, and ignores scores."""

    def _get_per_token_logps_and_entropies(self, *_: Any) -> Any:
        return None, None

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        self._get_per_token_logps_and_entropies(model, tokens, tokens, 1, None, False, True)
        logits = model(tokens).logits[:, -inputs["completion_ids"].shape[1] - 1 : -1]
        logprob = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        return -(logprob * inputs["advantages"][:, None] * inputs["completion_mask"]).mean()


def test_a_loss_of_another_trainer_is_refused_in_the_first_step(with_trls: Callable) -> None:
    with_trls({})  # brings the bases back afterwards
    D3STrainer.__bases__ = (*D3STrainer.__bases__[:-1], UnslothGRPOTrainer)
    message = r"no token was selected in this step\. .*; it may not come through .*UnslothGRPOTrainer\.compute_loss"
    assert_refused(trainer(), message)


def test_a_batch_that_is_not_ours_is_refused() -> None:
    class Theirs(D3STrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return trls.GRPOTrainer._generate_and_score_completions(self, inputs)

    message = r"no rollouts were chosen for this step\. .*; it may not come through test_trl_surface.*Theirs"
    assert_refused(trainer(Theirs), message)
