"""verl's fused LM head on ours: ``fused_kernel_options.impl_backend=d3s``, beside verl's own ``torch``.

Real: a small Llama with verl's patches, ``prepare_model_inputs`` and ``prepare_model_outputs`` of its FSDP engine, its
losses, and FSDP2 in two processes.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from head_ranks import bare_engine, make_model, outputs_of, sharded_step
from ranks import world
from tensordict import TensorDict
from test_verl_sampling_masks import FUSED, Sets, make_batch, micro_batch_of
from transformers import CohereForCausalLM, Gemma2ForCausalLM, GraniteForCausalLM, PhiForCausalLM
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding
from verl_losses import actor_config
from verl_world import make_trainer

from d3s_kernels.integrations.verl import head
from d3s_kernels.logprobs.logprob_entropy import linear_logprob_entropy

PACKED = pytest.mark.parametrize("packed", [True, False])


class Calls:
    """Counts the rows that our head computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        monkeypatch.setattr(head, "linear_logprob_entropy", self)

    def __call__(self, *arguments: Any, mask: Tensor | None = None, **options: Any) -> Any:
        self.rows.append(-1 if mask is None else int(mask.sum()))
        return linear_logprob_entropy(*arguments, mask=mask, **options)


def a_micro_batch(packed: bool, update: bool = False, **notes: Any) -> tuple[TensorDict, Any, list[Sets]]:
    """In an update some tokens are dropped; a row of padding has no tokens in the loss."""
    batch, sets = make_batch()
    mask = batch.batch["response_mask"]
    if update:
        mask *= torch.rand(mask.shape) < 0.5
        batch.batch["old_log_probs"] = -3 * torch.rand(mask.shape)
        batch.batch["advantages"] = torch.randn(mask.shape) * mask
        batch.batch["ref_log_prob"] = -3 * torch.rand(mask.shape)
    data = micro_batch_of(batch, use_remove_padding=packed, use_fused_kernels=True, **notes)
    return data, batch, sets


def patched(model: Any) -> None:
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="d3s")


@PACKED
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_as_verls_torch(packed: bool, tied: bool) -> None:
    """Results, and gradients of a loss of all of them."""
    data, batch, _ = a_micro_batch(packed)
    inside = batch.batch["attention_mask"][:, 4:].bool()
    weights, found = torch.randn(2, *inside.shape) * inside, []
    for backend in ("torch", "d3s"):
        model = make_model(backend, tie_word_embeddings=tied)
        results = outputs_of(backend, model, data)
        (weights[0] * results["log_probs"] + weights[1] * results["entropy"]).sum().backward()
        found.append((results, {name: value.grad for name, value in model.named_parameters()}))
    (theirs, of_theirs), (ours, of_ours) = found
    assert theirs.keys() == ours.keys() >= {"log_probs", "entropy"}
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name] * inside, values * inside, rtol=0, atol=1e-5)
    for name, gradient in of_theirs.items():
        torch.testing.assert_close(of_ours[name], gradient, rtol=1e-4, atol=1e-4)


@PACKED
def test_without_a_gradient_the_responses_are_computed(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old and reference log-probabilities: no prompts, and no rows of padding."""
    calls = Calls(monkeypatch)
    data, batch, _ = a_micro_batch(packed)
    inside = batch.batch["attention_mask"][:, 4:].bool()
    inside[-1] = False  # the row of padding
    with torch.no_grad():
        theirs, ours = (outputs_of(backend, make_model(backend), data) for backend in ("torch", "d3s"))
    assert calls.rows == [int(inside.sum())]
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values * inside, rtol=0, atol=1e-5)


LOSSES = ["vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "dro"]


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_an_update_computes_the_tokens_of_the_loss(loss_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, metrics and gradients are verl's, for every loss of verl's, with its KL loss and entropy bonus."""
    calls = Calls(monkeypatch)
    data, batch, _ = a_micro_batch(packed=loss_mode != "vanilla", update=True, dp_size=1, global_batch_size=8)
    mask = batch.batch["response_mask"].bool()
    tu.assign_non_tensor(data, batch_num_tokens=int(mask.sum()))
    actor = "actor_rollout_ref.actor"
    config = actor_config(
        f"{actor}.policy_loss.loss_mode={loss_mode}", f"{actor}.use_kl_loss=true", f"{actor}.entropy_coeff=0.1",
        f"{actor}.policy_loss.dro_beta=0.1",
    )  # fmt: skip
    found = []
    for backend in ("torch", "d3s"):
        model = make_model(backend)
        results = outputs_of(backend, model, data, padded=False)
        torch.manual_seed(0)  # clip_cov draws
        loss, metrics = ppo_loss(config, results, data)
        loss.backward()
        numbers = {name: one.aggregate() if isinstance(one, Metric) else one for name, one in metrics.items()}
        found.append((numbers | {"loss": float(loss.detach())}, dict(model.named_parameters())))
    (theirs, of_theirs), (ours, of_ours) = found
    assert calls.rows == [int(mask.sum())]
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for name, value in of_theirs.items():
        torch.testing.assert_close(of_ours[name].grad, value.grad, rtol=1e-4, atol=1e-6)
    outside = batch.batch["attention_mask"][:, 4:].bool() & ~mask
    log_probs = no_padding_2_padding(results["log_probs"], data)
    torch.testing.assert_close(log_probs[outside], batch.batch["old_log_probs"][outside])


OTHER_LOSSES: dict[str, Any] = {
    "supervised fine-tuning, without responses": lambda data: data.exclude("responses"),
    "a loss without old log-probabilities": lambda data: data.exclude("old_log_probs"),
    "a caller that wants the outputs": lambda data: tu.assign_non_tensor(data, return_model_output=True),
}


@pytest.mark.parametrize("what", OTHER_LOSSES)
def test_where_no_policy_is_trained_everything_is_computed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    data, _, _ = a_micro_batch(packed=True, update=True)
    results = []
    for backend in ("torch", "d3s"):
        engine, model = bare_engine(backend), make_model(backend)
        rows = OTHER_LOSSES[what](data)
        rows = data if rows is None else rows
        inputs, arguments = engine.prepare_model_inputs(rows)
        found = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, rows, None)
        results.append(found["log_probs"].values())
    assert calls.rows == [-1]
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_an_update_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have some: there is a backward, with gradients of 0."""
    calls = Calls(monkeypatch)
    data, _, _ = a_micro_batch(packed=True, update=True)
    data["response_mask"].zero_()
    model = make_model("d3s")
    outputs_of("d3s", model, data)["log_probs"].sum().backward()
    assert calls.rows == [0]
    assert not any(value.grad.any() for value in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sequence_parallel_ranks_have_parts_of_the_mask(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, rows = torch.rand(21) < 0.5, 24 // ranks
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(head, "get_ulysses_sequence_parallel_rank", lambda rank=rank: rank)
        engine = SimpleNamespace(use_ulysses_sp=ranks > 1, ulysses_sequence_parallel_size=ranks)
        parts.append(head._of_this_rank(mask, rows, engine))
    assert torch.cat(parts).tolist() == [*mask.tolist(), False, False, False]


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"kind": PhiForCausalLM}])
def test_two_processes_that_share_the_weights(options: dict[str, Any]) -> None:
    """As verl shards the model with FSDP2. A gradient is the mean of those of the two batches."""
    made = [a_micro_batch(packed=True, update=update) for update in (True, False)]
    batches = [data for data, _, _ in made]
    weights = [torch.randn(8, 6) * batch.batch["response_mask"] for _, batch, _ in made]
    ours = world(2).run(sharded_step, batches, weights, options)
    model = make_model("d3s" if "kind" in options else "torch", **options)  # verl's has no bias
    for data, weight, (found, _) in zip(batches, weights, ours, strict=True):
        expected = outputs_of("torch", model, data)["log_probs"]
        (expected * weight).sum().backward()
        torch.testing.assert_close(found[weight != 0], expected[weight != 0], rtol=0, atol=1e-5)
    for name, value in model.named_parameters():
        for _, gradients in ours:
            torch.testing.assert_close(gradients[name], value.grad / 2, rtol=1e-4, atol=1e-5)


# A scale, a soft cap, both, and a bias. The weights are enlarged so that a cap changes logits.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Granite": (GraniteForCausalLM, {"logits_scaling": 3.0}),
    "Cohere": (CohereForCausalLM, {"logit_scale": 0.25}),
    "Gemma 2": (Gemma2ForCausalLM, {"final_logit_softcapping": 2.0, "head_dim": 8}),
    "Phi": (PhiForCausalLM, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_do_more_than_multiply(kind: str) -> None:
    """As verl without fused kernels, whose logits are the model's own; verl's fused heads take no such model."""
    data, batch, _ = a_micro_batch(packed=True)
    mask, found = batch.batch["response_mask"].bool(), []
    weights = torch.randn(2, *mask.shape) * mask
    for backend in (None, "d3s"):
        tu.assign_non_tensor(data, use_fused_kernels=backend is not None)
        model = make_model(backend, KINDS[kind][0], **KINDS[kind][1])
        if model.lm_head.bias is not None:
            torch.manual_seed(6)
            model.lm_head.bias.data.normal_()
        results = outputs_of("d3s", model, data)
        (weights[0] * results["log_probs"] + weights[1] * results["entropy"]).sum().backward()
        found.append((results, {name: value.grad for name, value in model.named_parameters()}))
    (theirs, of_theirs), (ours, of_ours) = found
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name] * mask, values * mask, rtol=0, atol=2e-5)
    for name, gradient in of_theirs.items():
        torch.testing.assert_close(of_ours[name], gradient, rtol=1e-4, atol=1e-4)


def test_models_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"whose logits have the scale 1 and .* says 0\.5 and None; takes a model"):
        make_model("d3s", logit_scale=0.5)  # Llama ignores it
    model = make_model(None)
    del model.lm_head
    with pytest.raises(ValueError, match=r"impl_backend: got 'd3s' for Model.*get_output_embeddings\(\) is missing"):
        patched(model)


def test_a_model_that_does_more_than_its_configuration_says() -> None:
    model = make_model(None)
    model.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with pytest.raises(ValueError, match=r"for Model.*own logits differ by up to"):
        patched(model)
    model = make_model(None)
    model.model.forward = None
    with pytest.warns(UserWarning, match="goes by the configuration of Model alone.*could not be tried"):
        patched(model)


def test_an_adapter_of_the_head_is_refused() -> None:
    peft = pytest.importorskip("peft")
    engine = bare_engine("d3s")
    of_verl = {"lora_rank": 2, "lora_alpha": 4, "target_parameters": None, "exclude_modules": None}

    def adapted(*targets: str) -> Any:
        engine.model_config = SimpleNamespace(**vars(engine.model_config) | of_verl | {"target_modules": [*targets]})
        return engine._build_lora_module(make_model("d3s"))

    assert isinstance(adapted("q_proj"), peft.PeftModel)
    with pytest.raises(ValueError, match=r"impl_backend: got 'd3s'\. lm_head: got a peft.*, an adapter"):
        adapted("q_proj", "lm_head")


def test_an_engine_whose_model_does_not_call_the_head() -> None:
    data, _, _ = a_micro_batch(packed=True)
    with pytest.raises(RuntimeError, match="impl_backend: got 'd3s', but the model has not called this head"):
        outputs_of("d3s", make_model("torch"), data)
    assert head._READ.get() is None


LOGITS = "actor_rollout_ref.model.fused_kernel_options.logits_dtype"
OURS_BESIDE = rf"{LOGITS}: got 'auto'; takes actor_rollout_ref\.model\.use_fused_kernels=true and .*=d3s beside it, sin"


@pytest.mark.parametrize("option", [{"logits_dtype": "auto", "keep_logits_bytes": 9}, {}])
def test_the_options_of_its_logits_reach_it(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def record(*arguments: Any, **options: Any) -> Any:
        seen.append((options["logits_dtype"], options["keep_logits_bytes"]))
        return linear_logprob_entropy(*arguments, **options)

    monkeypatch.setattr(head, "linear_logprob_entropy", record)
    outputs_of("d3s", make_model("d3s").bfloat16(), a_micro_batch(packed=True)[0], **option)
    assert seen == [(torch.bfloat16, 9) if option else (torch.float32, 0)]


def test_a_dtype_of_logits_that_is_unknown_or_without_use_is_refused() -> None:
    data, _, _ = a_micro_batch(packed=True)
    with pytest.raises(ValueError, match=f"{LOGITS}: got 'bfloat16'; takes 'float32' or 'auto'"):
        bare_engine("d3s", logits_dtype="bfloat16").prepare_model_inputs(data)
    with pytest.raises(ValueError, match=OURS_BESIDE):
        bare_engine("torch", logits_dtype="auto").prepare_model_inputs(data)
    tu.assign_non_tensor(data, use_fused_kernels=False)
    with pytest.raises(ValueError, match=OURS_BESIDE):
        bare_engine("d3s", logits_dtype="auto").prepare_model_inputs(data)
    bare_engine("torch").prepare_model_inputs(data)


def test_the_trainer_mode_looks_at_the_dtype_of_logits() -> None:
    """test_verl_sampling_masks.py has all that the head refuses."""
    pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")
    make_trainer(*FUSED, f"+{LOGITS}=auto")
    with pytest.raises(ValueError, match=f"{LOGITS}: got 'half'; takes 'float32' or 'auto'"):
        make_trainer(*FUSED, f"+{LOGITS}=half")
    with pytest.raises(ValueError, match=OURS_BESIDE):
        make_trainer(f"+{LOGITS}=auto")
