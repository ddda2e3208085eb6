"""NeMo-RL's loss with a choice of tokens, called by stand-ins that are written from the table of what is assumed."""

from __future__ import annotations

import importlib
import inspect
import pickle
import tempfile
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_stand_ins
from ranks import Ranks, world
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import d3s_kernels as d3s
from d3s_kernels import reference
from d3s_kernels.integrations._assumptions import Assumption, load
from d3s_kernels.integrations.nemo_rl import D3SLoss, keep_rollouts
from d3s_kernels.integrations.nemo_rl.table import NEMO_RL

SEQUENCES, LENGTH, VOCABULARY, RATIO = 4, 9, 13, 0.3
CALLS = [row for row in NEMO_RL.assumptions if "loss_fn(data=" in row.expected]
PACKED = next(row for row in CALLS if "SequencePackingLossWrapper" in row.place)


class InputType(Enum):
    LOGIT, LOGPROB = "logit", "logprob"


class PolicyLoss:
    """A clipped policy loss with a KL term, called and normalised as ``ClippedPGLossFn`` is."""

    input_type, loss_type = InputType.LOGPROB, "token_level"

    def __init__(self) -> None:
        self.metric_normalizations = {"loss": "tokens", "num_valid_samples": "none", "approx_entropy": "tokens"}

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        advantages, before = data["advantages"][:, 1:], data["prev_logprobs"][:, 1:]
        ratios = (next_token_logprobs - before).exp()
        terms = torch.max(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2)) + 0.1 * (ratios - 1) ** 2
        loss = (terms * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}


def policy(tensor_parallel: int = 1, **options: Any) -> dict[str, Any]:
    """``config.policy``, of the DTensor workers unless ``megatron=True``."""
    megatron, packed = options.pop("megatron", False), options.pop("packed", False)
    parallel = {"context_parallel_size": options.pop("context_parallel", 1)}
    return {
        "megatron_cfg": {"enabled": megatron, "tensor_model_parallel_size": tensor_parallel, **parallel},
        "dtensor_cfg": {"tensor_parallel_size": tensor_parallel, **parallel},
        "sequence_packing": {"enabled": packed, "fuse_loss": options.pop("fuse_loss", False)},
        "generation": {"top_k": None, "top_p": 1.0, "temperature": 0.7, **options},
    }


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    with trainer_stand_ins.installed(tmp_path, NEMO_RL.assumptions):
        yield


def micro_batch(seed: int | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """The fields of a micro-batch, and its logits ``[B, S, V]``. Prompts, padding and a whole sequence are masked."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    lengths = torch.tensor([LENGTH, 6, 7, 8])
    answers = (torch.arange(LENGTH) < lengths.unsqueeze(1)) & (torch.arange(LENGTH) >= 2)
    logits = torch.randn(SEQUENCES, LENGTH, VOCABULARY, generator=generator) * 2
    data = {
        "input_ids": torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator),
        "input_lengths": lengths,
        "token_mask": answers.float(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(SEQUENCES, 1, generator=generator).expand(-1, LENGTH),
        "prev_logprobs": -3 * torch.rand(SEQUENCES, LENGTH, generator=generator),
    }
    return data, logits


def mask_of(data: dict[str, Tensor]) -> Tensor:
    return (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()


def chosen(data: dict[str, Tensor], logits: Tensor, ratio: float = RATIO, **options: Any) -> Tensor:
    """The tokens to keep, of entropies in float64."""
    entropy = reference.entropy(logits[:, :-1]).float()
    kept = reference.select_tokens(entropy, data["advantages"][:, 1:], ratio, mask=mask_of(data), **options).mask
    assert 0 < kept.sum() < mask_of(data).sum()
    return kept


def call(row: Assumption, loss: Any, data: Any, logits: Tensor, tokens: int | None = None) -> tuple[Tensor, Any]:
    """Calls the loss as NeMo-RL does at the place of the row, with the number of valid tokens of all micro-batches."""
    function = load(row.place)
    valid = {"seqs": data["sample_mask"].sum(), "toks": torch.tensor(tokens or int(mask_of(data).sum()))}
    given = {
        "self": SimpleNamespace(loss_fn=loss, _apply_temperature_scaling=lambda logits: logits), "loss_fn": loss,
        **{f"global_valid_{name}": number for name, number in valid.items()},
        **dict.fromkeys(("data", "data_dict", "mb", "unpadded_seq_data"), data),
        "loss_input": {"logits": logits}, "logits": logits,
        "next_token_logits": logits, "logit_start": 0, "logit_length": 0,
    }  # fmt: skip
    results = function(**{name: given[name] for name in inspect.signature(function).parameters})
    return next(result for result in results if isinstance(result, tuple))


def call_packed(loss: Any, data: dict[str, Tensor], packed: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """As ``SequencePackingLossWrapper`` calls it: for each sequence, with a view of the packed logits ``[1, T, V]``."""
    total, metrics, start = torch.zeros(()), [], 0
    for number, length in enumerate(data["input_lengths"].tolist()):
        one = {name: values[number : number + 1] for name, values in data.items()}
        one = {name: values[:, :length] if values.dim() > 1 else values for name, values in one.items()}
        logits = packed.narrow(1, start, length)
        one_loss, one_metrics = call(PACKED, loss, one, logits, tokens=int(mask_of(data).sum()))
        total, start = total + one_loss, start + length
        metrics.append(one_metrics)
    return total, metrics


def pack(data: dict[str, Tensor], values: Tensor) -> Tensor:
    """``[B, S, ...]`` to ``[1, T, ...]``, without padding."""
    return torch.cat([row[:length] for row, length in zip(values, data["input_lengths"].tolist(), strict=True)])[None]


def in_plain_torch(data: dict[str, Tensor], logits: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The loss without us, and its gradient through the log-probabilities of the kept tokens."""
    leaf = logits.detach().clone().requires_grad_()
    scores = leaf[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    scores = torch.where(kept, scores, scores.detach())
    tokens = mask_of(data).sum()
    loss, _ = PolicyLoss()(scores, data, global_valid_seqs=data["sample_mask"].sum(), global_valid_toks=tokens)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def test_the_stand_in_is_called_as_the_table_says() -> None:
    (takes,) = (
        row for row in NEMO_RL.assumptions if row.place.endswith("ClippedPGLossFn.__call__") and row.kind == "takes"
    )
    assert list(inspect.signature(PolicyLoss.__call__).parameters) == takes.expected.strip("()").split(", ")


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.place.rpartition(".")[0][-30:])
def test_all_tokens_kept(row: Assumption) -> None:
    """Loss, metrics and gradient are NeMo-RL's, to the bit."""
    data, logits = micro_batch()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, metrics = call(row, D3SLoss(PolicyLoss(), policy(), token_ratio=1.0), data, ours)
    scores, entropies = d3s.logprob_entropy(theirs[:, :-1], data["input_ids"][:, 1:])
    tokens = mask_of(data).sum()
    expected, expected_metrics = PolicyLoss()(scores, data, data["sample_mask"].sum(), tokens)
    assert torch.equal(loss, expected)
    assert metrics.pop("d3s/token_share") == 1
    torch.testing.assert_close(metrics.pop("d3s/entropy"), (entropies * mask_of(data)).sum().item() / tokens.item())
    assert metrics == expected_metrics
    assert torch.equal(*(torch.autograd.grad(value, leaf)[0] for value, leaf in ((loss, ours), (expected, theirs))))


@pytest.mark.parametrize(
    "options", [{}, {"token_scope": "sequence"}, {"token_rule": "entropy"}, {"token_rule": "entropy_quantile"}]
)
def test_a_share_of_the_tokens(options: dict[str, Any]) -> None:
    data, logits = micro_batch()
    loss_fn = pickle.loads(pickle.dumps(D3SLoss(PolicyLoss(), policy(), token_ratio=RATIO, **options)))  # as Ray does
    leaf = logits.clone().requires_grad_()
    padded = torch.cat([leaf, torch.full((SEQUENCES, 3, VOCABULARY), torch.nan)], dim=1)  # Megatron pads sequences
    loss, metrics = call(CALLS[0], loss_fn, data, padded, tokens=None)
    (gradient,) = torch.autograd.grad(loss, leaf)

    kept = chosen(data, logits, **{name.removeprefix("token_"): value for name, value in options.items()})
    expected, expected_gradient = in_plain_torch(data, logits, kept)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert not gradient[:, :-1][~kept].any()
    assert not gradient[:, -1].any()
    tokens = int(mask_of(data).sum())
    assert metrics["d3s/token_share"] == int(kept.sum()) / tokens
    entropies = reference.entropy(logits[:, :-1])[mask_of(data)]
    assert metrics["d3s/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-6)
    assert metrics["loss"] == loss.item()


def test_the_sum_over_micro_batches_is_the_metric() -> None:
    loss_fn, batches = D3SLoss(PolicyLoss(), policy(), token_ratio=RATIO), [micro_batch() for _ in range(3)]
    tokens = sum(int(mask_of(data).sum()) for data, _ in batches)
    found = [call(CALLS[0], loss_fn, data, logits.requires_grad_(), tokens)[1] for data, logits in batches]
    entropies = torch.cat([reference.entropy(logits[:, :-1].detach())[mask_of(data)] for data, logits in batches])
    assert sum(metrics["d3s/entropy"] for metrics in found) == pytest.approx(float(entropies.mean()), rel=1e-6)
    kept = sum(int(chosen(data, logits).sum()) for data, logits in batches)
    assert sum(metrics["d3s/token_share"] for metrics in found) == pytest.approx(kept / tokens)


def test_what_nemo_rl_reads_of_its_loss() -> None:
    loss_fn = D3SLoss(PolicyLoss(), policy())
    assert (loss_fn.input_type, loss_fn.loss_type) == (InputType.LOGIT, "token_level")
    assert loss_fn.metric_normalizations["d3s/entropy"] == loss_fn.metric_normalizations["d3s/token_share"] == "tokens"
    assert not hasattr(loss_fn, "use_fused_linear_logprobs")


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_packed_sequences(scope: Any) -> None:
    """The sequences of a micro-batch are one pool, though the loss is called for each; evaluations are not in it."""
    loss_fn = D3SLoss(PolicyLoss(), policy(packed=True), token_ratio=RATIO, token_scope=scope)
    for _ in range(2):
        data, logits = micro_batch()
        leaf = pack(data, logits).requires_grad_()
        with torch.no_grad():
            call_packed(loss_fn, data, leaf)
        loss, metrics = call_packed(loss_fn, data, leaf * 1)
        (gradient,) = torch.autograd.grad(loss, leaf)
        kept = chosen(data, logits, scope=scope)
        expected, expected_gradient = in_plain_torch(data, logits, kept)
        torch.testing.assert_close(loss.detach(), expected)
        torch.testing.assert_close(gradient, pack(data, expected_gradient))
        assert not gradient[~pack(data, torch.nn.functional.pad(kept, (0, 1)))].any()
        entropies = reference.entropy(logits[:, :-1])[mask_of(data)]
        assert sum(one["d3s/entropy"] for one in metrics) == pytest.approx(float(entropies.mean()), rel=1e-6)
        assert not any("d3s/token_share" in one for one in metrics)


def test_each_packed_micro_batch_is_a_pool() -> None:
    """Also if two forward passes come before their backward passes, and if the next logits have the same place."""
    loss_fn = D3SLoss(PolicyLoss(), policy(packed=True), token_ratio=RATIO)
    batches = [micro_batch() for _ in range(2)]
    batches[1][0]["advantages"] = batches[1][0]["advantages"].sign() * 9  # they would be most of a common pool
    leaves = [pack(data, logits).requires_grad_() for data, logits in batches]
    losses = [call_packed(loss_fn, data, leaf)[0] for (data, _), leaf in zip(batches, leaves, strict=True)]
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, leaves, strict=True)]
    again, _ = call_packed(loss_fn, batches[1][0], leaves[1])
    gradients.append(torch.autograd.grad(again, leaves[1])[0])
    for gradient, (data, logits) in zip(gradients, [*batches, batches[1]], strict=True):
        _, expected = in_plain_torch(data, logits, chosen(data, logits))
        torch.testing.assert_close(gradient, pack(data, expected))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def of_megatron(ranks: Ranks, tensor_parallel: bool) -> None:
    """Tells the stand-in that Megatron's ranks share the vocabulary, or that they have other data."""
    state = importlib.import_module("megatron.core.parallel_state")
    state.get_context_parallel_world_size = lambda: 1
    state.get_tensor_model_parallel_world_size = lambda: ranks.size if tensor_parallel else 1
    state.get_tensor_model_parallel_rank = lambda: ranks.rank if tensor_parallel else 0
    state.get_tensor_model_parallel_group = lambda: ranks.group
    state.get_data_parallel_group = lambda: None if tensor_parallel else ranks.group


def shared_vocabulary(ranks: Ranks, seed: int) -> None:
    """DTensor's columns, 7 and 6 of them, and Megatron's 6 and 6, whole sequences and packed ones."""
    of_megatron(ranks, tensor_parallel=True)
    data, whole = micro_batch(seed)
    data["input_ids"].clamp_(max=11)
    mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tp",))
    for megatron in (False, True):
        logits = whole[..., :12] if megatron else whole
        kept = chosen(data, logits)
        expected, expected_gradient = in_plain_torch(data, logits, kept)
        for packed in (False, True):
            options = policy(ranks.size, megatron=megatron, packed=packed)
            loss_fn = D3SLoss(PolicyLoss(), options, token_ratio=RATIO)
            laid_out, gradient_of = (pack(data, values) if packed else values for values in (logits, expected_gradient))
            leaf = laid_out.chunk(ranks.size, -1)[ranks.rank].clone().requires_grad_()
            given: Tensor = leaf * 1
            if not megatron:
                given = DTensor.from_local(given, mesh, [Shard(2)], shape=laid_out.shape, stride=laid_out.stride())
                assert torch.equal(given.to_local(), distribute_tensor(laid_out, mesh, [Shard(2)]).to_local())
            loss, _ = (call_packed if packed else lambda *args: call(CALLS[0], *args))(loss_fn, data, given)
            torch.testing.assert_close(loss.detach(), expected)
            (gradient,) = torch.autograd.grad(loss, leaf)
            torch.testing.assert_close(gradient, gradient_of.chunk(ranks.size, -1)[ranks.rank])


def other_data(ranks: Ranks, seed: int) -> None:
    """One share of the tokens of all ranks, in their micro-batches; or a share of each rank's."""
    of_megatron(ranks, tensor_parallel=False)
    batches = [micro_batch(seed + rank) for rank in range(ranks.size)]
    for number, (data, _) in enumerate(batches):
        data["advantages"] = data["advantages"] * (1 + number)
    pooled = {name: torch.cat([data[name] for data, _ in batches]) for name in batches[0][0]}
    of_all = chosen(pooled, torch.cat([logits for _, logits in batches])).chunk(ranks.size)
    data, logits = batches[ranks.rank]
    of_one = chosen(data, logits)
    for pool, kept in (("data_parallel", of_all[ranks.rank]), ("micro_batch", of_one)):
        for megatron, packed in ((False, False), (True, True)):
            options = policy(megatron=megatron, packed=packed)
            loss_fn = D3SLoss(PolicyLoss(), options, token_ratio=RATIO, token_pool=pool)
            leaf = (pack(data, logits) if packed else logits.clone()).requires_grad_()
            loss, _ = (call_packed if packed else lambda *args: call(CALLS[0], *args))(loss_fn, data, leaf * 1)
            _, expected = in_plain_torch(data, logits, kept)
            torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], pack(data, expected) if packed else expected)


def installed_on(ranks: Ranks, task: Callable[..., None], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, trainer_stand_ins.installed(Path(folder), NEMO_RL.assumptions):
        task(ranks, seed)


@pytest.mark.parametrize("task", [shared_vocabulary, other_data])
def test_ranks(task: Callable[..., None]) -> None:
    world(2).run(installed_on, task, int(torch.randint(2**31, ())), D3S_KERNELS_CHECK="1")


# ---- rollouts --------------------------------------------------------------------------------------------------------


class Batch(dict[str, Tensor]):
    """As ``BatchedDataDict``, of tensors alone."""

    def select_indices(self, indices: Tensor) -> Batch:
        return Batch({name: values[indices] for name, values in self.items()})


def batch_of(groups: int, size: int) -> Batch:
    advantages = torch.randn(groups, size) * torch.arange(1, groups + 1).unsqueeze(1)
    answers = (torch.arange(LENGTH) >= 3).expand(groups * size, -1)
    fields = {"advantages": torch.where(answers, advantages.view(-1, 1), 99.0), "token_mask": answers.float()}
    return Batch(fields, sample_mask=torch.ones(groups * size), input_ids=torch.arange(groups * size))


@pytest.mark.parametrize(("rollouts", "multiple", "kept"), [(0.5, 3, 9), (2, 6, 6), (0.5, 18, 18), (1, 1, 18)])
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_rollouts(rollouts: float, multiple: int, kept: int, scope: Any) -> None:
    data = batch_of(3, 6)
    smaller = keep_rollouts(data, 6, multiple, rollouts=rollouts, rollout_scope=scope)
    advantages = data["advantages"][:, -1].view(3, 6)
    expected = reference.select_rollouts(advantages, kept // 3, scope=scope).flatten()
    assert type(smaller) is Batch
    assert torch.equal(smaller["input_ids"], data["input_ids"][expected])
    assert torch.equal(smaller["advantages"], data["advantages"][expected])


def test_a_rollout_without_tokens_counts_as_one_without_an_advantage() -> None:
    data = batch_of(1, 4)
    data["advantages"] = torch.tensor([9.0, -1.0, 1.0, 2.0]).unsqueeze(1).expand(-1, LENGTH)
    data["sample_mask"][0] = 0
    assert keep_rollouts(data, 4, 1, rollouts=2)["input_ids"].tolist() == [1, 3]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({}, {"token_ratio": 0}, r"token_ratio: got 0; takes a number in \(0, 1\]"),
        ({}, {"token_rule": "best"}, "token_rule: got 'best'; takes 'advantage_entropy' or"),
        ({}, {"token_pool": "all"}, "token_pool: got 'all'; takes 'data_parallel' or 'micro_batch'"),
        (
            {}, {"token_rule": "entropy_quantile", "token_pool": "data_parallel"},
            "token_pool: got 'data_parallel' with token_rule 'entropy_quantile'; takes 'micro_batch'",
        ),
        ({"top_k": 20}, {}, "generation.top_k: got 20; takes null"),
        ({"top_p": 0.9}, {}, "generation.top_p: got 0.9; takes 1.0"),
        ({"fuse_loss": True}, {}, "sequence_packing.fuse_loss: got True; takes false"),
        ({"context_parallel": 2}, {}, "context_parallel_size: got 2; takes 1"),
        ({"context_parallel": 2, "megatron": True}, {}, "context_parallel_size: got 2; takes 1"),
        ({"tensor_parallel": 2}, {"token_rule": "random"}, "token_rule: got 'random'; takes another with tensor"),
        ({"tensor_parallel": 2}, {"token_pool": "data_parallel"}, "token_pool: got 'data_parallel'; takes 'micro_b"),
    ],
)  # fmt: skip
def test_tokens_refuse(given: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        D3SLoss(PolicyLoss(), policy(**given), **options)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_type", InputType.LOGIT, "loss_fn.input_type: got 'LOGIT'; takes LOGPROB"),
        ("use_fused_linear_logprobs", True, "use_fused_linear_logprobs: got True; takes false"),
    ],
)
def test_losses_that_are_refused(name: str, value: Any, message: str) -> None:
    loss_fn = PolicyLoss()
    setattr(loss_fn, name, value)
    with pytest.raises(ValueError, match=message):
        D3SLoss(loss_fn, policy())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((6, 3), {"rollouts": 1.5}, r"rollouts: got 1\.5; takes a share"),
        ((5, 3), {}, "group_size: got 5 with 18 rows; takes a divisor of 18"),
        ((6, 4), {}, "multiple: got 4 with 18 rows; takes a divisor of 18"),
        ((6, 0), {}, "multiple: got 0 with 18 rows; takes a divisor of 18"),
    ],
)
def test_rollouts_refuse(arguments: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keep_rollouts(batch_of(3, 6), *arguments, **options)


def test_advantages_that_differ_within_a_rollout_are_refused() -> None:
    data = batch_of(3, 6)
    data["advantages"] = data["advantages"] + torch.arange(LENGTH)
    with pytest.raises(ValueError, match="advantages: got different ones for the tokens of a rollout"):
        keep_rollouts(data, 6, 3)


@pytest.mark.parametrize(
    ("place", "use"),
    [
        ("ClippedPGLossFn.__call__", lambda: D3SLoss(PolicyLoss(), policy())),
        ("select_indices", lambda: keep_rollouts(batch_of(3, 6), 6, 3)),
    ],
)
def test_a_nemo_rl_that_differs_is_refused(place: str, use: Callable[[], Any], tmp_path: Path) -> None:
    rows = [
        row._replace(expected="(self, other)") if row.place.endswith(place) and row.kind == "takes" else row
        for row in NEMO_RL.assumptions
    ]
    message = rf"{place} takes .*found it takes \(self, other\)"
    with trainer_stand_ins.installed(tmp_path / "other", rows), pytest.raises(RuntimeError, match=message):
        use()
