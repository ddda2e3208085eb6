"""What the integration relies on is in this TRL; a change of it, tried on copies, is found, here or while training."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
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
from tiny_trl import PlainTrainer, generated, trainer
from trl_changes import BY_THE_TEST, IN_THE_FIRST_STEP, other_order
from trl_surface import ChangedTRL, check_class, check_loss

from d3s_kernels.integrations._transformers import RunWithBudget
from d3s_kernels.integrations.trl import D3STrainer, UnknownTRL
from d3s_kernels.selection.loss_weights import DENOMINATORS

SOURCE = Path(trls.__file__).read_text(encoding="utf-8")
LAYERS = D3STrainer.__mro__[: D3STrainer.__mro__.index(trls.GRPOTrainer)]  # the classes of ours


@pytest.fixture
def with_trls(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], None]]:
    """Puts a changed copy of TRL's trainer in the place of the class that ours overrides."""
    bases, name = D3STrainer.__bases__, "trl.trainer.grpo_trainer_changed"

    def changed(replaced: dict[str, str]) -> None:
        source = SOURCE
        for old, new in replaced.items():
            assert old in source, old
            source = source.replace(old, new)
        file = tmp_path / "grpo_trainer_changed.py"
        file.write_text(source, encoding="utf-8")
        module = sys.modules[name] = ModuleType(name)  # inspect finds a class's source through its module
        vars(module).update(__file__=str(file), __package__="trl.trainer")
        exec(compile(source, file, "exec"), vars(module))
        D3STrainer.__bases__ = (*bases[:-1], module.GRPOTrainer)

    yield changed
    D3STrainer.__bases__ = bases
    sys.modules.pop(name, None)


def made(saved: str, **options: Any) -> Any:
    return trainer(policy=saved, max_steps=1, max_completion_length=3, **{"loss_type": "grpo", **options})


def check_all(saved: str, **options: Any) -> None:
    check_class(D3STrainer, RunWithBudget)
    ours = made(saved, **options)
    surface.check_attributes(ours)
    check_loss(ours, surface.inherited(D3STrainer, RunWithBudget, "_compute_loss"))


def assert_refused(ours: Any, message: str) -> None:
    """In the first step: the optimizer has not moved."""
    with pytest.raises(UnknownTRL, match=message):
        ours.train()
    assert ours.state.global_step == 0


def test_this_trl_is_as_it_was_read(saved: str) -> None:
    """Every name of the table is there, and none is left over. If this fails, TRL has changed: see CONTRIBUTING."""
    check_all(saved)
    assert surface.read_by(trls.GRPOTrainer._compute_loss) == surface.LOSS_READS.keys() | set(
        surface.LOSS_MAY_READ.split()
    )
    relied = [entry.name for entry in (*surface.METHODS, *surface.FUNCTIONS, *surface.HEAD)]
    assert len(set(relied)) == len(relied)


@pytest.mark.parametrize("change", BY_THE_TEST)
def test_a_change_is_found_before_a_version_is_taken(change: str, with_trls: Callable, saved: str) -> None:
    replaced, message, options = BY_THE_TEST[change]
    with_trls(replaced)
    with pytest.raises((ChangedTRL, ValueError), match=message):
        check_all(saved, **options)


@pytest.mark.parametrize("change", IN_THE_FIRST_STEP)
def test_a_change_is_refused_in_the_first_step(change: str, with_trls: Callable, saved: str) -> None:
    replaced, message, options = IN_THE_FIRST_STEP[change]
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


def test_private_names_of_trl_are_all_in_the_table() -> None:
    """What the integration uses of TRL's trainer and modules beyond their public names."""
    listed = {entry.name.rpartition(".")[2] for entry in surface.METHODS} | surface.ATTRIBUTES.keys()
    own = {name for layer in LAYERS for name in vars(layer) if name not in vars(trls.GRPOTrainer)}
    used = {
        node.attr for layer in LAYERS for node in ast.walk(ast.parse(inspect.getsource(layer)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }  # fmt: skip
    own |= vars(trainer()).keys() - vars(trainer(PlainTrainer)).keys()
    of_transformers = {"add_callback", "args", "model", "state", "train", "train_dataset", "__init__"}
    assert listed & used
    assert used - own - of_transformers <= listed


@pytest.mark.parametrize("function", [entry.name for entry in surface.FUNCTIONS + surface.HEAD])
def test_a_function_that_changed_is_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = function.removesuffix(".forward").rpartition(".")
    holder = sys.modules[module]
    if not hasattr(holder, name):
        pytest.skip("this TRL has no such function")
    monkeypatch.setattr(holder, name, type("Renamed", (), {}) if function.endswith(".forward") else lambda other: None)
    with pytest.raises(ChangedTRL, match=function.replace(".", r"\.")):
        check_class(D3STrainer, RunWithBudget)


def test_a_head_that_models_do_not_look_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_utils, "add_fused_lm_head", lambda model: None)
    with pytest.raises(ChangedTRL, match=r"_ChunkedLogProbFunction.forward: .* does not look it up; it is replaced"):
        check_class(D3STrainer, RunWithBudget)


# ---- the selection is seen to act ------------------------------------------------------------------------------------


def unsloths(base: type, asks: bool) -> type:
    """Overrides what Unsloth's trainer does: its loss computes log-probabilities itself, and ignores scores."""

    class UnslothGRPOTrainer(base):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            if asks:
                self._get_per_token_logps_and_entropies(model, tokens, tokens, 1, None, False, True)
            logits = model(tokens).logits[:, -inputs["completion_ids"].shape[1] - 1 : -1]
            logprob = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
            return -(logprob * inputs["advantages"][:, None] * inputs["completion_mask"]).mean()

        if asks:

            def _get_per_token_logps_and_entropies(self, *_: Any) -> Any:
                return None, None

    return UnslothGRPOTrainer


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("above", [False, True])
def test_a_loss_of_another_trainer_is_refused_in_the_first_step(above: bool, asks: bool, with_trls: Callable) -> None:
    with_trls({})  # brings the bases back afterwards
    if above:  # a class of the user's, derived from ours
        ours = trainer(unsloths(D3STrainer, asks))
    else:
        D3STrainer.__bases__ = (*D3STrainer.__bases__[:-1], unsloths(trls.GRPOTrainer, asks))
        ours = trainer()
    message = r"no token was selected in this step\. .*; it may not come through .*UnslothGRPOTrainer\.compute_loss"
    assert_refused(ours, message)


def test_a_batch_that_is_not_ours_is_refused() -> None:
    class Theirs(D3STrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return trls.GRPOTrainer._generate_and_score_completions(self, inputs)

    message = r"no rollouts were chosen for this step\. .*; it may not come through test_trl_surface.*Theirs"
    assert_refused(trainer(Theirs), message)


def calling_ours(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A trainer whose loss is what ``change`` makes of ours, and a term of its own."""
    ours = trainer(max_steps=1)
    theirs = ours.compute_loss
    ours.compute_loss = lambda model, inputs, **more: (
        change(theirs(model, inputs)) + 1e-3 * model.get_output_embeddings().weight.square().sum()
    )
    return ours


def test_a_loss_that_calls_ours_and_takes_another_is_refused_and_one_that_adds_to_it_is_taken() -> None:
    message = r"no token was selected in this step\. .*; it may not come through test_trl_surface\.calling_ours\."
    assert_refused(calling_ours(torch.Tensor.detach), message)
    adds_to_ours = calling_ours(lambda loss: loss)
    adds_to_ours.train()
    assert adds_to_ours.state.global_step == 1
