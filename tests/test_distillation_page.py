"""The code of docs/distillation.md: losses and gradients are those of a computation from all logits in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_identical
from ranks import Ranks, world
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import d3s_kernels as d3s

PAGE = (Path(__file__).parents[1] / "docs" / "distillation.md").read_text(encoding="utf-8")
SECTIONS = {
    title: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
SIDES, LOSSES, CENTERING = "Teacher and student", "Losses", "Score centering"
SELECTION, SHARDS, SUPPORT = "Selection meets distillation", "Vocabulary shards", "Over a sampler's support"

V, H, ROWS = 60, 16, 40


def run(names: dict[str, Any], section: str, *blocks: int) -> None:
    """Runs these blocks of a section, or all of them."""
    for number, block in enumerate(SECTIONS[section]):
        if number in (blocks or range(number + 1)):
            exec(compile(block, f"docs/distillation.md, {section}", "exec"), names)


def given(k: int = 8) -> dict[str, Any]:
    """The names that the page uses."""
    return {
        "torch": torch,
        "d3s": d3s,
        "K": k,
        "hidden": torch.randn(ROWS, H, requires_grad=True),
        "weight": (0.5 * torch.randn(V, H)).requires_grad_(),
        "teacher_hidden": torch.randn(ROWS, 2 * H),
        "teacher_weight": 0.4 * torch.randn(V, 2 * H),
        "labels": torch.randint(V, (ROWS,)),
        "advantages": torch.randn(ROWS),
    }


def with_losses(k: int = 8) -> dict[str, Any]:
    names = given(k)
    run(names, SIDES)
    run(names, LOSSES)
    return names


# ---- the same in float64, from all logits ----------------------------------------------------------------------------

Rows = list[Tensor]


def in_buckets(p: Tensor, token_ids: Tensor) -> Rows:
    """For each row the probabilities of its ids and of all other ids, without the buckets that have no id."""
    found = []
    for row, ids in zip(p, token_ids.long(), strict=True):
        kept = ids[ids >= 0]
        rest = torch.ones(len(row), dtype=torch.bool).index_fill(0, kept, False)
        found.append(torch.cat([row[kept], row[rest].sum().view(-1)[: int(rest.any())]]))
    return found


def exact_kl(p: Rows, q: Rows) -> Tensor:
    return torch.stack([(a * (a / b).log()).sum() for a, b in zip(p, q, strict=True)])


def exact_jsd(teacher: Rows, student: Rows, beta: float = 0.5) -> Tensor:
    mixture = [beta * a + (1 - beta) * b for a, b in zip(teacher, student, strict=True)]
    return beta * exact_kl(teacher, mixture) + (1 - beta) * exact_kl(student, mixture)


EXACT: dict[str, Callable[[Rows, Rows], Tensor]] = {
    "forward_kl": exact_kl,
    "divergence": exact_jsd,
    "reverse_kl": lambda teacher, student: exact_kl(student, teacher),
}


def both(names: dict[str, Any]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The probabilities of teacher and student in float64, and what the student's are a function of."""
    of = names["hidden"].detach().double().requires_grad_(), names["weight"].detach().double().requires_grad_()
    teacher = names["teacher_hidden"].double() @ names["teacher_weight"].double().T
    return teacher.softmax(-1), (of[0] @ of[1].T).softmax(-1), of


def check_gradient(names: dict[str, Any], loss: Tensor, exact: Tensor, of: tuple[Tensor, Tensor]) -> None:
    """Of the rows' sum, in which each row has another weight."""
    share = torch.rand(loss.shape)
    ours = torch.autograd.grad((loss * share).sum(), (names["hidden"], names["weight"]), retain_graph=True)
    theirs = torch.autograd.grad((exact * share.double()).sum(), of, retain_graph=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


def check(names: dict[str, Any], loss: Tensor, exact: Tensor, of: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(loss, exact.float(), rtol=1e-5, atol=1e-5)
    check_gradient(names, loss, exact, of)


# ---- the losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", EXACT)
def test_losses_with_a_bucket_for_the_tail(loss: str) -> None:
    names = with_losses()
    teacher, student, of = both(names)
    ids = names["own_ids" if loss == "reverse_kl" else "teacher"]
    ids = ids if isinstance(ids, Tensor) else ids.token_ids
    exact = EXACT[loss](in_buckets(teacher, ids), in_buckets(student, ids))
    check(names, names[loss], exact, of)
    whole = EXACT[loss](list(teacher), list(student))
    assert (exact >= 0).all()
    assert (names[loss] <= whole + 1e-5).all()


@pytest.mark.parametrize("loss", EXACT)
def test_all_ids_and_an_empty_tail_are_the_whole_vocabulary(loss: str) -> None:
    names = with_losses(k=V)
    teacher, student, of = both(names)
    check(names, names[loss], EXACT[loss](list(teacher), list(student)), of)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_beta_is_the_teachers_share(beta: float) -> None:
    names = with_losses()
    ids, buckets = names["teacher"].token_ids, names["buckets"]
    teacher, student, of = both(names)
    exact = exact_jsd(in_buckets(teacher, ids), in_buckets(student, ids), beta)
    check(names, names["jsd"](buckets(names["teacher"]), buckets(names["student"]), beta), exact, of)


@pytest.mark.parametrize("loss", ["forward_kl", "divergence"])
def test_rows_with_fewer_ids_of_a_teacher_that_sends_no_tail(loss: str) -> None:
    names = given()
    run(names, SIDES)
    ids, logprobs, *others = names["teacher"]
    missing = torch.rand(ids.shape) < 0.4
    missing[0] = True  # of this row nothing is known
    logprobs = logprobs.masked_fill(missing, -torch.inf)
    tail = names["tail_of"](logprobs)
    tail[0] = 0
    names["teacher"] = d3s.TopkLogprobs(ids.masked_fill(missing, -1), logprobs, tail, others[1])
    names["student"] = d3s.linear_token_logprobs(names["hidden"], names["weight"], names["teacher"].token_ids)
    run(names, LOSSES, 0)
    teacher, student, of = both(names)
    ids = names["teacher"].token_ids
    rows = in_buckets(teacher, ids), in_buckets(student, ids)
    torch.testing.assert_close(tail[1:], torch.stack([row[-1] for row in rows[0]])[1:].log().float())
    check(names, names[loss], EXACT[loss](*rows), of)


def test_without_a_bucket_a_divergence_is_negative_and_not_smallest_at_the_teacher() -> None:
    names = given()
    names["hidden"], names["weight"] = names["teacher_hidden"].clone().requires_grad_(), names["teacher_weight"]
    run(names, SIDES)
    teacher, student = names["teacher"].logprobs, names["student"].logprobs
    loss = (teacher.exp() * (teacher - student)).sum()
    assert torch.autograd.grad(loss, names["hidden"])[0].abs().max() > 1e-2
    assert ((student + 0.1).exp().sum(-1) < 1).any()  # as a student may be
    assert (teacher.exp() * (teacher - (student + 0.1))).sum() < 0


def test_score_centering_is_the_papers_estimator() -> None:
    names = with_losses()
    q = (names["hidden"] @ names["weight"].T + 0.5 * torch.randn(ROWS, V)).detach()
    names["sampler"] = d3s.topk_logprobs(q, names["K"])
    run(names, CENTERING)
    _, p, of = both(names)
    ids = names["sampler"].token_ids.long()
    at_ids = p.gather(-1, ids)
    with torch.no_grad():
        q = q.double().softmax(-1).gather(-1, ids)
        ratio = (1 - q.sum(-1, keepdim=True)) / (1 - at_ids.sum(-1, keepdim=True))
        coefficients = q - ratio * at_ids
    logprob = p.gather(-1, names["labels"].unsqueeze(-1)).squeeze(-1).log()
    exact = -names["advantages"].double() * (logprob - (coefficients * at_ids.log()).sum(-1))
    check_gradient(names, names["centered"], exact, of)


# ---- selection -------------------------------------------------------------------------------------------------------


def multiplied(call: Callable[[], object]) -> float:
    """The products of matrices that a call makes, as a multiple of the student's logits."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True) as found:
        call()
    return sum(event.flops for event in found.key_averages() if event.key == "aten::mm") / (2 * ROWS * V * H)


@pytest.mark.parametrize("column", [0, 1])
def test_what_a_selection_computes(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, *rows = re.findall(r"^\| .* \| ([\d.]+) % \| ([\d.]+) % \|$", PAGE, re.MULTILINE)
    share = float(shares[column]) / 100
    monkeypatch.setitem(SECTIONS, SELECTION, [block.replace("0.2", str(share)) for block in SECTIONS[SELECTION]])
    names = with_losses()
    remaining = [float(row[column]) / 100 for row in rows]
    teacher, student, of = both(names)
    ids = names["teacher"].token_ids
    exact = exact_kl(in_buckets(teacher, ids), in_buckets(student, ids))
    entropy = -(teacher * teacher.log()).sum(-1)
    inputs = names["hidden"], names["weight"]

    def everything() -> None:
        found = d3s.linear_token_logprobs(*inputs, ids)
        found.tail_logprob.sum().backward(inputs=inputs)

    def block(number: int) -> None:
        run(names, SELECTION, number)
        names["loss"].backward(inputs=inputs, retain_graph=True)

    def an_earlier_pass() -> None:
        with torch.no_grad():
            d3s.linear_token_logprobs(*inputs, ids)
        block(0)

    every = multiplied(everything)
    assert every == 4
    for number, scores in enumerate((entropy, exact)):
        part = multiplied(lambda number=number: block(number))
        assert part / every == pytest.approx(remaining[number])
        chosen = scores.topk(round(share * ROWS)).indices
        assert names["kept"].nonzero().flatten().tolist() == sorted(chosen.tolist())
        check(names, names["loss"], exact[chosen].mean(), of)
    assert multiplied(an_earlier_pass) / every == pytest.approx(remaining[2])


# ---- shards and supports ---------------------------------------------------------------------------------------------


def on_a_shard(ranks: Ranks) -> None:
    torch.manual_seed(3)  # the same on all ranks
    names = given()
    run(names, SIDES)
    whole = names["teacher"], names["student"]
    gradients = torch.autograd.grad(whole[1].logprobs.sum(), (names["hidden"], names["weight"]))
    own = slice(ranks.rank * V // ranks.size, (ranks.rank + 1) * V // ranks.size)
    shard = names["weight"].detach()[own].clone().requires_grad_()
    names |= {"group": ranks.group, "first_id": own.start, "V": V}
    names |= {"shard": shard, "teacher_shard": names["teacher_weight"][own]}
    run(names, SHARDS)
    assert_identical(names["teacher"].token_ids, whole[0].token_ids)
    for ours, theirs in zip((*names["teacher"], *names["student"]), (*whole[0], *whole[1]), strict=True):
        torch.testing.assert_close(ours, theirs)
    hidden, part = torch.autograd.grad(names["student"].logprobs.sum(), (names["hidden"], shard))
    torch.testing.assert_close(hidden, gradients[0])
    torch.testing.assert_close(part, gradients[1][own])
    names |= {"shard": names["weight"], "teacher_shard": names["teacher_weight"]}
    with pytest.raises(ValueError, match="vocab_size"):
        run(names, SHARDS)


def test_vocabulary_shards() -> None:
    world(2).run(on_a_shard)


def test_over_a_support() -> None:
    names = given()
    k, width = names["K"], 20
    support = torch.rand(ROWS, V).argsort(-1)[:, :width]
    lengths = torch.randint(1, width + 1, (ROWS, 1))
    support = support.where(torch.arange(width) < lengths, -1)
    token_ids = support[:, :k]
    names |= {"support": support, "token_ids": token_ids}
    run(names, SUPPORT)
    ours, there = names["over_support"], token_ids >= 0
    assert (ours[~there] == -torch.inf).all()
    _, p, of = both(names)
    inside = torch.zeros(ROWS, V + 1, dtype=torch.bool).scatter(1, support.where(support >= 0, V), True)[:, :V]
    exact = p.where(inside, 0) / p.where(inside, 0).sum(-1, keepdim=True)
    exact = exact.gather(-1, token_ids.clamp(min=0)).where(there, 1).log()
    check(names, ours.where(there, 0), exact, of)
