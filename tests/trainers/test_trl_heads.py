"""Every kind of LM head: its scores and gradients are those of the model's own logits, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl")
import tiny_trl
import trl.trainer.utils as trl_utils
from batches import micro_batch
from heads import MODELS, TEMPERATURE, draw_labels, fused, needs_trls, with_fused_head, with_gradient
from tiny_trl import trainer

from d3s_kernels import UnsupportedHead
from d3s_kernels.heads import read_head
from d3s_kernels.integrations.trl.head import OurHead, check_head, d3s_head


def with_peft(name: str, **config: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(with_fused_head(name), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **config))
    with torch.no_grad():  # as if it had been trained
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def with_float32_head() -> Any:
    model = with_fused_head("Qwen2, untied", torch.bfloat16, cast_lm_head_to_fp32=True)
    model.lm_head.float()
    return model


EXACT: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: with_fused_head(name) for name in MODELS},
    "modules_to_save": lambda: with_peft("Qwen2, untied", target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "adapters beside a tied head": lambda: with_peft("Qwen2, tied", target_modules=["q_proj", "v_proj"]),
    "modules_to_save of a tied head": lambda: with_peft(
        "Qwen2, tied", target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}
ROUNDED: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: with_fused_head("Qwen2, untied", torch.bfloat16),
    "float16": lambda: with_fused_head("Qwen2, untied", torch.float16),
    "bfloat16, capped": lambda: with_fused_head("Gemma 2: caps its logits", torch.bfloat16),
    "float32 over bfloat16": with_float32_head,
}


def of_logits(model: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """By the model's own forward."""
    logprob = (model(labels.clamp(min=0)).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    valid, targets = labels[:, 1:] != -100, labels[:, 1:].clamp(min=0)[..., None]
    entropy = -(logprob.exp() * logprob).sum(-1)
    return logprob.gather(-1, targets)[..., 0] * valid, entropy * valid


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
    if hasattr(model, "disable_adapter"):  # TRL's reference is the policy without its adapters
        with torch.no_grad(), model.disable_adapter():
            without, expected = fused(model, labels, True), of_logits(model, labels)
        torch.testing.assert_close(without, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(without[0], ours[0], atol=1e-3)


@needs_trls
@pytest.mark.parametrize("name", ROUNDED)
def test_a_rounded_head_is_as_close_as_trls(name: str) -> None:
    model, labels = ROUNDED[name](), draw_labels()
    check_head(model)
    exact = copy.deepcopy(model).float()
    exact.forward = type(exact).forward.__get__(exact)
    ours, theirs = (with_gradient(model, fused(model, labels, ours)) for ours in (True, False))
    best = with_gradient(exact, of_logits(exact, labels))
    for mine, other, expected in zip(ours, theirs, best, strict=True):
        assert (mine - expected).norm() <= 1.5 * (other - expected).norm() + 1e-4 * expected.norm()


# ---- heads that are refused ------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """Wraps a linear layer as adapters do: weight and bias are those of the layer alone."""

    def __init__(self, base: nn.Linear, frozen: bool) -> None:
        super().__init__()
        self.base, (outputs, inputs) = base, base.weight.shape
        self.down = nn.Parameter(torch.randn(2, inputs), requires_grad=not frozen)
        self.up = nn.Parameter(torch.full((outputs, 2), float(frozen)), requires_grad=not frozen)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


class Equal(nn.Linear):
    """A linear layer by another name."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T


class Scaled(Equal):
    def forward(self, hidden: Tensor) -> Tensor:
        return 0.5 * super().forward(hidden)


def replaced(head: Callable[[nn.Linear], nn.Module]) -> Any:
    model = with_fused_head("Qwen2, untied")
    model.lm_head = head(model.lm_head)
    return model


def of_shape(kind: type[nn.Linear]) -> Callable[[nn.Linear], nn.Linear]:
    return lambda base: kind(base.in_features, base.out_features, bias=False)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"{kind} on lm_head": (
            lambda kind=kind, options=options: adapted(kind, options), "an adapter, which would be ignored and never"
        )
        for kind, options in {
            "Lora": {"r": 2}, "LoHa": {"r": 2}, "IA3": {"feedforward_modules": []}, "Vera": {"r": 2},
        }.items()
    },
    "DoRA on lm_head": (lambda: adapted("Lora", {"r": 2, "use_dora": True}), "an adapter, which would be ignored"),
    "trainable tokens of a tied head": (
        lambda: with_peft("Qwen2, tied", target_modules=["q_proj"], trainable_token_indices=[3, 5]),
        r"whose token_adapter\.trainable_tokens_delta\.default would be ignored",
    ),
    "a wrapper that trains": (lambda: replaced(lambda base: Lora(base, False)), r"whose down, up would be ignored"),
    "a wrapper that is frozen": (lambda: replaced(lambda base: Lora(base, True)), "own logits differ by up to"),
    "a layer with a scale": (lambda: replaced(of_shape(Scaled)), "own logits differ by up to"),
}  # fmt: skip


def adapted(kind: str, options: dict[str, Any]) -> Any:
    peft = pytest.importorskip("peft")
    config = getattr(peft, f"{kind}Config")(target_modules=["lm_head"], **options)
    return peft.get_peft_model(with_fused_head("Qwen2, untied"), config)


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_with_more_than_weight_and_bias_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedHead, match=rf"lm_head: .*{message}"):
        check_head(make())


class Sharded(nn.Module):
    """As FSDP wraps a layer: its parameters are not those of the layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self._flat_param = nn.Parameter(torch.zeros(3))
        self._fsdp_wrapped_module = base


@pytest.mark.parametrize("head", [of_shape(Equal), of_shape(type("FSDPLinear", (nn.Linear,), {})), Sharded])
def test_a_linear_layer_by_another_name_is_taken(head: Callable[[nn.Linear], nn.Module]) -> None:
    check_head(replaced(head))


def test_an_adapter_that_trl_does_not_see_is_refused() -> None:
    """TRL refuses adapters of a PeftModel when its trainer is made; not those that were put into a model."""
    peft = pytest.importorskip("peft")
    config, message = peft.LoraConfig(target_modules=["lm_head"], r=2), r"lm_head: got a peft\.tuners\.lora\.layer\.Lin"
    with pytest.raises(UnsupportedHead, match=message):
        trainer(policy=peft.inject_adapter_in_model(config, tiny_trl.model()))
    made = trainer()
    peft.inject_adapter_in_model(config, made.model)
    with pytest.raises(UnsupportedHead, match=message):
        made.compute_loss(made.model, micro_batch(1))


def test_a_scale_that_trl_reads_otherwise_is_refused() -> None:
    """As a TRL that does not know of a name, or reads one that the model does not use."""
    model, labels = with_fused_head("Cohere: scales its logits"), draw_labels()
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
