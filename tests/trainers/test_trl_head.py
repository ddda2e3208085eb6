"""The LM head in TRL's model: it has TRL's scores and gradients, and where it cannot be used, TRL's own head runs."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("trl")
import trl.trainer.utils as trl_utils
from heads import SHAPE, draw_labels, fused, needs_trls, with_fused_head, with_gradient

from d3s_kernels.integrations.trl import head as our_head
from d3s_kernels.integrations.trl.head import d3s_head


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
    model, labels = with_fused_head("Qwen2, untied"), torch.randint(2, SHAPE["vocab_size"], (16, 65))
    exact = with_gradient(model, fused(model, labels, False))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (with_gradient(model, fused(model, labels, ours)) for ours in (True, False))
    # It does round to bfloat16, and its scores are closer to the exact ones than TRL's. Like torch's own linear under
    # autocast, it rounds the weight's gradient, which TRL keeps in float32.
    for mine, other, best, worse in zip(ours, theirs, exact, (1, 1, 1.5), strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert 0 < (mine - best).norm() <= worse * (other - best).norm()


def test_no_label_at_all_stays_connected() -> None:
    model = with_fused_head("Qwen2, untied")
    logprob, entropy = fused(model, torch.full((3, 9), -100), ours=True)
    assert (logprob == 0).all()
    (logprob * 2 - entropy).sum().backward()
    gradient = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradient) > 0
    assert all((grad == 0).all() for grad in gradient)


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
    assert our_head._why_not(hidden, weight, torch.float32, 1.0, ("log_probs", "is_top1")) == "is_top1 is asked for"
    assert our_head._why_not(hidden, weight, torch.float32, 1.0, ("log_probs", "entropy")) is None
    assert "scales its logits by -1" in our_head._why_not(hidden, weight, torch.float32, -1.0, ())
    assert "tensors on meta" in our_head._why_not(hidden.to("meta"), weight, torch.float32, 1.0, ())


def test_trl_is_as_it_was_afterwards() -> None:
    before = copy.copy(vars(trl_utils))
    with d3s_head():
        assert isinstance(trl_utils._ChunkedLogProbFunction, our_head.OurHead)
    assert vars(trl_utils) == before
    with pytest.raises(ZeroDivisionError), d3s_head():
        1 / 0  # noqa: B018
    assert vars(trl_utils) == before
