"""``lm_head`` of modules of one's own: what it returns, what it refuses, and that its check leaves no trace."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks, world
from torch import Tensor, nn

import d3s_kernels as d3s

VOCABULARY, WIDTH = 131, 16


class Policy(nn.Module):
    """A body, which a hidden state of the token alone comes from, and a head."""

    def __init__(self, *, bias: bool = False, **config: Any) -> None:
        super().__init__()
        self.model = Body()
        self.head: nn.Module = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.config = types.SimpleNamespace(model_type="policy", **config)
        self.calls = 0

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def of_logits(self, logits: Tensor) -> Tensor:
        return logits

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        return self.of_logits(self.head(self.model(input_ids)))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.tokens(input_ids))
        return hidden


class Capped(Policy):
    """Scales, and then caps: ``cap * tanh(scale * z / cap)``."""

    scale, cap = 0.5, 7.0

    def of_logits(self, logits: Tensor) -> Tensor:
        return self.cap * (self.scale * logits / self.cap).tanh()


class CapsFirst(Capped):
    def of_logits(self, logits: Tensor) -> Tensor:
        return self.scale * self.cap * (logits / self.cap).tanh()


class WithoutBody(Policy):
    """Its hidden states are what the head is given."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = self.model
        del self.model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, None]:
        return self.head(self.trunk(input_ids)), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_logits(dtype: torch.dtype) -> None:
    policy = Capped(bias=True, logit_scale=0.5, final_logit_softcapping=7.0).eval().to(dtype)
    with torch.no_grad():
        policy.head.weight.mul_(30)
    tokens, temperature = torch.randint(VOCABULARY, (3, 5)), torch.rand(3, 1) + 0.5
    head = d3s.lm_head(policy, temperature)
    exact = Capped(bias=True).eval().double()
    exact.load_state_dict(policy.state_dict())
    found = d3s.linear_logprob_entropy(policy.model(tokens), labels=tokens, **head)
    logits = (exact(tokens) / temperature[..., None]).log_softmax(-1)
    expected = logits.gather(-1, tokens[..., None])[..., 0], -(logits.exp() * logits).sum(-1)
    gradients = [
        torch.autograd.grad(sum(of).sum(), list(module.parameters()))  # type: ignore[union-attr]
        for of, module in ((found, policy), (expected, exact))
    ]
    step = torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=50 * step)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours.double() - theirs).norm() <= 4 * step * theirs.norm()


def test_the_mapping() -> None:
    policy = Capped(bias=True, logit_scale=0.5, final_logit_softcapping=7.0)
    head = d3s.lm_head(policy, 0.8)
    assert head["weight"] is policy.head.weight
    assert head["bias"] is policy.head.bias
    assert (head["temperature"], head["logit_softcap"]) == (1.6, 14.0)
    plain = d3s.lm_head(WithoutBody())
    assert (plain["bias"], plain["temperature"], plain["logit_softcap"]) == (None, 1.0, None)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["in parallel", "compiled"])
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    policy = Policy()
    assert d3s.lm_head(wrap(policy))["weight"] is policy.head.weight


def test_the_check_runs_once_and_leaves_no_trace() -> None:
    policy = Policy()
    before = torch.get_rng_state()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules()]
    d3s.lm_head(policy)
    d3s.lm_head(policy, 0.5)
    assert (policy.calls, policy.training, torch.is_grad_enabled()) == (1, True, True)
    assert torch.equal(torch.get_rng_state(), before)  # although the body drops at random
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules()]
    policy.head = nn.Linear(WIDTH, VOCABULARY)  # another head is looked at again
    d3s.lm_head(policy)
    assert policy.calls == 2
    d3s.lm_head(Policy(), verify=False)
    assert policy.calls == 2


class Adapted(nn.Linear):
    """Starts as its linear layer alone, as adapters do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)
        self.adapter = nn.Parameter(torch.zeros(VOCABULARY, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden @ self.adapter.T


def of_head(head: nn.Module) -> Policy:
    policy = Policy()
    policy.head = head
    return policy


def with_weight(weight: Tensor) -> Policy:
    policy = Policy()
    policy.head.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return policy


def partitioned() -> Policy:
    policy = with_weight(torch.empty(0))
    policy.head.weight.ds_id = 0  # type: ignore[attr-defined]  # as ZeRO-3 marks it
    return policy


def with_forward(forward: Callable[[Any, Tensor], Any], **config: Any) -> Policy:
    return type("Own", (Policy,), {"forward": forward})(**config)


def logits_of(policy: Policy, ids: Tensor) -> Tensor:
    logits: Tensor = policy.head(policy.model(ids))
    return logits


DIFFER = "own logits differ by up to"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not a module": (lambda: 3, "model: got int; takes a torch.nn.Module"),
    "no head": (lambda: Body(), r"got a Body, which has no get_output_embeddings\(\)"),
    "an adapter": (lambda: of_head(Adapted()), "got a test_lm_head.Adapted, whose adapter would be ignored and never"),
    "a cap that nobody named": (lambda: Capped(logit_scale=0.5), rf"Capped's {DIFFER} .* \(scale 0.5, soft cap None\)"),
    "a scale that nobody named": (lambda: Capped(final_logit_softcapping=7.0), f"Capped's {DIFFER}"),
    "a cap before the scale": (lambda: CapsFirst(logit_scale=0.5, final_logit_softcapping=7.0), f"First's {DIFFER}"),
    "a scale below 0": (lambda: Policy(logit_scale=-1.0), "got a Policy with logit_scale=-1.0; takes a number above 0"),
    "one per cent": (lambda: with_forward(lambda own, ids: 1.01 * logits_of(own, ids)), DIFFER),
    "a token that is never sampled": (
        lambda: with_forward(lambda own, ids: logits_of(own, ids).index_fill(-1, torch.tensor([5]), -1e9)),
        rf"{DIFFER} 1e\+09",
    ),
    "padding that is cut off": (
        lambda: with_forward(lambda own, ids: logits_of(own, ids)[..., :130]), r"gives logits of shape \[1, 4, 130\]"
    ),
    "other hidden states": (
        lambda: with_forward(lambda own, ids: own.head(own.model(ids) / 4), logits_scaling=4.0),
        "changes the last hidden states of its body .*: their norm becomes 0.25 times as large",
    ),
    "no logits": (lambda: with_forward(lambda own, ids: {"loss": logits_of(own, ids)}), "returns a dict without logi"),
    "a forward that fails": (lambda: with_forward(lambda own, ids: ids / "2"), "raised TypeError: .*verify=False lea"),
    "a body that is not called": (
        lambda: with_forward(lambda own, ids: own.head(own.model.tokens(ids))), "its forward does not call its Body"
    ),
    "a weight of zeros": (lambda: with_weight(torch.zeros(VOCABULARY, WIDTH)), "times its weight are 0 or not finite"),
    "on the meta device": (lambda: Policy().to("meta"), "its weight on the meta device"),
    "integers": (
        lambda: with_weight(torch.ones(VOCABULARY, WIDTH, dtype=torch.int8)), "a weight of type Parameter in torch.int8"
    ),
    "packed": (lambda: of_head(nn.Identity()), "no weight tensor, but packed or quantised ones"),
    "ZeRO-3": (partitioned, r"ZeRO-3 has partitioned; takes the whole: deepspeed.zero.GatheredParameters\(\[wei"),
    "a shard that is flat": (lambda: with_weight(torch.ones(7)), r"a weight of shape \[7\]; takes \[V, H\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((d3s.UnsupportedHead, TypeError), match=message):
        d3s.lm_head(make())


def test_bfloat16_has_room_for_rounding_and_no_more() -> None:
    d3s.lm_head(Capped(logit_scale=0.5, final_logit_softcapping=7.0, bias=True).bfloat16())
    with pytest.raises(d3s.UnsupportedHead, match="own logits differ"):
        d3s.lm_head(with_forward(lambda own, ids: 1.02 * own.head(own.model(ids))).bfloat16())


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def scores(policy: Policy, tokens: Tensor) -> Tensor:
    logprob, entropy = d3s.linear_logprob_entropy(policy.model(tokens), labels=tokens, **d3s.lm_head(policy))
    return logprob + entropy


def sharded_step(ranks: Ranks, tokens: list[Tensor]) -> tuple[str, dict[str, Tensor]]:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    torch.manual_seed(3)
    policy: Any = Capped(bias=True, logit_scale=0.5, final_logit_softcapping=7.0).eval()
    policy.scores = types.MethodType(scores, policy)
    fully_shard(policy)
    register_fsdp_forward_method(policy, "scores")
    try:
        d3s.lm_head(policy)
    except d3s.UnsupportedHead as error:
        refused = str(error)
    policy.scores(tokens[ranks.rank]).sum().backward()
    return refused, {name: value.grad.full_tensor() for name, value in policy.named_parameters()}


@pytest.mark.slow("what FSDP2 gathers and reduces")
def test_two_processes_that_share_the_weights() -> None:
    """A gradient is the mean of those of the two batches."""
    tokens = [torch.randint(VOCABULARY, (2, 5)) for _ in range(2)]
    found = world(2).run(sharded_step, tokens)
    torch.manual_seed(3)
    policy = Capped(bias=True, logit_scale=0.5, final_logit_softcapping=7.0).eval()
    sum(scores(policy, batch).sum() / 2 for batch in tokens).backward()
    for refused, gradients in found:
        assert "a DTensor as weight, of which this rank has a part" in refused
        assert "register_fsdp_forward_method" in refused
        for name, value in policy.named_parameters():
            torch.testing.assert_close(gradients[name], value.grad, rtol=1e-5, atol=1e-6)
