"""The recipe for NeMo-RL, called as NeMo-RL calls it. It needs a GPU to be installed, so that the classes which the
recipe inherits are stand-ins.
"""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_core import installed, parallel_state
from megatron_core import recipe as load
from ranks import Ranks, world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import d3s_kernels as d3s
from d3s_kernels import reference

SEQUENCES, LENGTH, VOCABULARY, RATIO = 4, 9, 13, 0.3
CONFIG = SimpleNamespace(use_importance_sampling_correction=False, force_on_policy_ratio=False)


class ClippedPGLossFn:
    """Takes what ``loss_functions.py`` takes at 7ea279a, 2026-08-22. Its value has a gradient at every token of the
    masks.
    """

    def __init__(self, cfg: Any) -> None:
        self.metric_normalizations = {"loss": "tokens"}

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        each = (next_token_logprobs - data["prev_logprobs"][:, 1:]) ** 2 * mask_of(data)
        loss = each.sum() / global_valid_toks
        return loss, {"loss": loss.item()}


def policy(
    tensor_parallel: int = 1, context_parallel: int = 1, megatron: bool = False, packed: bool = False,
    fused: bool = False, **generation: Any,
) -> dict[str, Any]:  # fmt: skip
    """``config.policy``, of the DTensor workers unless ``megatron=True``."""
    megatron_cfg = {"tensor_model_parallel_size": tensor_parallel, "context_parallel_size": context_parallel}
    return {
        "megatron_cfg": {"enabled": megatron, "use_fused_linear_logprobs": fused, **megatron_cfg},
        "dtensor_cfg": {"tensor_parallel_size": tensor_parallel, "context_parallel_size": context_parallel},
        "sequence_packing": {"enabled": packed},
        "generation": {"top_k": None, "top_p": 1.0, **generation},
        "precision": "float32",
    }


INTERFACES = {"LossInputType": SimpleNamespace(LOGIT="logit"), "MetricNormalizer": SimpleNamespace(TOKENS="tokens")}
LOSSES = {
    "nemo_rl.algorithms.loss": SimpleNamespace(ClippedPGLossFn=ClippedPGLossFn),
    "nemo_rl.algorithms.loss.interfaces": SimpleNamespace(**INTERFACES),
}
recipe = load("d3s_nemo_rl", LOSSES)


class MegatronPolicyWorkerImpl:
    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg = cfg


WORKERS = "nemo_rl.models.policy.workers.megatron_policy_worker"
head = load(
    "d3s_nemo_rl_head",
    {
        "ray": SimpleNamespace(remote=lambda **options: lambda made: made),
        "nemo_rl.models.policy.utils": SimpleNamespace(get_runtime_env_for_policy_worker=lambda name: {}),
        WORKERS: SimpleNamespace(MegatronPolicyWorkerImpl=MegatronPolicyWorkerImpl),
    },
)


def loss_of(policy: dict[str, Any], ratio: float = RATIO, **options: Any) -> Any:
    ratios = {"token_ratio_start": ratio, "token_ratio_end": ratio}
    return recipe.D3SLoss(CONFIG, policy, **{**ratios, "loss_denominator": "all", **options})


# ---- tokens ----------------------------------------------------------------------------------------------------------


def micro_batch() -> tuple[dict[str, Tensor], Tensor]:
    """The fields of a micro-batch, and its logits ``[B, S, V]``. Prompts, padding and a whole sequence are masked."""
    lengths = torch.tensor([LENGTH, 6, 7, 8])
    data = {
        "input_ids": torch.randint(12, (SEQUENCES, LENGTH)),
        "token_mask": ((torch.arange(LENGTH) < lengths.unsqueeze(1)) & (torch.arange(LENGTH) >= 2)).float(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(SEQUENCES, 1).expand(-1, LENGTH),
        "prev_logprobs": -3 * torch.rand(SEQUENCES, LENGTH), "generation_logprobs": -3 * torch.rand(SEQUENCES, LENGTH),
    }  # fmt: skip
    return data, torch.randn(SEQUENCES, LENGTH, VOCABULARY) * 2


def mask_of(data: dict[str, Tensor]) -> Tensor:
    return (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()


def call(loss_fn: Any, data: Any, logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """As ``prepare_loss_input`` and the step of the worker: by name, with logits that are padded as Megatron's are."""
    assert loss_fn.input_type == "logit"
    return loss_fn(
        data=data, logits=logits, global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=mask_of(data).sum()
    )


def chosen(data: dict[str, Tensor], logits: Tensor, **options: Any) -> Tensor:
    """The tokens to keep, of entropies in float64."""
    entropy = reference.entropy(logits[:, :-1]).float()
    kept = reference.select_tokens(entropy, data["advantages"][:, 1:], RATIO, mask=mask_of(data), **options).mask
    assert 0 < kept.sum() < mask_of(data).sum()
    return kept


def in_plain_torch(data: dict[str, Tensor], logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The loss without us, and its gradient, in which each token's log-probability has a weight."""
    leaf = logits.detach().clone().requires_grad_()
    scores = leaf[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    (of_scores,) = torch.autograd.grad(
        loss := ClippedPGLossFn(CONFIG)(scores, data, 0, mask_of(data).sum())[0], scores, retain_graph=True
    )
    return loss.detach(), torch.autograd.grad(scores, leaf, of_scores * weight)[0]


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_only_a_share_of_the_tokens_has_a_gradient(scope: Any) -> None:
    data, logits = micro_batch()
    loss_fn = pickle.loads(pickle.dumps(loss_of(policy(packed=scope == "sequence"), token_scope=scope)))  # as Ray does
    leaf = logits.clone().requires_grad_()
    padded = torch.cat([leaf, torch.full((SEQUENCES, 3, VOCABULARY), torch.nan)], dim=1)
    loss, metrics = call(loss_fn, data, padded)
    kept = chosen(data, logits, scope=scope)
    expected, gradient = in_plain_torch(data, logits, kept)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], gradient)
    entropies = reference.entropy(logits[:, :-1])[mask_of(data)]
    assert metrics == pytest.approx({
        "loss": loss.item(), "d3s/entropy": float(entropies.mean()),
        "d3s/token_share": int(kept.sum()) / int(mask_of(data).sum()),
    })  # fmt: skip
    assert set(loss_fn.metric_normalizations) == set(metrics)
    del data["generation_logprobs"]  # which NeMo-RL may leave out
    with torch.no_grad():  # an evaluation chooses no tokens
        assert "d3s/token_share" not in call(loss_fn, data, logits)[1]


def test_weights_of_cut_sequences_and_of_off_policy_tokens_multiply() -> None:
    data, logits = micro_batch()
    data["generation_logprobs"][:, :4] = data["prev_logprobs"][:, :4]  # near enough
    data["generation_logprobs"][:, -2:] = data["prev_logprobs"][:, -2:] - 1  # too far
    rule = {"off_policy_rule": "token_mask", "off_policy_low": 0.6, "off_policy_high": 2.0}
    leaf, generator = logits.clone().requires_grad_(), torch.get_rng_state()
    loss, _ = call(loss_of(policy(), 0.5, token_rule="prefix", **rule), data, leaf)
    ratio = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:].exp()
    trusted = mask_of(data) & (ratio >= 0.6) & (ratio <= 2)
    assert 0 < trusted.sum() < mask_of(data).sum()
    torch.set_rng_state(generator)
    weight = torch.where(trusted, ratio, 0) * d3s.random_prefixes(trusted, 0.5).weight
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], in_plain_torch(data, logits, weight)[1])
    for name in ("use_importance_sampling_correction", "force_on_policy_ratio"):
        with pytest.raises(ValueError, match=f"{name}: got True; takes false with off_policy_rule"):
            recipe.D3SLoss(SimpleNamespace(**vars(CONFIG) | {name: True}), policy(), **rule)


def vocabulary_rank(ranks: Ranks, seed: int) -> None:
    """DTensor's columns, 7 and 6 of them, and Megatron's 6 and 6."""
    torch.manual_seed(seed)
    data, whole = micro_batch()
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))
    for megatron in (False, True):
        logits = whole[..., :12] if megatron else whole
        expected, gradient = in_plain_torch(data, logits, chosen(data, logits))
        leaf = logits.chunk(ranks.size, -1)[ranks.rank].clone().requires_grad_()
        given: Tensor = leaf * 1
        if not megatron:
            given = DTensor.from_local(given, mesh, [Shard(2)], shape=logits.shape, stride=logits.stride())
        with installed({"megatron.core.parallel_state": parallel_state(ranks.group, ranks.rank, None)}):
            loss, _ = call(loss_of(policy(ranks.size, megatron=megatron)), data, given)
        torch.testing.assert_close(loss.detach(), expected)
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], gradient.chunk(ranks.size, -1)[ranks.rank])


def test_ranks_that_share_the_vocabulary_choose_as_one() -> None:
    world(2).run(vocabulary_rank, int(torch.randint(2**31, ())))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({}, {"token_ratio_end": 0.5}, "token_ratio_end: got 0.5; takes token_ratio_start, 0.3, since a loss"),
        ({}, {"loss_denominator": "kept"}, "loss_denominator: got 'kept'; takes 'all'"),
        ({}, {"drop_shared_tokens": True}, "drop_shared_tokens: got True; takes false"),
        ({"packed": True}, {}, "sequence_packing.enabled: got True; takes false, or token_scope 'sequence'"),
        ({"packed": True}, {"token_scope": "sequence", "off_policy_rule": "m2po"}, r"sequence_packing\.enabled: got T"),
        ({"fused": True, "megatron": True}, {}, "use_fused_linear_logprobs, fuse_loss: got True; takes false"),
        ({"top_k": 20}, {}, r"generation.top_k and top_p: got \(20, 1.0\); takes null and 1.0"),
        ({"context_parallel": 2}, {}, "context_parallel_size: got 2; takes 1 without Megatron"),
        (
            {"context_parallel": 2, "megatron": True},
            {"token_rule": "random"},
            "token_rule: got 'random'; takes another",
        ),
        ({"tensor_parallel": 2}, {"token_rule": "random"}, "token_rule: got 'random'; takes another with such par"),
    ],
)
def test_a_choice_of_tokens_is_refused(given: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(policy(**given), **options)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({}, "loss_fn: got 'ClippedPGLossFn'; takes a D3SLoss"),
        ({"draft": {"enabled": True}}, r"draft\.enabled: got True; takes false: the draft model learns from logits"),
        ({"quant_cfg": "fp8"}, "quant_cfg: got 'fp8'; takes null: it needs a worker of its own"),
    ],
)
def test_an_update_without_logits_is_refused(cfg: dict[str, Any], message: str) -> None:
    """tests/megatron has its update."""
    loss_fn = loss_of(policy(megatron=True)) if cfg else ClippedPGLossFn(CONFIG)
    with pytest.raises(ValueError, match=message):
        head.D3SMegatronPolicyWorker(cfg).train(data={}, loss_fn=loss_fn, eval_mode=False)


# ---- rollouts --------------------------------------------------------------------------------------------------------


class Rows(dict[str, Tensor]):
    """``BatchedDataDict``."""

    def select_indices(self, indices: Tensor) -> Rows:
        return Rows({name: values[indices] for name, values in self.items()})


class Policy:
    """``Policy`` of ``lm_policy.py``: returns what it would hand to the workers."""

    def __init__(self, *, config: dict[str, Any]) -> None:
        self.cfg = config

    def train(self, data: Rows, loss_fn: Any, *others: Any, **named: Any) -> tuple[Any, ...]:
        return data, loss_fn, named


def batch_of(groups: int, group: int) -> Rows:
    """A batch in which prompts have advantages too, of other rollouts."""
    mask = torch.ones(groups * group, LENGTH)
    mask[:, :2] = 0
    of_rollouts = torch.randn(groups * group, 1)
    advantages = torch.where(mask.bool(), of_rollouts, of_rollouts.flip(0))
    rows = {"advantages": advantages, "token_mask": mask, "sample_mask": mask[:, -1].clone()}
    return Rows(input_ids=torch.arange(groups * group), **rows)


def test_the_update_gets_the_kept_rollouts() -> None:
    """2 of each of 3 groups are asked for, and rounded up to a step's 9. A rollout without tokens takes no place."""
    data = batch_of(3, 6)
    made = recipe.policy_class(Policy, 6, rollouts_start=2, rollouts_end=2)
    smaller, *others = made(config={"train_global_batch_size": 9}).train(data, "loss", timer="timer")
    kept = reference.select_rollouts(data["advantages"][:, -1].view(1, 18), 9).flatten()
    assert all(smaller[name].equal(values[kept]) for name, values in data.items())
    assert others == ["loss", {"timer": "timer"}]
    data = batch_of(1, 4)
    data["advantages"] = torch.tensor([9.0, -1.0, 1.0, 2.0]).unsqueeze(1).expand(-1, LENGTH)
    data["sample_mask"][0] = 0
    assert recipe.keep_rollouts(data, 4, 1, rollouts_start=2, rollouts_end=2)["input_ids"].tolist() == [1, 3]


def test_a_policy_with_the_head_has_its_workers() -> None:
    """In the environment of NeMo-RL's own workers."""
    environments = {f"{WORKERS}.MegatronPolicyWorker": "mcore"}
    registry = SimpleNamespace(ACTOR_ENVIRONMENT_REGISTRY=environments)
    with installed({"nemo_rl.distributed.ray_actor_environment_registry": registry}):
        factory = recipe.with_head(recipe.policy_class(dict, 6))
    (name,) = factory(config={"seed": 1}).keys() - {"config"}
    path = factory(config={"seed": 1})[name]
    assert (name, environments[path]) == ("worker_extension_cls_fqn", "mcore")
    module, _, worker = path.rpartition(".")
    assert getattr(sys.modules[module], worker) is head.D3SMegatronPolicyWorker


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((6, 3), {"rollouts_end": 3}, "rollouts_end: got 3; takes rollouts_start, which is 2"),
        ((6, 3), {"advantages_from": "kept"}, "advantages_from: got 'kept'; takes 'all'"),
        ((5, 3), {}, "group_size: got 5; takes a divisor of 18"),
        ((6, 0), {}, "multiple_of: got 0; takes a divisor of 18"),
        ((6, 9), {}, "advantages: got 'different ones for the tokens of a rollout'"),
    ],
)
def test_a_choice_of_rollouts_is_refused(sizes: tuple[int, int], options: dict[str, Any], message: str) -> None:
    data = batch_of(3, 6)
    if message.startswith("advantages: "):
        data["advantages"] = data["advantages"] + torch.arange(LENGTH)
    with pytest.raises(ValueError, match=message):
        recipe.keep_rollouts(data, *sizes, **{"rollouts_start": 2, "rollouts_end": 2, **options})
