"""The small model that the tests of the integration share computes what a single process does."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from ranks import Ranks, world
from tiny_megatron import (
    arrange,
    full_gradients,
    gathered,
    logprobs_of,
    my_rows,
    packed,
    parallel_state,
    reference_of,
    tiny_model,
)
from torch import Tensor

LENGTHS = (8, 16, 4)


def _loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    logprob, entropy = logprobs_of(logits, labels)
    return ((logprob - 0.3 * entropy) * weights).sum()


def compare(ranks: Ranks, seed: int, tensor: int, context: int, thd: bool, options: dict[str, Any]) -> None:
    """Megatron's own logits and the gradients behind them, on ranks and in one process in float64."""
    arrange(tensor, context)
    torch.manual_seed(seed)
    lengths, form = (LENGTHS, (1, sum(LENGTHS))) if thd else ([16], (3, 16))
    ids, labels = (torch.randint(0, 90, form) for _ in range(2))
    weights = torch.randn(form)
    data = parallel_state.get_data_parallel_rank()
    if data:  # the other data rank has other rows
        ids, labels, weights = ids.flip(-1), labels.flip(-1), weights.flip(-1)
    model = tiny_model(seed=seed, **options)
    extra = {"packed_seq_params": packed(lengths)} if thd else {}
    positions = torch.arange(form[1]).expand(form)
    logits = model(my_rows(ids, lengths), my_rows(positions, lengths), None, **extra)
    assert logits.shape[-1] == 96 // tensor
    whole = gather_from_tensor_model_parallel_region(logits)
    _loss(whole, my_rows(labels, lengths), my_rows(weights, lengths)).backward()

    reference = reference_of(model)
    wanted = reference(ids, positions, None, **extra)
    torch.testing.assert_close(whole.double(), my_rows(wanted, lengths), rtol=1e-4, atol=1e-4)
    _loss(wanted, labels, weights.double()).backward()
    found = full_gradients(model)
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad
        if "ddp" in options:  # Megatron's mean over the data and context ranks
            group = parallel_state.get_data_parallel_group()
            gradient = gathered(gradient[None], 0, group).sum(0) / (group.size() * context)
        error = (found[name].double() - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, (name, error)


DDP = {"overlap_grad_reduce": True, "bucket_size": 2_000}


@pytest.mark.parametrize(
    ("tensor", "context", "thd", "options"),
    [
        (2, 1, False, {}),
        (2, 1, True, {"sequence_parallel": True}),
        (2, 1, False, {"sequence_parallel": True, "tied": True}),
        (2, 1, True, {"sequence_parallel": True, "ddp": DDP}),
    ],
)
def test_two_ranks(tensor: int, context: int, thd: bool, options: dict[str, Any]) -> None:
    world(2).run(compare, torch.randint(2**31, ()).item(), tensor, context, thd, options)


@pytest.mark.parametrize(
    ("context", "thd", "options"),
    [
        (1, True, {"sequence_parallel": True, "ddp": {"overlap_grad_reduce": False}}),
        (2, True, {"sequence_parallel": True, "ddp": DDP}),
        (2, True, {"tied": True, "ddp": {"use_distributed_optimizer": True, "overlap_param_gather": True} | DDP}),
        (2, False, {"positions": "learned_absolute", "ddp": {}}),
    ],
)
def test_four_ranks(context: int, thd: bool, options: dict[str, Any]) -> None:
    world(4).run(compare, torch.randint(2**31, ()).item(), 2, context, thd, options)
