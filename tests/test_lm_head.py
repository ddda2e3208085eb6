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
CAPS = {"logit_scale": 0.5, "final_logit_softcapping": 7.0}


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
    policy = Capped(bias=True, **CAPS).eval().to(dtype)
    with torch.no_grad():
        policy.head.weight.mul_(30)
    tokens, temperature = torch.randint(VOCABULARY, (3, 5)), torch.rand(3, 1) + 0.5
    head = d3s.lm_head(policy, temperature)
    exact = Capped(bias=True).eval().double()
    exact.load_state_dict(policy.state_dict())
    found = d3s.linear_logprob_entropy(policy.model(tokens), labels=tokens, **head)
    expected = d3s.reference.logprob_entropy(exact(tokens), tokens, temperature=temperature)
    gradients = [
        torch.autograd.grad(sum(of).sum(), list(module.parameters()))  # type: ignore[union-attr]
        for of, module in ((found, policy), (expected, exact))
    ]
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=50 * step, check_dtype=False)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours.double() - theirs).norm() <= 4 * step * theirs.norm()


def test_the_mapping() -> None:
    policy = Capped(bias=True, **CAPS)
    head = d3s.lm_head(policy, 0.8)
    assert head["weight"] is policy.head.weight
    assert head["bias"] is policy.head.bias
    assert (head["temperature"], head["logit_softcap"]) == (1.6, 14.0)
    plain = d3s.lm_head(WithoutBody())
    assert (plain["bias"], plain["temperature"], plain["logit_softcap"]) == (None, 1.0, None)


def test_a_temperature_in_half_precision_is_divided_in_float32() -> None:
    temperature = torch.tensor(0.7, dtype=torch.bfloat16)
    head = d3s.lm_head(Policy(logit_scale=0.3), temperature, verify=False)
    torch.testing.assert_close(head["temperature"], temperature.float() / 0.3, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["in parallel", "compiled"])
def test_wrappers_are_taken_off(wrap: Callable[[nn.Module], nn.Module]) -> None:
    policy = Policy()
    assert d3s.lm_head(wrap(policy))["weight"] is policy.head.weight


def test_the_check_runs_once_and_leaves_no_trace() -> None:
    policy, before = Policy(), torch.get_rng_state()
    d3s.lm_head(policy)
    d3s.lm_head(policy, 0.5)
    assert (policy.calls, policy.training, torch.is_grad_enabled()) == (1, True, True)
    assert torch.equal(torch.get_rng_state(), before)  # although the body drops at random
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in policy.modules())
    policy.head = nn.Linear(WIDTH, VOCABULARY)  # another head is looked at again
    d3s.lm_head(policy)
    assert policy.calls == 2
    d3s.lm_head(Policy(), verify=False)
    assert policy.calls == 2


def with_dropout(own: Any, ids: Tensor) -> Tensor:
    logits: Tensor = getattr(own, "scale", 1.0) * own.head(nn.functional.dropout(own.model(ids), 0.5, own.training))
    return logits


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number of the model": lambda policy: setattr(policy, "scale", 2.0),
    "the mode": lambda policy: policy.train(),
    "a hook of the head": lambda policy: policy.head.register_forward_hook(lambda module, given, logits: 2 * logits),
    "a hook of the model": lambda policy: policy.register_forward_hook(lambda module, given, logits: 2 * logits),
    "the head's forward": lambda own: setattr(own.head, "forward", lambda hidden: 2 * hidden @ own.head.weight.T),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_taken_is_looked_at_again_after_a_change(change: str) -> None:
    policy = with_forward(with_dropout).eval()
    d3s.lm_head(policy)
    CHANGES[change](policy)
    with pytest.raises(d3s.UnsupportedHead, match=r"changes the last hidden states|own logits differ"):
        d3s.lm_head(policy)


class Wrapper(nn.Module):
    """As those that are taken off, by the name of its attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Policy()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.module(input_ids)
        return logits / 2


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


def with_forward(forward: Callable[..., Any], parameters: dict[str, Tensor] | None = None, **config: Any) -> Policy:
    policy: Policy = type("Own", (Policy,), {"forward": forward})(**config)
    for name, value in (parameters or {}).items():
        policy.register_parameter(name, nn.Parameter(value))
    return policy


def forward(*given: Any, **config: Any) -> Callable[[], Policy]:
    return lambda: with_forward(*given, **config)


class Parallel(nn.Sequential):
    """To a name, torch's own, which wants a process group."""

    __module__, __qualname__ = "torch.nn.parallel.distributed", "DistributedDataParallel"


def logits_of(policy: Policy, ids: Tensor) -> Tensor:
    logits: Tensor = policy.head(policy.model(ids))
    return logits


LAST = torch.tensor(VOCABULARY - 1)
DIFFER = "own logits differ by up to"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not a module": (lambda: 3, "model: got int; takes a torch.nn.Module"),
    "no head": (lambda: Body(), r"got a Body, whose get_output_embeddings\(\) is missing or returns None"),
    "an adapter": (lambda: of_head(Adapted()), "got a test_lm_head.Adapted, whose adapter would be ignored and never"),
    "a cap that nobody named": (lambda: Capped(logit_scale=0.5), rf"Capped's {DIFFER} .* \(scale 0.5, soft cap None\)"),
    "a scale that nobody named": (lambda: Capped(final_logit_softcapping=7.0), f"Capped's {DIFFER}"),
    "a cap before the scale": (lambda: CapsFirst(**CAPS), f"First's {DIFFER}"),
    "a wrapper that nobody knows": (lambda: Wrapper(), r"got a Wrapper, whose get_output_embeddings\(\) is mis"),
    "DistributedDataParallel": (lambda: Parallel(Policy()), "averages gradients only where its own forward is called"),
    "a scale that trains": (
        forward(lambda own, ids: own.bonus * logits_of(own, ids), {"bonus": torch.ones(())}),
        "logits also depend on bonus, which would be ignored and never trained",
    ),
    "a layer that starts as if it were not there": (
        forward(lambda own, ids: own.head(own.model(ids) @ own.square), {"square": torch.eye(WIDTH)}),
        "logits also depend on square, which would be ignored",
    ),
    "no gradient": (forward(lambda own, ids: own.head(own.model(ids).detach())), "have no gradient for their hidden"),
    "a scale below 0": (lambda: Policy(logit_scale=-1.0), "got a Policy with logit_scale=-1.0; takes a number above 0"),
    "one per cent": (forward(lambda own, ids: 1.01 * logits_of(own, ids)), DIFFER),
    "a token that is never sampled": (
        forward(lambda own, ids: logits_of(own, ids).index_fill(-1, torch.tensor([5]), -1e9)),
        rf"{DIFFER} 1e\+09",
    ),
    "a bias of one token, lost in the mean": (
        forward(lambda own, ids: logits_of(own, ids) + 3e-5 * nn.functional.one_hot(LAST, VOCABULARY)),
        DIFFER,
    ),
    "a cap far above the logits": (forward(lambda own, ids: 2000 * (logits_of(own, ids) / 2000).tanh()), DIFFER),
    "cut padding": (forward(lambda own, ids: logits_of(own, ids)[..., :130]), r"gives logits of shape \[1, 4, 130\]"),
    "other hidden states": (
        forward(lambda own, ids: own.head(own.model(ids) / 4), logits_scaling=4.0),
        "changes the last hidden states of its body .*: their norm becomes 0.25 times as large",
    ),
    "no logits": (forward(lambda own, ids: {"loss": logits_of(own, ids)}), "returns a dict without logi"),
    "a forward that fails": (forward(lambda own, ids: ids / "2"), "raised TypeError: .*verify=False lea"),
    "a body's part": (forward(lambda own, ids: own.head(own.model.tokens(ids))), "its forward does not call its Body"),
    "a weight of zeros": (lambda: with_weight(torch.zeros(VOCABULARY, WIDTH)), "times its weight are 0 or not finite"),
    "on the meta device": (lambda: Policy().to("meta"), "its weight on the meta device"),
    "integers": (lambda: with_weight(torch.ones(VOCABULARY, WIDTH).char()), "a weight in torch.int8, maybe quantised"),
    "packed": (lambda: of_head(nn.Identity()), "no weight tensor, but packed or quantised ones"),
    "ZeRO-3": (partitioned, r"ZeRO-3 has partitioned .* deepspeed.zero.GatheredParameters\(\[weight\]\)"),
    "a shard that is flat": (lambda: with_weight(torch.ones(7)), r"a weight of shape \[7\]; takes \[V, H\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((d3s.UnsupportedHead, TypeError), match=message):
        d3s.lm_head(make())


def mixed(own: Any, input_ids: Tensor) -> Tensor:
    """As accelerate wraps a forward: autocast inside, float32 outside."""
    with torch.autocast("cpu", torch.bfloat16):
        return logits_of(own, input_ids).float()


def test_what_is_no_temperature() -> None:
    """Also where a scale divides it, whose quotient the caller does not know."""
    for policy in (Policy(), Policy(logit_scale=0.5)):
        for wrong, takes in ((-0.8, ""), ("1", " a number"), (True, " a number")):
            with pytest.raises((ValueError, TypeError), match=f"^temperature: got {wrong!r}; takes{takes}"):
                d3s.lm_head(policy, wrong, verify=False)  # type: ignore[arg-type]


def test_within_torch_compile() -> None:
    """Not in a graph, which would keep what it returned; but where a graph has a break."""
    policy, tokens = Policy().eval(), torch.tensor([[1, 2, 3]])
    with pytest.raises(Exception, match=r"lm_head: called within torch\.compile; call it outside"):
        torch.compile(scores, fullgraph=True, backend="eager")(policy, tokens)
    torch.compiler.reset()
    assert torch.equal(torch.compile(scores, backend="eager")(policy, tokens), scores(policy, tokens))


TAKEN: dict[str, Callable[[], Any]] = {
    "autocast inside the forward": forward(mixed),
    "any arguments": forward(lambda own, *given, **named: logits_of(own, *given, *named.values())),
    "a dict of logits": forward(lambda own, ids: {"logits": logits_of(own, ids)}),
    "a head called by name": forward(lambda own, ids: own.head(input=own.model(ids))),
    "small weights in float16": lambda: with_weight(1e-4 * torch.randn(VOCABULARY, WIDTH)).half(),
    "a name without effect": lambda: Policy(**CAPS),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    head = d3s.lm_head(TAKEN[name]())
    assert (head["temperature"], head["logit_softcap"]) == (1.0, None)


def test_under_autocast() -> None:
    policy = Policy()
    with torch.no_grad():
        policy.head.weight[:, 0] *= 300
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert d3s.lm_head(policy)["weight"] is policy.head.weight


def test_bfloat16_has_room_for_rounding_and_no_more() -> None:
    d3s.lm_head(Capped(**CAPS, bias=True).bfloat16())
    with pytest.raises(d3s.UnsupportedHead, match="own logits differ"):
        d3s.lm_head(with_forward(lambda own, ids: 1.02 * own.head(own.model(ids))).bfloat16())


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def scores(policy: Policy, tokens: Tensor) -> Tensor:
    logprob, entropy = d3s.linear_logprob_entropy(policy.model(tokens), labels=tokens, **d3s.lm_head(policy))
    return logprob + entropy


def sharded_step(ranks: Ranks, tokens: list[Tensor]) -> tuple[str, dict[str, Tensor]]:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    torch.manual_seed(3)
    policy: Any = Capped(bias=True, **CAPS).eval()
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
    policy = Capped(bias=True, **CAPS).eval()
    sum(scores(policy, batch).sum() / 2 for batch in tokens).backward()
    for refused, gradients in found:
        assert "head has as weight a DTensor; takes a plain tensor: full_tensor()" in refused
        for name, value in policy.named_parameters():
            torch.testing.assert_close(gradients[name], value.grad, rtol=1e-5, atol=1e-6)
