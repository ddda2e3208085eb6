"""TRL's losses with D3S: for every loss, the value is TRL's and the gradient is that of the kept tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import (
    assert_same_gradient,
    forwards,
    generation_batch,
    gradients,
    logged_together,
    logits_of,
    loss_and_gradients,
    micro_batch,
    rows_of,
)
from tiny_trl import GROUP, PlainTrainer, model, trainer

import d3s_kernels as d3s
from d3s_kernels.integrations.trl.batch import UNMEASURED
from d3s_kernels.integrations.trl.columns import MayCut, trimmed

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
LEVELS = ["token", "sequence"]
RATIO = 0.25
CLIPPED = {"epsilon": 0.05, "epsilon_high": 0.1}  # so narrow that some ratios are clipped


def with_old_policy(batch: dict[str, Tensor], policy: Any, reference: bool = False) -> dict[str, Tensor]:
    """Adds log-probabilities of an older policy close to this one, and, if asked for, of a reference."""
    with torch.no_grad():
        logprob = d3s.logprob_entropy(logits_of(policy, batch).float(), batch["completion_ids"])[0]
    random = torch.Generator().manual_seed(9)
    names = ["old_per_token_logps"] + ["ref_per_token_logps"] * reference
    return batch | {name: logprob + 0.2 * torch.randn(logprob.shape, generator=random) for name in names}


def plain(options: dict[str, Any]) -> tuple[PlainTrainer, dict[str, Tensor]]:
    """TRL's own trainer, and its scores, which retain the gradient of the loss."""
    made = trainer(PlainTrainer, **options)
    leaves: dict[str, Tensor] = {}
    score = made._get_per_token_logps_and_entropies

    def kept_apart(*arguments: Any, **more: Any) -> tuple[Tensor, Tensor, Any]:
        logprob, entropy, aux = score(*arguments, **more)
        leaves.update(logprob=logprob, entropy=entropy)
        logprob.retain_grad()
        entropy.retain_grad()
        return logprob, entropy, aux

    made._get_per_token_logps_and_entropies = kept_apart
    return made, leaves


def expected_gradient(
    batch: dict[str, Tensor], options: dict[str, Any], kept: Tensor, weight: Tensor | float, beta: float = 0.0
) -> Tensor:
    """TRL's gradient of its scores, weighted and restricted to the kept tokens, propagated to the model."""
    made, leaves = plain(options)
    made.beta = beta
    made.compute_loss(made.model, batch).backward(retain_graph=True)
    found = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    gradients(made)
    scores = [leaves[name] for name in found]
    torch.autograd.backward(scores, [torch.where(kept, grad * weight, 0.0) for grad in found.values()])
    return gradients(made)


def chosen(batch: dict[str, Tensor]) -> Tensor:
    """The tokens of the micro-batch with the largest |A| * H, by the plain definition."""
    with torch.no_grad():
        entropy = torch.distributions.Categorical(logits=logits_of(model(), batch)).entropy()
    score = (batch["advantages"].abs()[:, None] * entropy).masked_fill(batch["completion_mask"] == 0, -1)
    k = -(-int(batch["completion_mask"].sum()) * RATIO // 1)
    highest = score.flatten().topk(int(k)).indices
    return torch.zeros(score.numel(), dtype=torch.bool).index_fill(0, highest, True).view(score.shape)


def weight_of(loss: str, kept: Tensor, mask: Tensor) -> Tensor:
    """The number of tokens by which TRL divides, over the number of kept tokens."""
    if loss in ("grpo", "sapo"):
        return mask.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    return torch.tensor(1.0) if loss == "luspo" else mask.sum() / kept.sum()


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_is_trls_and_gradient_that_of_the_kept_tokens(loss: str, level: str, denominator: str) -> None:
    batch = with_old_policy(micro_batch(1), model())
    options = {"loss_type": loss, "importance_sampling_level": level, **CLIPPED}
    kept, mask = chosen(batch), batch["completion_mask"]
    assert 0 < kept.sum() < mask.sum()
    weight = weight_of(loss, kept, mask) if denominator == "kept" else torch.tensor(1.0)
    value, _ = loss_and_gradients(trainer(PlainTrainer, **options), batch)
    ours = trainer(**options, loss_denominator=denominator, tokens=RATIO)
    our_value, gradient = loss_and_gradients(ours, batch)
    assert our_value == pytest.approx(value, rel=1e-5)
    expected = expected_gradient(batch, options, kept, weight)
    assert expected.norm() > 0
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6 * float(expected.abs().max()) + 1e-9)


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dapo", "cispo", "sapo", "dr_grpo"])
def test_kept_denominator_is_trls_own_with_the_mask_as_tool_mask(loss: str) -> None:
    """At token level TRL itself can leave tokens out of its loss, by marking them as a tool's."""
    batch = with_old_policy(micro_batch(2), model())
    kept = chosen(batch)
    masked = batch | {"tool_mask": kept.long(), "num_items_in_batch": kept.sum()}
    _, expected = loss_and_gradients(trainer(PlainTrainer, loss_type=loss, **CLIPPED), masked)
    if loss == "dr_grpo":  # its denominator is a constant; D3S scales it as the others
        expected = expected * batch["completion_mask"].sum() / kept.sum()
    _, gradient = loss_and_gradients(trainer(loss_type=loss, **CLIPPED), batch)
    assert_same_gradient(gradient, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_kl_goes_through_kept_tokens_and_metrics_are_trls(level: str) -> None:
    batch = with_old_policy(micro_batch(3), model(), reference=True)
    options = {"loss_type": "grpo", "importance_sampling_level": level, **CLIPPED}
    ours, theirs = trainer(**options, loss_denominator="all"), trainer(PlainTrainer, **options)
    for made in (ours, theirs):
        made.beta = 0.3  # the batch has the reference's scores
    value, _ = loss_and_gradients(theirs, batch)
    our_value, gradient = loss_and_gradients(ours, batch)
    assert our_value == pytest.approx(value, rel=1e-5)
    expected = expected_gradient(batch, options, chosen(batch), 1.0, beta=0.3)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-7)
    logged, mine = theirs._metrics["train"], ours._metrics["train"]
    assert logged["clip_ratio/region_mean"][0] > 0
    for name in logged:
        assert mine[name] == pytest.approx(logged[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("loss", ["bnpo", "grpo", "luspo"])
def test_entropy_bonus_is_a_mean_over_the_kept_tokens(loss: str) -> None:
    """This holds for any denominator of the loss."""
    batch = micro_batch(4)
    kept, mask = chosen(batch), batch["completion_mask"]
    _, with_bonus = loss_and_gradients(trainer(loss_type=loss, entropy_coef=0.5), batch)
    _, without = loss_and_gradients(trainer(loss_type=loss), batch)
    made, leaves = plain({"loss_type": loss})
    made.compute_loss(made.model, batch)
    # TRL subtracts coefficient x mean entropy, here for one of two accumulated steps.
    leaves["entropy"].backward(torch.where(kept, -0.5 / kept.sum() / 2, 0.0))
    torch.testing.assert_close(with_bonus - without, gradients(made), rtol=1e-3, atol=1e-5)
    assert mask.sum() > kept.sum()


@pytest.mark.parametrize("drop_zeros", [False, True])
def test_by_sequence_every_sequence_has_its_share(drop_zeros: bool) -> None:
    batch = micro_batch(5)
    if drop_zeros:
        batch["advantages"][2] = 0
    made = trainer(token_scope="sequence", drop_zeros=drop_zeros)
    made.compute_loss(made.model, batch)
    lengths = batch["completion_mask"].sum(1)[batch["advantages"] != 0]
    assert len(lengths) == GROUP - drop_zeros
    assert made._metrics["train"]["d3s/tokens_kept"] == [sum(-(-int(n) * RATIO // 1) for n in lengths)]


def test_a_process_with_masked_rollouts_alone_adds_nothing_to_what_is_logged() -> None:
    """TRL takes a single column for values of whole sequences, and would count it whatever the mask says."""
    made = trainer(loss_type="grpo", **CLIPPED)
    made.beta = 0.3
    batch, masked = (with_old_policy(micro_batch(seed), model(), reference=True) for seed in (3, 4))
    masked["completion_mask"] *= 0
    alone = logged_together(made, [batch])
    together = logged_together(made, [trimmed(masked, None, MayCut(True, True)), batch])
    assert alone["clip_ratio/region_mean"] > 0
    for name in ("entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert together[name] == pytest.approx(alone[name]), name


def test_tool_tokens_are_neither_counted_nor_kept() -> None:
    made, batch = trainer(tokens=0.5), micro_batch(6)
    batch["tool_mask"] = batch["completion_mask"].clone()
    batch["tool_mask"][:, 0] = 0
    made.compute_loss(made.model, batch)
    valid = int((batch["completion_mask"] * batch["tool_mask"]).sum())
    assert made._metrics["train"]["d3s/tokens_kept"] == [-(-valid // 2)]


def test_without_advantages_nothing_moves() -> None:
    batch = micro_batch(7) | {"advantages": torch.zeros(GROUP)}
    for made in (trainer(), trainer(drop_zeros=True)):
        assert (loss_and_gradients(made, batch)[1] == 0).all()
    assert made._metrics["train"]["d3s/tokens_kept"] == [0]


# ---- tokens known before the update ----------------------------------------------------------------------------------


def known_before(made: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    batch = dict(batch)
    made._choose_tokens_of_batch(batch)
    return batch


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"])
def test_the_cut_update_has_the_same_gradient(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = with_old_policy(micro_batch(9), model())
    options = {"loss_type": loss, "entropy_from": "rollout", "tokens": 0.1, **CLIPPED}
    cut, whole = trainer(**options), trainer(**options)
    known = known_before(cut, batch)
    assert cut._tokens_are_independent(known)
    monkeypatch.setattr(whole, "_tokens_are_independent", lambda inputs: False)
    (_, gradient), (_, expected) = loss_and_gradients(cut, known), loss_and_gradients(whole, known)
    assert_same_gradient(gradient, expected)
    for name in ("entropy", "d3s/tokens_kept", "d3s/entropy_kept", "d3s/entropy_dropped"):
        found, wanted = ([float(value) for value in made._metrics["train"][name]] for made in (cut, whole))
        assert found == pytest.approx(wanted, rel=1e-4), name


@pytest.mark.parametrize("multiple", [None, 3])
def test_the_cut_update_forwards_what_is_kept_only(multiple: int | None) -> None:
    """In the widths that TRL pads to."""
    made = trainer(entropy_from="rollout", tokens=0.05, pad_to_multiple_of=multiple)
    known = known_before(made, micro_batch(10))
    kept, step = known["d3s_kept"], multiple or 1
    with forwards(made.model) as seen:
        made.compute_loss(made.model, known).backward()
    last = int(kept.any(0).nonzero().max()) + 1
    found = [(list(inputs["input_ids"].shape), int((inputs["labels"] != -100).sum())) for _, inputs in seen]
    assert found == [([int(kept.any(1).sum()), -(-(4 + last) // step) * step], int(kept.sum()))]
    assert last == 4 < 10  # so that the width is no multiple of 3, and columns are left out
    assert kept.any(1).sum() < GROUP


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("importance_sampling_level", level) for level in ("sequence", "entropy_group")),
        ("loss_type", "vespo"), ("entropy_coef", 0.1), ("off_policy_mask_threshold", 0.5),
    ],
)  # fmt: skip
def test_nothing_is_cut_where_tokens_depend_on_each_other(option: str, value: Any) -> None:
    made = trainer(entropy_from="rollout", **{option: value})
    known = known_before(made, micro_batch(11))
    assert not made._tokens_are_independent(known)
    loss_and_gradients(made, known)


def test_nothing_is_cut_with_a_reference_experts_or_images() -> None:
    made = trainer(entropy_from="rollout")
    known = known_before(made, micro_batch(11))
    assert made._tokens_are_independent(known)
    assert not made._tokens_are_independent(known | {"num_images": [1] * GROUP})
    made.aux_loss_enabled = True
    assert not made._tokens_are_independent(known)
    made.aux_loss_enabled, made.beta = False, 0.1
    assert not made._tokens_are_independent(known)


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_counts_of_the_generation_batch_make_micro_batches_one_mean(loss: str) -> None:
    """Micro-batches keep different numbers of tokens, but together give TRL's loss with the mask of the whole batch."""
    whole = with_old_policy(generation_batch(13), model())
    whole["advantages"][GROUP:] = torch.linspace(-0.4, 0.6, GROUP)
    options = {"loss_type": loss, "steps_per_generation": 2, **CLIPPED}
    made = trainer(entropy_from="rollout", **options)
    known = known_before(made, whole)
    parts = [rows_of(known, part) for part in (slice(0, GROUP), slice(GROUP, None))]
    counts = [int(part["d3s_kept"].sum()) for part in parts]
    assert counts[0] != counts[1]
    gradient = sum(loss_and_gradients(made, part)[1] for part in parts)
    masked = whole | {"tool_mask": known["d3s_kept"].long(), "num_items_in_batch": known["d3s_kept"].sum()}
    _, expected = loss_and_gradients(trainer(PlainTrainer, **options), masked)
    assert_same_gradient(gradient, expected)


@pytest.mark.parametrize("loss", ["dr_grpo", "dapo", "cispo"])
def test_the_gradient_does_not_depend_on_the_size_of_micro_batches(loss: str) -> None:
    whole = generation_batch(13, 4 * GROUP)
    found = []
    for parts in (1, 4, 8):
        rows = 4 * GROUP // parts
        made = trainer(
            loss_type=loss, entropy_from="rollout", tokens=0.1, per_device_train_batch_size=rows,
            gradient_accumulation_steps=parts,
        )  # fmt: skip
        known = known_before(made, whole)
        split = [rows_of(known, slice(part * rows, (part + 1) * rows)) for part in range(parts)]
        found.append(sum(loss_and_gradients(made, part)[1] for part in split))
    assert len({int(part["d3s_kept"].sum()) for part in split}) > 2
    for gradient in found[1:]:
        assert_same_gradient(gradient, found[0])


def test_in_the_cut_update_dropped_tokens_have_a_ratio_of_1() -> None:
    batch = with_old_policy(micro_batch(9), model())
    whole, cut = trainer(loss_type="grpo", **CLIPPED), trainer(loss_type="grpo", entropy_from="rollout", **CLIPPED)
    known = known_before(cut, batch)
    cut.compute_loss(cut.model, known)
    logprob = whole._score(whole.model, batch)[0]
    ratio = torch.where(known["d3s_kept"], (logprob - batch["old_per_token_logps"]).exp(), 1)
    sign = batch["advantages"][:, None].sign()
    beyond = ((ratio < 0.95) & (sign < 0)) | ((ratio > 1.1) & (sign > 0))
    mask = batch["completion_mask"].bool()
    assert beyond[mask].any()
    assert cut._metrics["train"]["clip_ratio/region_mean"][0] == pytest.approx(beyond[mask].float().mean().item())


def test_the_logged_loss_of_cispo_is_of_all_tokens() -> None:
    """Its value has log-probabilities, not ratios alone. Rows with advantage 0 add nothing; no pass scores them."""
    batch, options = micro_batch(9), {"loss_type": "cispo"}
    batch["advantages"][2] = 0
    made = trainer(entropy_from="rollout", tokens=0.1, **options)
    value, _ = loss_and_gradients(made, known_before(made, batch))
    assert value == pytest.approx(loss_and_gradients(trainer(PlainTrainer, **options), batch)[0], rel=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_logged_entropies_are_those_that_were_measured(apart: bool) -> None:
    """The second group has no advantages, so that no pass scores it. It may be one process's only group."""
    made, batch = trainer(entropy_from="rollout"), generation_batch(3)
    scored, mask = made._score(made.model, batch, compute_entropy=True)[1], batch["completion_mask"].bool()
    known = known_before(made, batch)
    assert torch.equal(known[UNMEASURED], mask & (torch.arange(2 * GROUP) >= GROUP).unsqueeze(1))
    parts = [known]
    if apart:
        parts = [rows_of(known, part) for part in (slice(0, GROUP), slice(GROUP, None))]
        for part in parts:
            part |= made._entropy_pass(part)
    logged, kept = logged_together(made, parts), known["d3s_kept"]
    measured = mask & (kept | (batch["advantages"] != 0)[:, None])
    assert kept.sum() < measured.sum() < mask.sum()
    expected = {"entropy": measured, "d3s/entropy_kept": kept, "d3s/entropy_dropped": measured & ~kept}
    for name, tokens in expected.items():
        assert logged[name] == pytest.approx(scored[tokens].mean().item(), rel=1e-4), name


@pytest.mark.parametrize("drop_zeros", [False, True])
def test_without_advantages_the_kept_tokens_alone_are_measured(drop_zeros: bool) -> None:
    made = trainer(entropy_from="rollout", drop_zeros=drop_zeros)
    batch = micro_batch(3) | {"advantages": torch.zeros(GROUP)}
    scored = made._score(made.model, batch, compute_entropy=True)[1]
    known = known_before(made, batch)
    made.compute_loss(made.model, known)
    made.log(logs := {})
    found = {name: value for name, value in logs.items() if "entropy" in name}
    mean = scored[known["d3s_kept"]].mean().item()
    assert found == ({} if drop_zeros else pytest.approx({"entropy": mean, "d3s/entropy_kept": mean}, rel=1e-4))


def test_a_micro_batch_without_a_kept_token_is_legal() -> None:
    made = trainer(entropy_from="rollout")
    known = known_before(made, micro_batch(12))
    known["d3s_kept"] = torch.zeros_like(known["d3s_kept"])
    value, gradient = loss_and_gradients(made, known)
    assert value == value  # no NaN
    assert len(gradient) > 0 == gradient.count_nonzero()
