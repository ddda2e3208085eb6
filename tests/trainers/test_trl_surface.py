"""What the integration relies on is in this TRL; a change of it is found, by a test or while training.

Tried on copies of TRL's trainer, each with one change.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("trl")
import torch
import trl.trainer.grpo_trainer as trls
import trl.trainer.utils as trl_utils
from tiny_trl import PlainTrainer, generated, trainer
from trl_changes import BY_THE_TEST, IN_THE_FIRST_STEP, other_order
from trl_surface import (
    ATTRIBUTES,
    FUNCTIONS,
    HEAD,
    LOSS_MAY_READ,
    LOSS_READS,
    METHODS,
    ChangedTRL,
    check_attributes,
    check_class,
    check_loss,
    inherited,
    read_by,
)

from d3s_kernels.denominators import DENOMINATORS
from d3s_kernels.integrations.trl import D3STrainer, UnknownTRL
from d3s_kernels.integrations.trl.scoring import Scoring

SOURCE = Path(trls.__file__).read_text(encoding="utf-8")
LAYERS = D3STrainer.__mro__[: D3STrainer.__mro__.index(trls.GRPOTrainer)]  # the classes of ours, down to Scoring


@pytest.fixture
def with_trls(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], None]]:
    """Puts a changed copy of TRL's trainer in the place of the class that ours overrides."""
    bases, name = Scoring.__bases__, "trl.trainer.grpo_trainer_changed"

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
        Scoring.__bases__ = (*bases[:-1], module.GRPOTrainer)

    yield changed
    Scoring.__bases__ = bases
    sys.modules.pop(name, None)


def made(saved: str, **options: Any) -> Any:
    return trainer(policy=saved, max_steps=1, max_completion_length=3, **{"loss_type": "grpo", **options})


def check_all(saved: str, **options: Any) -> None:
    check_class(D3STrainer, Scoring)
    ours = made(saved, **options)
    check_attributes(ours)
    check_loss(ours, inherited(D3STrainer, Scoring, "_compute_loss"))


def test_this_trl_is_as_it_was_read(saved: str) -> None:
    check_all(saved)


@pytest.mark.parametrize("change", BY_THE_TEST)
def test_a_change_is_found_before_a_version_is_taken(change: str, with_trls: Callable, saved: str) -> None:
    replaced, message, options = BY_THE_TEST[change]
    with_trls(replaced)
    with pytest.raises((ChangedTRL, ValueError), match=message) as error:
        check_all(saved, **options)
    print(f"{change}: {type(error.value).__name__}: {error.value}")


@pytest.mark.parametrize("change", IN_THE_FIRST_STEP)
def test_a_change_is_refused_in_the_first_step(change: str, with_trls: Callable, saved: str) -> None:
    replaced, message, options = IN_THE_FIRST_STEP[change]
    with_trls(replaced)
    ours = made(saved, **options)
    with pytest.raises(UnknownTRL, match=message) as error:
        ours.train()
    assert ours.state.global_step == 0  # the optimizer has not moved
    print(f"{change}: {type(error.value).__name__}: {error.value}")


@pytest.mark.parametrize("adapters", [False, True])
def test_passes_in_another_order_give_the_same_batch(adapters: bool, with_trls: Callable, saved: str) -> None:
    """A pass is told by the model that it scores with, or by the model's adapters."""
    options: dict[str, Any] = {"num_iterations": 2, "beta": 0.1}
    if adapters:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
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
    metrics = {mode: dict(values) for mode, values in ours._metrics.items()}
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
    assert {mode: dict(values) for mode, values in ours._metrics.items()} == metrics  # nothing is logged
    assert ours._entropy_window_stats is None


def test_the_table_is_of_this_trl() -> None:
    """Every name of the table is there, and none is left over. If this fails, TRL has changed: see CONTRIBUTING."""
    check_class(D3STrainer, Scoring)
    assert read_by(trls.GRPOTrainer._compute_loss) == LOSS_READS.keys() | set(LOSS_MAY_READ.split())
    ours = trainer()
    assert [name for name in ATTRIBUTES if not hasattr(ours, name)] == []
    relied = [entry.name for entry in (*METHODS, *FUNCTIONS, *HEAD)]
    assert len(set(relied)) == len(relied)


def test_private_names_of_trl_are_all_in_the_table() -> None:
    """What the integration uses of TRL's trainer and modules beyond their public names."""
    listed = {entry.name.rpartition(".")[2] for entry in METHODS} | ATTRIBUTES.keys()
    own = {name for layer in LAYERS for name in vars(layer) if name not in vars(trls.GRPOTrainer)}
    used = {
        node.attr for layer in LAYERS for node in ast.walk(ast.parse(inspect.getsource(layer)))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "super()")
    }  # fmt: skip
    own |= vars(trainer()).keys() - vars(trainer(PlainTrainer)).keys()
    of_transformers = {"args", "model", "state", "train", "train_dataset", "__init__"}
    assert listed & used
    assert used - own - of_transformers <= listed


@pytest.mark.parametrize("function", FUNCTIONS + HEAD, ids=lambda entry: entry.name)
def test_a_function_that_changed_is_found(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = function.name.removesuffix(".forward").rpartition(".")
    holder = sys.modules[module]
    if not hasattr(holder, name):
        pytest.skip("this TRL has no such function")
    monkeypatch.setattr(holder, name, lambda other: None)
    if function.name.endswith(".forward"):
        monkeypatch.setattr(holder, name, type("Renamed", (), {}))
    with pytest.raises(ChangedTRL, match=function.name.replace(".", r"\.")) as error:
        check_class(D3STrainer, Scoring)
    print(f"{function.name}: {error.value}")


def test_a_head_that_models_do_not_look_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_utils, "add_fused_lm_head", lambda model: None)
    with pytest.raises(ChangedTRL, match=r"_ChunkedLogProbFunction.forward: .* does not look it up; it is replaced"):
        check_class(D3STrainer, Scoring)


# ---- the selection is seen to act ------------------------------------------------------------------------------------

# Overrides what Unsloth's trainer does: its loss asks for no scores and computes log-probabilities itself.
STAND_IN = """
import torch

class {name}(Base):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        {scores}
        logits = model(tokens).logits[:, -inputs["completion_ids"].shape[1] - 1 : -1]
        logprob = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        return -(logprob * inputs["advantages"][:, None] * inputs["completion_mask"]).mean()
"""
ITS_SCORES = """
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False,
        compute_efficient=False, *args, **kwargs
    ):
        return None, None
"""
ASKS = "self._get_per_token_logps_and_entropies(model, tokens, tokens, 1, None, False, True)"


def stand_in(base: type, folder: Path, name: str, source: str) -> type:
    """A class whose module was written to a file, as Unsloth writes it."""
    file = folder / "UnslothGRPOTrainer.py"
    file.write_text(source, encoding="utf-8")
    module: dict[str, Any] = {"Base": base, "__name__": "UnslothGRPOTrainer"}
    exec(compile(source, file, "exec"), module)
    found: type = module[name]
    return found


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("above", [False, True])
def test_a_loss_of_another_trainer_is_refused_in_the_first_step(
    above: bool, scores: bool, tmp_path: Path, with_trls: Callable
) -> None:
    with_trls({})  # brings the bases back afterwards
    name = "_UnslothGRPOTrainer"
    source = STAND_IN.format(name=name, scores=ASKS if scores else "pass") + (ITS_SCORES if scores else "")
    if above:  # a class of the user's, derived from ours
        ours = trainer(stand_in(D3STrainer, tmp_path, name, source))
    else:
        Scoring.__bases__ = (*Scoring.__bases__[:-1], stand_in(trls.GRPOTrainer, tmp_path, name, source))
        ours = trainer()
    message = rf"no token was selected in this step\. .*; it may not come through .*{name}\.compute_loss"
    with pytest.raises(UnknownTRL, match=message):
        ours.train()
    assert ours.state.global_step == 0


def test_a_batch_that_is_not_ours_is_refused() -> None:
    class Theirs(D3STrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return trls.GRPOTrainer._generate_and_score_completions(self, inputs)

    message = r"no rollouts were chosen for this step\. .*; it may not come through test_trl_surface.*Theirs"
    with pytest.raises(UnknownTRL, match=message):
        trainer(Theirs).train()


def calling_ours(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A trainer whose loss is what ``change`` makes of ours, and a term of its own."""
    ours = trainer(max_steps=1)
    theirs = ours.compute_loss
    ours.compute_loss = lambda model, inputs, **more: (
        change(theirs(model, inputs)) + 1e-3 * model.get_output_embeddings().weight.square().sum()
    )
    return ours


def test_a_loss_that_calls_ours_and_takes_another_is_refused() -> None:
    message = r"no token was selected in this step\. .*; it may not come through test_trl_surface\.calling_ours\."
    with pytest.raises(UnknownTRL, match=message):
        calling_ours(torch.Tensor.detach).train()


def test_a_loss_that_adds_to_ours_is_taken() -> None:
    ours = calling_ours(lambda loss: loss)
    ours.train()
    assert ours.state.global_step == 1
