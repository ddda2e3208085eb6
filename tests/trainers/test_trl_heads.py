"""The LM head in TRL's model has the scores and gradients of the model's own logits, or is left to TRL or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import test_lm_head_of_models as lm_heads
import torch
from test_lm_head_of_models import TEMPERATURE, with_peft
from torch import Tensor, nn

pytest.importorskip("trl")
import peft
import tiny_trl
import trl.trainer.utils as trl_utils
from batches import micro_batch
from tiny_trl import trainer

from d3s_kernels import UnsupportedHead
from d3s_kernels._lm_head.from_model import read_head
from d3s_kernels.integrations._head_options import HeadOptions
from d3s_kernels.integrations.trl import head as our_head
from d3s_kernels.integrations.trl.head import OurHead, check_head, d3s_head

# Before 1.16, TRL has only Triton kernels, which need a GPU.
needs_trls = pytest.mark.skipif(not hasattr(trl_utils, "_use_triton"), reason="this TRL has no head for CPUs")
CAPPED, SCALED = "Gemma 2: a soft cap", "Cohere: multiplies"
MODELS: dict[str, Callable[[], Any]] = {
    **{name: lm_heads.MODELS[name] for name in ("Qwen2, tied", "Qwen2, untied", CAPPED, SCALED, "Phi: a bias")},
    "MiniCPM3: divides its hidden states": lm_heads.REFUSED["MiniCPM3"][0],
}


def with_fused_head(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    made = MODELS[name]().to(dtype)
    trl_utils.add_fused_lm_head(made, temperature=TEMPERATURE, outputs=("log_probs", "entropy"), **options)
    return made


def draw_labels() -> Tensor:
    labels = torch.randint(2, lm_heads.SHAPE["vocab_size"], (3, 9))
    labels[:, :4] = labels[0, 6:] = -100
    return labels


def fused(model: Any, labels: Tensor, ours: bool) -> tuple[Tensor, Tensor]:
    with d3s_head() if ours else nullcontext():
        output = model(labels.clamp(min=0), labels=labels, fused_lm_head=True)
    return output.log_probs, output.entropy


def with_gradient(model: Any, scores: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and the gradient of a loss of both."""
    logprob, entropy = scores
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((logprob * 2 - entropy).sum(), parameters, allow_unused=True, materialize_grads=True)
    return logprob.detach(), entropy.detach(), torch.cat([grad.flatten().float() for grad in found])


# ---- its scores and gradients ----------------------------------------------------------------------------------------


def adapted(name: str, **config: Any) -> Any:
    return with_peft(with_fused_head(name), **{"target_modules": ["q_proj"], **config})


def with_float32_head() -> Any:
    model = with_fused_head("Qwen2, untied", torch.bfloat16, cast_lm_head_to_fp32=True)
    model.lm_head.float()
    return model


EXACT: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: with_fused_head(name) for name in MODELS},
    "modules_to_save": lambda: adapted("Qwen2, untied", modules_to_save=["lm_head"]),
    "adapters beside a tied head": lambda: adapted("Qwen2, tied", target_modules=["q_proj", "v_proj"]),
    "modules_to_save of a tied head": lambda: adapted("Qwen2, tied", modules_to_save=["lm_head"]),
}
ROUNDED: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: with_fused_head("Qwen2, untied", torch.bfloat16),
    "float16": lambda: with_fused_head("Qwen2, untied", torch.float16),
    "bfloat16, capped": lambda: with_fused_head(CAPPED, torch.bfloat16),
    "float32 over bfloat16": with_float32_head,
}


def of_logits(model: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """By the model's own forward."""
    tokens, valid = labels.clamp(min=0), labels[:, 1:] != -100
    logprob, entropy = lm_heads.of_logits(model(tokens).logits[:, :-1], tokens[:, 1:])
    return logprob * valid, entropy * valid


@pytest.mark.parametrize("name", EXACT)
def test_a_head_is_that_of_the_models_own_logits(name: str) -> None:
    model, labels = EXACT[name](), draw_labels()
    check_head(model)
    ours, expected = (with_gradient(model, scores) for scores in (fused(model, labels, True), of_logits(model, labels)))
    theirs = with_gradient(model, fused(model, labels, False)) if hasattr(trl_utils, "_use_triton") else ours
    assert expected[2].norm() > 0
    for mine, other, best in zip(ours, theirs, expected, strict=True):
        torch.testing.assert_close(mine, best, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@needs_trls
@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_head_is_as_close_as_trls(name: str) -> None:
    """Over several models, since in one model a few roundings decide which of the two is closer."""
    results: list[list[list[torch.Tensor]]] = [[], [], []]
    for _ in range(6):
        model, labels = ROUNDED[name](), draw_labels()
        check_head(model)
        exact = copy.deepcopy(model).float()
        exact.forward = type(exact).forward.__get__(exact)
        for of_models, run in zip(results, ((model, True), (model, False), (exact, None)), strict=True):
            of, ours = run
            of_models.append(with_gradient(of, of_logits(of, labels) if ours is None else fused(of, labels, ours)))
    for each in zip(*(zip(*of_models, strict=True) for of_models in results), strict=True):
        mine, other, expected = map(torch.stack, each)
        assert (mine - expected).norm() <= 1.5 * (other - expected).norm() + 1e-4 * expected.norm()


@needs_trls
def test_a_scale_comes_before_the_cap() -> None:
    hidden, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((5, 8), (31, 8), (31,)))
    arguments = hidden, weight, bias, torch.randint(31, (5,)), 0.7, 16, 1.5, 0.25, ("log_probs", "entropy")
    found = []
    for head in (our_head.OurHead(), our_head._TRLS_HEAD):
        logprob, entropy, *_ = head.apply(*arguments)
        grads = torch.autograd.grad((logprob - 2 * entropy).sum(), (hidden, weight, bias))
        found.append((logprob, entropy, *grads))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@needs_trls
def test_autocast_gives_the_precision_that_trl_takes() -> None:
    model, labels = with_fused_head("Qwen2, untied"), torch.randint(2, lm_heads.SHAPE["vocab_size"], (16, 65))
    exact = with_gradient(model, fused(model, labels, False))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (with_gradient(model, fused(model, labels, ours)) for ours in (True, False))
    # It does round to bfloat16, and its scores are closer to the exact ones than TRL's. Like torch's own linear under
    # autocast, it rounds the weight's gradient, which TRL keeps in float32.
    for mine, other, best, worse in zip(ours, theirs, exact, (1, 1, 1.5), strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert 0 < (mine - best).norm() <= worse * (other - best).norm()


@needs_trls
def test_falls_back_to_trls_head_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_head, "_said", set())
    double, sharded, labels = with_fused_head("Qwen2, untied").double(), with_fused_head("Qwen2, tied"), draw_labels()
    sharded.get_output_embeddings().weight.ds_id = 0  # as ZeRO-3 marks a parameter, which TRL then gathers
    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", lambda *_: nullcontext())
    reasons = {"ZeRO-3 takes the head's weight away": sharded, "the head's weight is torch.float64": double}
    for reason, model in reasons.items():
        with pytest.warns(UserWarning, match=f"TRL's own LM head is used, because {reason}"):
            fallen_back = with_gradient(model, fused(model, labels, True))
        for mine, other in zip(fallen_back, with_gradient(model, fused(model, labels, False)), strict=True):
            torch.testing.assert_close(mine, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(double, labels, True)


def test_without_triton_and_without_our_kernels_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_head, "_TRLS_HEAD", None)
    double = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="the LM head cannot be ours, because the head's weight is"):
        our_head.OurHead().apply(double, double, None, torch.zeros(2, dtype=torch.long), 1.0, 16)


def test_other_outputs_are_left_to_trl() -> None:
    hidden, weight = torch.zeros(1, 4), torch.zeros(5, 4)
    assert our_head.why_not(hidden, weight, torch.float32, 1.0, ("log_probs", "is_top1")) == "is_top1 is asked for"
    assert our_head.why_not(hidden, weight, torch.float32, 1.0, ("log_probs", "entropy")) is None
    assert "scales its logits by -1" in our_head.why_not(hidden, weight, torch.float32, -1.0, ())
    assert "tensors on meta" in our_head.why_not(hidden.to("meta"), weight, torch.float32, 1.0, ())


def test_trl_is_as_it_was_afterwards() -> None:
    before = copy.copy(vars(trl_utils))
    with suppress(ZeroDivisionError), d3s_head():
        assert isinstance(trl_utils._ChunkedLogProbFunction, our_head.OurHead)
        1 / 0  # noqa: B018
    assert vars(trl_utils) == before


# ---- the dtype of its logits -----------------------------------------------------------------------------------------


@needs_trls
def test_auto_rounds_logits_as_trls_head_does() -> None:
    """Under autocast, too. Both heads have the scores of the same rounded logits, up to the order of sums."""
    hidden, weight, bias = (torch.randn(shape) for shape in ((24, 64), (300, 64), (300,)))
    more = torch.randint(300, (24,)), 0.7, 16, None, 1.0, ("log_probs", "entropy")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = our_head._TRLS_HEAD.apply(hidden, weight, bias, *more)[:2]
        auto, wide = (
            OurHead(options=HeadOptions(logits_dtype=dtype)).apply(hidden, weight, bias, *more)[:2]
            for dtype in ("auto", "float32")
        )
    for same, other, trls in zip(auto, wide, theirs, strict=True):
        assert (same - trls).norm() < 0.1 * (other - trls).norm()


@pytest.mark.parametrize("options", [{}, {"logits_dtype": "auto", "keep_logits_bytes": 9}])
def test_the_trainers_options_reach_the_head(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, apply = [], OurHead.apply
    monkeypatch.setattr(OurHead, "apply", lambda head, *more: seen.append(head.options) or apply(head, *more))
    made = trainer(**options)
    made.compute_loss(made.model, micro_batch(1))
    (found,) = seen
    expected = {"logits_dtype": "float32", "keep_logits_bytes": 0} | options
    assert expected == {name: getattr(found, name) for name in expected}


# ---- heads that are taken or refused. More: test_lm_head.py, test_lm_head_of_models.py -------------------------------


class Sharded(nn.Module):
    """As FSDP wraps a layer: its parameters are not those of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self._flat_param = nn.Parameter(torch.zeros(3))
        self._fsdp_wrapped_module = base


class FSDPLinear(nn.Linear):
    """A linear layer by another name."""


@pytest.mark.parametrize("head", [lambda base: FSDPLinear(base.in_features, base.out_features, bias=False), Sharded])
def test_a_linear_layer_by_another_name_is_taken(head: Callable[[nn.Linear], nn.Module]) -> None:
    model = with_fused_head("Qwen2, untied")
    model.lm_head = head(model.lm_head)
    check_head(model)


def test_an_adapter_that_trl_does_not_see_is_refused() -> None:
    """TRL refuses adapters of a PeftModel when its trainer is made; not those that were put into a model."""
    config, message = peft.LoraConfig(target_modules=["lm_head"], r=2), r"lm_head: got a peft\.tuners\.lora\.layer\.Lin"
    with pytest.raises(UnsupportedHead, match=message):
        trainer(policy=peft.inject_adapter_in_model(config, tiny_trl.model()))
    made = trainer()
    peft.inject_adapter_in_model(config, made.model)
    with pytest.raises(UnsupportedHead, match=message):
        made.compute_loss(made.model, micro_batch(1))


def test_a_scale_that_trl_reads_otherwise_is_refused() -> None:
    """As a TRL that does not know of a name, or reads one that the model does not use."""
    model, labels = with_fused_head(SCALED), draw_labels()
    ours = OurHead(read_head(model))
    with d3s_head(ours):
        model(labels.clamp(min=0), labels=labels, fused_lm_head=True)
        model.config.logit_scale = 0.5
        ours.model_head = read_head(model)
        with pytest.raises(
            UnsupportedHead, match=r"TRL scales the logits of Cohere.* by 0\.25 and caps .*itself by 0\.5"
        ):
            model(labels.clamp(min=0), labels=labels, fused_lm_head=True)
    with pytest.raises(UnsupportedHead, match="own logits differ by up to"):
        check_head(model)
