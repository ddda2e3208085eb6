"""The recipe for NeMo-RL, on a stand-in for the classes that it inherits and for the lines that call it."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Ranks, world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import d3s_kernels as d3s
from d3s_kernels import reference

RECIPE = Path(__file__).parents[1] / "examples" / "trainers" / "d3s_nemo_rl.py"
SEQUENCES, LENGTH, VOCABULARY, RATIO = 4, 9, 13, 0.3
CONFIG = SimpleNamespace(
    ratio_clip=0.2, reference_policy_kl_penalty=0.1, use_importance_sampling_correction=False,
    force_on_policy_ratio=False,
)  # fmt: skip


# ---- the trainer: written from nemo_rl/algorithms/loss and nemo_rl/models/policy at 7ea279a, 2026-08-22 --------------


class LossInputType(Enum):
    LOGIT, LOGPROB = "logit", "logprob"


class MetricNormalizer(Enum):
    TOKENS, NONE = "tokens", "none"


class ClippedPGLossFn:
    """``loss_functions.py``: a clipped loss and a KL term, which see all log-probabilities; of token level."""

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.clip, self.penalty = cfg.ratio_clip, cfg.reference_policy_kl_penalty
        self.metric_normalizations = {"loss": MetricNormalizer.TOKENS, "num_valid_samples": MetricNormalizer.NONE}

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        advantages, before = data["advantages"][:, 1:], data["prev_logprobs"][:, 1:]
        ratios = (next_token_logprobs - before).exp()
        losses = torch.max(-advantages * ratios, -advantages * ratios.clamp(1 - self.clip, 1 + self.clip))
        loss = ((losses + self.penalty * (ratios - 1) ** 2) * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}


def call(loss_fn: Any, data: Any, logits: Tensor, tokens: int | None = None) -> tuple[Tensor, dict[str, Any]]:
    """``prepare_loss_input`` and the call of the loss: by name, with the number of tokens of all micro-batches."""
    assert loss_fn.input_type is LossInputType.LOGIT
    valid = torch.tensor(tokens or int(mask_of(data).sum()))
    return loss_fn(data=data, global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=valid, logits=logits)


def call_packed(loss_fn: Any, data: dict[str, Tensor], packed: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """``SequencePackingLossWrapper``: a call for each sequence of ``[1, T, V]``, and the sums of what they return."""
    total, sums, start = torch.zeros(()), {}, 0
    for number, length in enumerate(data["input_lengths"].tolist()):
        one = {name: values[number : number + 1] for name, values in data.items()}
        one = {name: values[:, :length] if values.ndim > 1 else values for name, values in one.items()}
        loss, metrics = call(loss_fn, one, packed.narrow(1, start, length), int(mask_of(data).sum()))
        total, start = total + loss, start + length
        sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
    return total, sums


class Rows(dict[str, Tensor]):
    """``BatchedDataDict``."""

    def select_indices(self, indices: Tensor) -> Rows:
        return Rows({name: values[indices] for name, values in self.items()})


class Policy:
    """``Policy`` of ``lm_policy.py``: returns what it would hand to the workers."""

    def __init__(self, *, config: dict[str, Any]) -> None:
        self.cfg = config

    def train(
        self, data: Rows, loss_fn: Any, eval_mode: bool = False, gbs: Any = None, mbs: Any = None, timer: Any = None,
        check_dim_skip_keys: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        return data, loss_fn, eval_mode, timer


def policy(
    tensor_parallel: int = 1, context_parallel: int = 1, megatron: bool = False, packed: bool = False,
    fused: bool = False, fuse_loss: bool = False, **generation: Any,
) -> dict[str, Any]:  # fmt: skip
    """``config.policy``, of the DTensor workers unless ``megatron=True``."""
    megatron_cfg = {"tensor_model_parallel_size": tensor_parallel, "context_parallel_size": context_parallel}
    return {
        "megatron_cfg": {"enabled": megatron, "use_fused_linear_logprobs": fused, **megatron_cfg},
        "dtensor_cfg": {"tensor_parallel_size": tensor_parallel, "context_parallel_size": context_parallel},
        "sequence_packing": {"enabled": packed, "fuse_loss": fuse_loss},
        "generation": {"top_k": None, "top_p": 1.0, **generation},
    }


@contextmanager
def installed(**modules: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


def load() -> ModuleType:
    """The recipe, as ``d3s_nemo_rl`` in the modules, which pickle needs."""
    interfaces = SimpleNamespace(LossInputType=LossInputType, MetricNormalizer=MetricNormalizer)
    losses = SimpleNamespace(ClippedPGLossFn=ClippedPGLossFn)
    spec = importlib.util.spec_from_file_location("d3s_nemo_rl", RECIPE)
    module = sys.modules["d3s_nemo_rl"] = importlib.util.module_from_spec(spec)
    with installed(**{"nemo_rl.algorithms.loss": losses, "nemo_rl.algorithms.loss.interfaces": interfaces}):
        spec.loader.exec_module(module)
    return module


recipe = load()
ALIKE = {"token_ratio_start": RATIO, "token_ratio_end": RATIO, "loss_denominator": "all"}


def loss_of(policy: dict[str, Any], ratio: float = RATIO, **options: Any) -> Any:
    ratios = {"token_ratio_start": ratio, "token_ratio_end": ratio}
    return recipe.D3SLoss(CONFIG, policy, **{**ratios, "loss_denominator": "all", **options})


# ---- tokens ----------------------------------------------------------------------------------------------------------


def micro_batch() -> tuple[dict[str, Tensor], Tensor]:
    """The fields of a micro-batch, and its logits ``[B, S, V]``. Prompts, padding and a whole sequence are masked."""
    lengths = torch.tensor([LENGTH, 6, 7, 8])
    data = {
        "input_ids": torch.randint(12, (SEQUENCES, LENGTH)),
        "input_lengths": lengths,
        "token_mask": ((torch.arange(LENGTH) < lengths.unsqueeze(1)) & (torch.arange(LENGTH) >= 2)).float(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(SEQUENCES, 1).expand(-1, LENGTH),
        "prev_logprobs": -3 * torch.rand(SEQUENCES, LENGTH), "generation_logprobs": -3 * torch.rand(SEQUENCES, LENGTH),
    }  # fmt: skip
    return data, torch.randn(SEQUENCES, LENGTH, VOCABULARY) * 2


def mask_of(data: dict[str, Tensor]) -> Tensor:
    return (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()


def chosen(data: dict[str, Tensor], logits: Tensor, **options: Any) -> Tensor:
    """The tokens to keep, of entropies in float64."""
    entropy = reference.entropy(logits[:, :-1]).float()
    kept = reference.select_tokens(entropy, data["advantages"][:, 1:], RATIO, mask=mask_of(data), **options).mask
    assert 0 < kept.sum() < mask_of(data).sum()
    return kept


def in_plain_torch(data: dict[str, Tensor], logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The loss without us, and its gradient through the log-probabilities of the kept tokens."""
    leaf = logits.detach().clone().requires_grad_()
    scores = leaf[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    scores = torch.where(kept, scores, scores.detach())
    loss, _ = ClippedPGLossFn(CONFIG)(scores, data, data["sample_mask"].sum(), mask_of(data).sum())
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


BY_SEQUENCE = {"token_scope": "sequence"}
OPTIONS = [{}, BY_SEQUENCE, {"token_rule": "entropy"}, {"token_rule": "entropy_quantile"}]


@pytest.mark.parametrize(("options", "packed"), [*((options, False) for options in OPTIONS), (BY_SEQUENCE, True)])
def test_a_share_of_the_tokens(options: dict[str, Any], packed: bool) -> None:
    data, logits = micro_batch()
    loss_fn = pickle.loads(pickle.dumps(loss_of(policy(packed=packed), **options)))  # as Ray does
    leaf = logits.clone().requires_grad_()
    if packed:
        rows = [row[:length] for row, length in zip(leaf, data["input_lengths"].tolist(), strict=True)]
        loss, metrics = call_packed(loss_fn, data, torch.cat(rows)[None])
    else:
        padded = torch.cat([leaf, torch.full((SEQUENCES, 3, VOCABULARY), torch.nan)], dim=1)  # as Megatron's are
        loss, metrics = call(loss_fn, data, padded)
    (gradient,) = torch.autograd.grad(loss, leaf)

    kept = chosen(data, logits, **{name.removeprefix("token_"): value for name, value in options.items()})
    expected, expected_gradient = in_plain_torch(data, logits, kept)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert not gradient[:, :-1][~kept].any()
    assert metrics["d3s/token_share"] == pytest.approx(int(kept.sum()) / int(mask_of(data).sum()))
    entropies = reference.entropy(logits[:, :-1])[mask_of(data)]
    assert metrics["d3s/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-6)
    assert metrics["loss"] == pytest.approx(loss.item())


def test_cut_sequences_have_weights() -> None:
    data, logits = micro_batch()
    leaf, generator = logits.clone().requires_grad_(), torch.get_rng_state()
    (gradient,) = torch.autograd.grad(call(loss_of(policy(), 0.5, token_rule="prefix"), data, leaf)[0], leaf)
    torch.set_rng_state(generator)
    cut = d3s.random_prefixes(mask_of(data), 0.5)
    assert cut.weight.max() > 1
    expected = in_plain_torch(data, logits, cut.mask)[1]
    expected[:, :-1] *= cut.weight[..., None]
    torch.testing.assert_close(gradient, expected)


def test_off_policy_tokens_have_no_gradient() -> None:
    data, logits = micro_batch()
    data["generation_logprobs"][:, :4] = data["prev_logprobs"][:, :4]  # near enough
    data["generation_logprobs"][:, -2:] = data["prev_logprobs"][:, -2:] - 1  # too far
    leaf = logits.clone().requires_grad_()
    loss_fn = loss_of(policy(), 1.0, off_policy_rule="token_mask", off_policy_low=0.6, off_policy_high=2.0)
    (gradient,) = torch.autograd.grad(call(loss_fn, data, leaf)[0], leaf)
    ratio = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:].exp()
    kept = mask_of(data) & (ratio >= 0.6) & (ratio <= 2)
    assert 0 < kept.sum() < mask_of(data).sum()
    expected = in_plain_torch(data, logits, kept)[1]
    expected[:, :-1] *= torch.where(kept, ratio, 0.0)[..., None]
    torch.testing.assert_close(gradient, expected)
    for name in ("use_importance_sampling_correction", "force_on_policy_ratio"):
        config = SimpleNamespace(**vars(CONFIG) | {name: True})
        with pytest.raises(ValueError, match=f"{name}: got True; takes false with off_policy_rule"):
            recipe.D3SLoss(config, policy(), **ALIKE, off_policy_rule="kpop")
    with pytest.raises(ValueError, match=r"sequence_packing\.enabled: got True; takes false"):
        loss_of(policy(packed=True), token_scope="sequence", off_policy_rule="m2po")


def test_metrics_of_micro_batches_are_summed() -> None:
    """As in NeMo-RL, whose sum over micro-batches is the metric; evaluations choose no tokens."""
    loss_fn, batches = loss_of(policy()), [micro_batch() for _ in range(3)]
    for data, _ in batches:
        del data["generation_logprobs"]  # which NeMo-RL may leave out with force_on_policy_ratio
    tokens = sum(int(mask_of(data).sum()) for data, _ in batches)
    found = [call(loss_fn, data, logits.requires_grad_(), tokens)[1] for data, logits in batches]
    entropies = torch.cat([reference.entropy(logits[:, :-1].detach())[mask_of(data)] for data, logits in batches])
    assert sum(metrics["d3s/entropy"] for metrics in found) == pytest.approx(float(entropies.mean()), rel=1e-6)
    with torch.no_grad():
        assert "d3s/token_share" not in call(loss_fn, *batches[0])[1]
    by_tokens = {"loss", "d3s/entropy", "d3s/token_share"}
    assert {n for n, by in loss_fn.metric_normalizations.items() if by is MetricNormalizer.TOKENS} == by_tokens


def vocabulary_rank(ranks: Ranks, seed: int) -> None:
    """DTensor's columns, 7 and 6 of them, and Megatron's 6 and 6."""
    torch.manual_seed(seed)
    data, whole = micro_batch()
    parallel_state = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: ranks.rank, get_tensor_model_parallel_group=lambda: ranks.group
    )
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))
    for megatron in (False, True):
        logits = whole[..., :12] if megatron else whole
        expected, expected_gradient = in_plain_torch(data, logits, chosen(data, logits))
        leaf = logits.chunk(ranks.size, -1)[ranks.rank].clone().requires_grad_()
        given: Tensor = leaf * 1
        if not megatron:
            given = DTensor.from_local(given, mesh, [Shard(2)], shape=logits.shape, stride=logits.stride())
        with installed(**{"megatron.core.parallel_state": parallel_state}):
            loss, _ = call(loss_of(policy(ranks.size, megatron=megatron)), data, given)
        torch.testing.assert_close(loss.detach(), expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, leaf)[0], expected_gradient.chunk(ranks.size, -1)[ranks.rank]
        )


def test_ranks_that_share_the_vocabulary() -> None:
    world(2).run(vocabulary_rank, int(torch.randint(2**31, ())))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({}, {"token_ratio_start": 0}, r"token_ratio_start: got 0; takes a number in \(0, 1\]"),
        ({}, {"token_ratios": 0.2}, "token_ratios: got 0.2, but it is no option"),
        ({}, {"token_ratio_end": 0.5}, "token_ratio_end: got 0.5; takes token_ratio_start, 0.3, since a loss"),
        ({}, {"loss_denominator": "kept"}, "loss_denominator: got 'kept'; takes 'all'"),
        ({}, {"drop_shared_tokens": True}, "drop_shared_tokens: got True; takes false"),
        ({"packed": True}, {}, "sequence_packing.enabled: got True; takes false, or token_scope 'sequence'"),
        ({"fused": True, "megatron": True}, {}, "use_fused_linear_logprobs, fuse_loss: got True; takes false"),
        ({"fuse_loss": True}, {"token_scope": "sequence"}, "use_fused_linear_logprobs, fuse_loss: got True"),
        ({"top_k": 20}, {}, r"generation.top_k and top_p: got \(20, 1.0\); takes null and 1.0"),
        ({"top_p": 0.9}, {}, r"generation.top_k and top_p: got \(None, 0.9\); takes null and 1.0"),
        ({"context_parallel": 2}, {}, "context_parallel_size: got 2; takes 1"),
        ({"tensor_parallel": 2}, {"token_rule": "random"}, "token_rule: got 'random'; takes another with tensor"),
        ({"tensor_parallel": 2}, {"token_rule": "prefix", "ratio": 0.5}, "token_rule: got 'prefix'; takes another"),
    ],
)
def test_tokens_refuse(given: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(policy(**given), **options)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def batch_of(groups: int, group: int) -> Rows:
    """A batch in which prompts have advantages too, of other rollouts."""
    mask = torch.ones(groups * group, LENGTH)
    mask[:, :2] = 0
    of_rollouts = torch.randn(groups * group, 1)
    advantages = torch.where(mask.bool(), of_rollouts, of_rollouts.flip(0))
    rows = {"advantages": advantages, "token_mask": mask, "sample_mask": mask[:, -1].clone()}
    return Rows(input_ids=torch.arange(groups * group), **rows)


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_rollouts(scope: str) -> None:
    """2 of each of 3 groups are asked for, and rounded up to a step's 9."""
    data = batch_of(3, 6)
    made = recipe.policy_class(Policy, 6, rollouts_start=2, rollouts_end=2, rollout_scope=scope)
    smaller, *others = made(config={"train_global_batch_size": 9}).train(data, "loss", timer="timer")
    advantages = data["advantages"][:, -1].view(3, 6)
    keep = {"batch": 9, "group": 3}[scope]
    kept = reference.select_rollouts(advantages.view(1 if scope == "batch" else 3, -1), keep, scope=scope)
    assert torch.equal(smaller["input_ids"], data["input_ids"][kept.flatten()])
    assert torch.equal(smaller["advantages"], data["advantages"][kept.flatten()])
    assert others == ["loss", False, "timer"]


def test_a_rollout_without_tokens_counts_as_one_without_an_advantage() -> None:
    data = batch_of(1, 4)
    data["advantages"] = torch.tensor([9.0, -1.0, 1.0, 2.0]).unsqueeze(1).expand(-1, LENGTH)
    data["sample_mask"][0] = 0
    assert recipe.keep_rollouts(data, 4, 1, rollouts_start=2, rollouts_end=2)["input_ids"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((6, 3), {"rollouts_start": 1.5}, r"rollouts_start: got 1\.5; takes a share"),
        ((6, 3), {"rollouts_end": 3}, "rollouts_end: got 3; takes rollouts_start, which is 2"),
        ((6, 3), {"advantages_from": "kept"}, "advantages_from: got 'kept'; takes 'all'"),
        ((5, 3), {}, "group_size: got 5; takes a divisor of 18"),
        ((6, 4), {}, "multiple_of: got 4; takes a divisor of 18"),
        ((6, 0), {}, "multiple_of: got 0; takes a divisor of 18"),
    ],
)
def test_rollouts_refuse(sizes: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe.keep_rollouts(batch_of(3, 6), *sizes, **{"rollouts_start": 2, "rollouts_end": 2, **options})


def test_a_rollout_with_several_advantages_is_refused() -> None:
    data = batch_of(3, 6)
    data["advantages"] = data["advantages"] + torch.arange(LENGTH)
    with pytest.raises(ValueError, match="advantages: got 'different ones for the tokens of a rollout'"):
        recipe.keep_rollouts(data, 6, 3, rollouts_start=2, rollouts_end=2)
