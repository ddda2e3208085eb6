"""The head in place of a model's logits, on tensor-, context- and data-parallel ranks, against one process in float64:
log-probabilities, entropies, and the gradients of all parameters.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
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

from d3s_kernels.integrations.megatron import logprob_entropy

VOCABULARY, TRUE = 96, 90  # with padding, and without
DDP = {"overlap_grad_reduce": True, "bucket_size": 2_000}


def compare(ranks: Ranks, seed: int, tensor: int, context: int, options: dict[str, Any]) -> None:
    """Draws rows, a mask and options from the seed."""
    arrange(tensor, context)
    draw = Random(seed)
    torch.manual_seed(seed)
    thd = context > 1 or draw.random() < 0.5
    lengths, form = ((8, 16, 4), (1, 28)) if thd else ([16], (3, 16))
    if context > 1 and not options.get("sequence_parallel") and draw.random() < 0.5:
        lengths, form = (4, 24), (1, 28)
    cut = draw.choice((None, TRUE))
    ids, labels = (torch.randint(0, cut or VOCABULARY, form) for _ in range(2))
    labels[torch.rand(form) < 0.1] = -100
    density = draw.choice((0.0, 0.1, 0.3, 0.9, None))
    mask = None if density is None else torch.rand(form) < density
    if draw.random() < 0.3 and mask is not None:
        mask[:, : form[1] // 2] = False  # all rows that count are on one sequence-parallel rank
    weights = torch.randn(form)
    if parallel_state.get_data_parallel_rank():  # the other data rank has other rows
        ids, labels, weights = ids.flip(-1), labels.flip(-1), weights.flip(-1)
    temperature: Any = draw.choice((1.0, 0.7, 0.5 + torch.rand(form), 0.5 + torch.rand(form[0], 1)))
    mine = (lambda values: values if values is None else my_rows(values, lengths)) if thd else lambda values: values
    of_mine = mine(mask)
    head_options: dict[str, Any] = {"vocab_size": cut}
    if of_mine is not None and draw.random() < 0.5:
        head_options["max_rows"] = int(of_mine.sum()) + draw.choice((0, 2))
    if isinstance(temperature, torch.Tensor):
        head_options["temperature"] = mine(temperature.expand(form)) if thd else temperature
    else:
        head_options["temperature"] = temperature
    model = tiny_model(VOCABULARY, seed=seed, **options)
    extra = {"packed_seq_params": packed(lengths)} if thd else {}
    logprob, entropy = logprob_entropy(
        model, mine(ids), labels=mine(labels), mask=of_mine, **extra, **head_options
    )  # fmt: skip
    ((logprob - 0.3 * entropy) * mine(weights)).sum().backward()

    reference = reference_of(model)
    logits = reference(ids, None, None, **extra)[..., :cut]
    each = temperature.expand(form).unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
    wanted = logprobs_of(logits, labels.clamp(min=0), each)
    wanted = torch.where(labels == -100, 0, wanted[0]), wanted[1]
    if mask is not None:
        wanted = tuple(torch.where(mask, each, 0) for each in wanted)
    for ours, exact in zip((logprob, entropy), wanted, strict=True):
        torch.testing.assert_close(ours.double(), mine(exact), rtol=1e-5, atol=1e-5)
    ((wanted[0] - 0.3 * wanted[1]) * weights).sum().backward()
    found = full_gradients(model)
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad
        if "ddp" in options:  # Megatron's mean over the data and context ranks
            group = parallel_state.get_data_parallel_group()
            gradient = gathered(gradient[None], 0, group).sum(0) / (group.size() * context)
        if not gradient.any():
            assert not found[name].any(), name
            continue
        error = (found[name].double() - gradient).norm() / gradient.norm()
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("ddp", [None, {"overlap_grad_reduce": False}, DDP])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks(sequence_parallel: bool, tied: bool, ddp: Any) -> None:
    options = {"sequence_parallel": sequence_parallel, "tied": tied} | ({} if ddp is None else {"ddp": ddp})
    world(2).run(compare, torch.randint(2**31, ()).item(), 2, 1, options)
