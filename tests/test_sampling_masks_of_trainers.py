"""The lines of the pages on sampling masks in trainers, on data laid out as in each trainer, against its dense way."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_core import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from ranks import Ranks, world
from torch import Tensor

ROOT = Path(__file__).parents[1]
VOCABULARY, WIDTH, TEMPERATURE = 60, 8, 0.7
OBSERVED: list[int] = []  # the set of a token that the sampler has not drawn


def snippets(page: str) -> dict[str, Any]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        assert all(len(line) <= 120 for line in block.splitlines())
        exec(compile(block, page, "exec"), names)
    return names


PRIME_RL, SLIME, SKYRL = (snippets(f"sampling-masks-{name}.md") for name in ("prime-rl", "slime", "skyrl"))


# ---- the dense way ---------------------------------------------------------------------------------------------------


def dense(logits: Tensor, labels: Tensor, spans: list[list[int]]) -> tuple[Tensor, Tensor]:
    """-inf wherever a set has no token, and a softmax over the whole vocabulary. No set: the whole vocabulary."""
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, span in zip(kept, spans, strict=True):
        row[span or slice(None)] = True
    log_p = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), -1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0)).sum(-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def a_span(label: int) -> list[int]:
    """1 to 6 tokens, with the label among them."""
    others = torch.randperm(VOCABULARY)[: int(torch.randint(6, ()))].tolist()
    return [label, *(token for token in others if token != label)]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], *inputs: Tensor) -> None:
    """The same log-probabilities and entropies, and the same gradients of the inputs."""
    weights = torch.rand(2, *expected[0].shape)
    gradients = [
        torch.autograd.grad((weights[0] * logprob + weights[1] * entropy).sum(), inputs)
        for logprob, entropy in (found, expected)
    ]
    for pair in (*zip(found, expected, strict=True), *zip(*gradients, strict=True)):
        close(*pair)


# ---- prime-rl --------------------------------------------------------------------------------------------------------


def padded(spans: list[list[int]]) -> Tensor:
    """``[1, N, K]``, filled up with -1."""
    width = max(map(len, spans))
    return torch.tensor([[[*span, *[-1] * (width - len(span))] for span in spans]], dtype=torch.int32)


def packed_sequences() -> dict[str, Any]:
    """[1, N] tokens of three sequences, with prompts, a tool's output and padding. Sets lie at their own tokens."""
    trained = [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    tokens = torch.randint(VOCABULARY, (1, len(trained)))
    spans = [a_span(t) if on else [] for t, on in zip(tokens[0].tolist(), trained, strict=True)]
    counts = torch.tensor([len(span) for span in spans], dtype=torch.int32)
    ids = torch.tensor([token for span in spans for token in span], dtype=torch.int32)
    packed = SimpleNamespace(ids=ids.numpy().tobytes(), counts=counts.numpy().tobytes())
    return {
        "input_ids": tokens, "loss_mask": torch.tensor([trained]).bool(), "sampling_mask": padded(spans),
        "temperatures": torch.rand(1, len(trained)) + 0.5, "packed": packed, "spans": [*spans[1:], []],
    }  # fmt: skip


def shift_left(values: Tensor, fill: int) -> Tensor:
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], fill)], 1)


@pytest.mark.parametrize(("softcap", "mask_prompts"), [(None, False), (2.0, True)])
def test_prime_rl(softcap: float | None, mask_prompts: bool) -> None:
    batch = packed_sequences()
    hidden = torch.randn(1, batch["input_ids"].shape[1], WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    labels, counts = shift_left(batch["input_ids"], 0), shift_left(batch["loss_mask"], 0)
    logits = hidden @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    spans, sets = list(batch["spans"]), shift_left(batch["sampling_mask"], -1)
    if not mask_prompts:  # a set without its label is no set
        outside, spans[3] = [token for token in range(5) if token != labels[0, 3]], []
        sets = padded([*spans[:3], outside, *spans[4:]])
    expected = dense(logits[0] / batch["temperatures"][0].unsqueeze(-1), labels[0], spans)
    expected = tuple(values.unsqueeze(0) * (counts | (not mask_prompts)) for values in expected)
    options: dict[str, Any] = {"logit_softcap": softcap} if softcap else {}
    given = labels
    if mask_prompts:
        given = PRIME_RL["prime_rl_labels"](labels, counts)
        options["max_dense_rows"] = 0
    out = PRIME_RL["prime_rl_scores"](hidden, weight, given, batch["temperatures"], sets, **options)
    check((out["logprobs"], out["entropy"]), expected, hidden, weight)


def test_prime_rl_without_padding() -> None:
    batch = packed_sequences()
    assert PRIME_RL["prime_rl_mask"](batch["packed"]).to_lists() == batch["spans"]
    first = SimpleNamespace(ids=b"\1\0\0\0\2\0\0\0\3\0\0\0", counts=b"\2\0\0\0\1\0\0\0")  # also a set at position 0
    assert PRIME_RL["prime_rl_mask"](first).to_lists() == [[3], []]


# ---- slime and miles -------------------------------------------------------------------------------------------------


def packed_responses(forced: bool) -> dict[str, Any]:
    """Packed tokens and, for each sample, ids and offsets of its response. Of a tool's output: miles has a set of the
    token itself (forced), slime an empty span.
    """
    totals, responses, spans, tokens = [9, 5, 11], [4, 3, 8], [], []
    for total, response in zip(totals, responses, strict=True):
        tokens.append(torch.randint(VOCABULARY, (total,)))
        spans.append([a_span(token) for token in tokens[-1][-response:].tolist()])
    for place in (3, 4):
        spans[2][place] = [int(tokens[2][3 + place])] if forced else OBSERVED
    given = [list(of_sample) for of_sample in spans]
    label = int(tokens[0][-1])  # which the snippet adds to a set without it
    given[0][3], spans[0][3] = [(label + 1) % VOCABULARY], [(label + 1) % VOCABULARY, label]
    ids = [torch.tensor([t for span in of_sample for t in span], dtype=torch.int32) for of_sample in given]
    offsets = [torch.tensor([0, *map(len, s)], dtype=torch.int32).cumsum(0, dtype=torch.int32) for s in given]
    return {"total": totals, "response": responses, "tokens": tokens, "spans": spans, "ids": ids, "offsets": offsets}


def expected_scores(logits: Tensor, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Of all responses, one after the other. The row before a token predicts it; an empty span scores 0."""
    rows, end = [], 0
    for total, response in zip(data["total"], data["response"], strict=True):
        end += total
        rows.append(logits[end - response - 1 : end - 1])
    labels = torch.cat([t[-n:] for t, n in zip(data["tokens"], data["response"], strict=True)])
    spans = [span for of_sample in data["spans"] for span in of_sample]
    sampled = torch.tensor([span != OBSERVED for span in spans])
    logprob, entropy = dense(torch.cat(rows) / TEMPERATURE, labels, spans)
    return logprob * sampled, entropy * sampled


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_slime_and_miles(trainer: str) -> None:
    data = packed_responses(forced=trainer == "miles")
    # miles' samples have lists, its batches tensors
    ids, offsets = (
        [part.tolist() if trainer == "miles" else part for part in data[name]] for name in ("ids", "offsets")
    )
    masks = SLIME["masks_of_samples"](ids, offsets)
    logits = torch.randn(1, sum(data["total"]) + 3, VOCABULARY, requires_grad=True)  # padded at its end
    arguments = logits, data["tokens"], data["total"], data["response"], masks, TEMPERATURE
    scores = SLIME["scores_of_responses"](*arguments)
    assert [len(part) for part in scores["log_probs"]] == [len(part) for part in scores["entropy"]] == data["response"]
    found = torch.cat(scores["log_probs"]), torch.cat(scores["entropy"])
    check(found, expected_scores(logits[0], data), logits)


# ---- SkyRL -----------------------------------------------------------------------------------------------------------


def right_aligned() -> dict[str, Any]:
    """[B, S], padded on the left, of three responses and a row that only fills the batch. The first response has a
    tool's output, and ends with an EOS that SkyRL appended.
    """
    width, responses = 14, [8, 3, 6, 0]
    actions = max(responses)
    sequences = torch.randint(VOCABULARY, (4, width))
    spans = [[a_span(t) for t in row[width - n :].tolist()] for row, n in zip(sequences, responses, strict=True)]
    spans[0][3] = spans[0][4] = spans[0][7] = OBSERVED
    loss_mask = torch.zeros(4, actions)
    for row, n in zip(loss_mask, responses, strict=True):
        row[actions - n :] = 1
    loss_mask[0, 3:5] = 0
    values = padded([span for of_row in spans for span in of_row])[0]
    boundaries = torch.tensor([0, *responses], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    by_place = [[*[[]] * (width - n - 1), *of_row, []] for of_row, n in zip(spans, responses, strict=True)]
    return {
        "sequences": sequences,
        "loss_mask": loss_mask,
        "support": SimpleNamespace(values=values, cu_seqlens=boundaries),
        "spans": [span for of_row in by_place for span in of_row],
    }


def expected_of_skyrl(logits: Tensor, data: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[B, S]: the log-probability of the next token; 0 where that does not count."""
    sequences = data["sequences"]
    counts = torch.zeros(sequences.shape)
    counts[:, -data["loss_mask"].shape[1] - 1 : -1] = data["loss_mask"]
    labels = torch.cat([sequences[:, 1:], sequences[:, :1]], 1).flatten()
    logprob, entropy = dense(logits.flatten(0, 1), labels, data["spans"])
    return logprob.view_as(counts) * counts, entropy.view_as(counts) * counts


def test_skyrl() -> None:
    data = right_aligned()
    logits = torch.randn(*data["sequences"].shape, VOCABULARY, requires_grad=True)
    arguments = data["sequences"], data["loss_mask"], data["support"]
    assert SKYRL["skyrl_rows"](*arguments)[2].to_lists() == data["spans"]
    check(SKYRL["skyrl_scores"](logits, *arguments), expected_of_skyrl(logits, data), logits)


# ---- a vocabulary that ranks share -----------------------------------------------------------------------------------


def on_a_rank(ranks: Ranks) -> None:
    """Each rank has half of the vocabulary, here of rows of the head's weight."""
    torch.manual_seed(3)
    own = slice(VOCABULARY // ranks.size * ranks.rank, VOCABULARY // ranks.size * (ranks.rank + 1))
    data = right_aligned()
    hidden = torch.randn(*data["sequences"].shape, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    arguments = data["sequences"], data["loss_mask"], data["support"], TEMPERATURE, ranks.rank, ranks.group, VOCABULARY
    expected, _ = expected_of_skyrl(hidden @ weight.T / TEMPERATURE, data)
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    # As SkyRL hands the hidden states over, [B, S, H]: with sequence parallelism from [s / ranks, b, H], and without.
    part = hidden.detach().transpose(0, 1).chunk(ranks.size)[ranks.rank].requires_grad_()
    gathered = gather_from_sequence_parallel_region(part, group=ranks.group).transpose(0, 1).contiguous()
    copied = copy_to_tensor_model_parallel_region(hidden, group=ranks.group)
    own_part = wanted[0].transpose(0, 1).chunk(ranks.size)[ranks.rank]
    for given, leaf, of_leaf in ((gathered, part, own_part), (copied, hidden, wanted[0])):
        found, _ = SKYRL["skyrl_fused_scores"](given, weight[own], *arguments)
        close(found, expected)
        mine = torch.autograd.grad(found.sum(), (leaf, weight))
        close(mine[0], of_leaf)
        close(mine[1][own], wanted[1][own])


def test_tensor_parallelism() -> None:
    world(2).run(on_a_rank)
