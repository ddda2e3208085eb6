"""ESPO inside TRL's loss: its objective (arXiv 2512.00499, eq. 5) written out. Training runs: test_trl_training.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from batches import assert_same_gradient, gradients, logits_of, loss_and_gradients, micro_batch
from test_trl_gradient import chosen, with_old_policy
from tiny_trl import GROUP, VOCABULARY, PlainTrainer, model, trainer
from transformers import Qwen2Config

from d3s_kernels.integrations.trl.espo import as_espo
from d3s_kernels.off_policy.importance_ratio import espo_terms

ALPHA = 0.1  # so wide that only some ratios are out of range
ESPO = {"importance_sampling_level": "entropy_group", "espo_alpha": ALPHA, "loss_type": "grpo"}
STEPS = 2  # of gradient accumulation, by which TRL divides
WHOLE: dict[str, Any] = {**ESPO, "tokens": 1.0, "loss_denominator": "all"}  # every token has its gradient


def scores(policy: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completion in float64, with an autograd graph."""
    distribution = torch.distributions.Categorical(logits=logits_of(policy, batch))
    return distribution.log_prob(batch["completion_ids"]), distribution.entropy()


def old_batch(batch: dict[str, Tensor], **more: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The batch with an older policy's log-probabilities; the model's own, and its entropies, as constants."""
    batch = with_old_policy(batch, model(), **more)
    logprob, entropy = scores(model(), batch)
    return batch, logprob.detach(), entropy.detach()


def groups_of(entropy: list[float], quantile: float) -> list[list[int]]:
    """The positions of a sequence's tokens in each group, that of highest entropy last. Empty groups are left out."""
    ranked = sorted(range(len(entropy)), key=lambda place: (-entropy[place], place))
    high = math.ceil((1 - quantile) * len(entropy) - 1e-9)
    return [sorted(group) for group in (ranked[high:], ranked[:high]) if group]


def espo_loss(
    logprob: Tensor, entropy: Tensor, batch: dict[str, Tensor], denominator: str = "self"
) -> tuple[Tensor, Tensor]:
    """Eq. 5, token by token, and which tokens were clipped."""
    rows, old = [], batch["old_per_token_logps"].double()
    clipped = torch.zeros(logprob.shape, dtype=torch.bool)
    for i, advantage in enumerate(batch["advantages"].double()):
        n = int(batch["completion_mask"][i].sum())
        groups = groups_of(entropy[i, :n].tolist(), 0.8)
        means = []
        for group in groups:
            s = torch.exp(sum((logprob[i, t] - old[i, t]) for t in group) / len(group)).detach()
            epsilon = ALPHA / math.log(VOCABULARY) * sum(entropy[i, t].item() for t in group) / len(group)
            terms = []
            for t in group:
                base = logprob[i, t].detach() if denominator == "self" else old[i, t]
                ratio = s * torch.exp(logprob[i, t] - base)
                terms.append(torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage))
                clipped[i, t] = (ratio - 1).abs() > epsilon
            means.append(torch.stack(terms).mean())
        rows.append(torch.stack(means).mean())
    return -torch.stack(rows).mean() / STEPS, clipped


def assert_value(value: float, expected: Tensor) -> None:
    assert value == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("denominator", ["self", "old"])
def test_value_and_gradient_are_the_papers(denominator: str) -> None:
    batch = with_old_policy(micro_batch(1), model())
    made = trainer(**WHOLE, espo_denominator=denominator)
    assert made.current_gradient_accumulation_steps == STEPS
    value, gradient = loss_and_gradients(made, batch)
    logprob, entropy = scores(made.model, batch)
    loss, clipped = espo_loss(logprob, entropy.detach(), batch, denominator)
    assert 0 < clipped.sum() < batch["completion_mask"].sum()
    loss.backward()
    assert_value(value, loss)
    assert_same_gradient(gradients(made), gradient)


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_gradient_flows_through_the_kept_tokens(denominator: str) -> None:
    """The ratios, groups and ranges use all tokens; only the kept tokens have a gradient."""
    batch = with_old_policy(micro_batch(2), model())
    kept, mask = chosen(batch), batch["completion_mask"]
    value, gradient = loss_and_gradients(trainer(**ESPO, loss_denominator=denominator), batch)
    made = trainer(PlainTrainer)
    logprob, entropy = scores(made.model, batch)
    leaf = logprob.detach().requires_grad_()
    loss, _ = espo_loss(leaf, entropy.detach(), batch)
    (of_token,) = torch.autograd.grad(loss, leaf)
    weight = mask.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1) if denominator == "kept" else 1.0
    logprob.backward(torch.where(kept, of_token * weight, 0.0))
    assert_value(value, loss)
    assert_same_gradient(gradients(made), gradient)


def test_the_old_policys_entropy_where_there_is_one() -> None:
    batch, logprob, entropy = old_batch(micro_batch(3))
    old_entropy = torch.rand(entropy.shape, generator=torch.Generator().manual_seed(1))
    value, _ = loss_and_gradients(trainer(**WHOLE), batch | {"d3s_entropy": old_entropy})
    expected, others = (espo_loss(logprob, of, batch)[0] for of in (old_entropy.double(), entropy))
    assert_value(value, expected)
    assert abs(expected - others) > 5e-4


@pytest.mark.parametrize("one_group", [True, False])
@pytest.mark.parametrize("loss", ["bnpo", "dr_grpo", "dapo"])
def test_losses_over_all_tokens_count_every_token_alike(loss: str, one_group: bool) -> None:
    """With one group and a wide range tokens have GSPO's ratio; before the policy moves, any groups give TRL's loss."""
    batch = with_old_policy(micro_batch(4), model()) if one_group else micro_batch(11)
    ours = {"espo_quantiles": [], "espo_alpha": 1e6} if one_group else {}
    theirs = {"importance_sampling_level": "sequence", "epsilon": 1e3} if one_group else {}
    value, gradient = loss_and_gradients(trainer(**{**WHOLE, "loss_type": loss, **ours}), batch)
    expected, expected_gradient = loss_and_gradients(trainer(PlainTrainer, loss_type=loss, **theirs), batch)
    assert value == pytest.approx(expected, rel=1e-4)
    assert_same_gradient(expected_gradient, gradient)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_off_policy_mask_is_of_the_log_probabilities(sampled: bool) -> None:
    """The mask uses log-probabilities of the sampler, or else the old policy, not the values inside TRL's ratios."""
    batch, logprob, entropy = old_batch(micro_batch(7))
    batch["advantages"] = torch.linspace(-1, 0.5, GROUP)
    old = sampler = batch["old_per_token_logps"]
    if sampled:
        sampler = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(2))
        batch["sampling_per_token_logps"] = sampler
    mask, against = batch["completion_mask"], batch["advantages"] < 0
    divergence = ((sampler - logprob) * mask).sum(1) / mask.sum(1)
    ranked = divergence[against].sort().values
    threshold = float(ranked[len(ranked) // 2 - 1 : len(ranked) // 2 + 1].mean())
    dropped = against & (divergence > threshold)
    assert 0 < dropped.sum() < against.sum()
    # With the denominator "self" the mean over a sequence would be the same.
    made = trainer(**WHOLE, espo_denominator="old", off_policy_mask_threshold=threshold)
    value, _ = loss_and_gradients(made, batch)
    kept = batch | {"advantages": batch["advantages"].masked_fill(dropped, 0)}
    assert_value(value, espo_loss(logprob, entropy, kept, "old")[0])


def test_a_tools_tokens_are_in_no_group() -> None:
    batch = micro_batch(8)
    batch["completion_mask"][:, :2] = 1
    batch, logprob, entropy = old_batch(batch)
    rest = batch | {name: batch[name][:, 1:] for name in ("completion_mask", "old_per_token_logps")}
    tools = torch.ones_like(batch["completion_mask"])
    tools[:, 0] = 0
    value, _ = loss_and_gradients(trainer(**WHOLE), batch | {"tool_mask": tools})
    assert_value(value, espo_loss(logprob[:, 1:], entropy[:, 1:], rest)[0])


def test_the_vocabulary_is_that_of_the_text() -> None:
    """A vision model has one configuration for each of its parts."""
    batch, values, wide = with_old_policy(micro_batch(9), model()), [], model()
    for vocabulary in (VOCABULARY, VOCABULARY**2):
        made = trainer(policy=wide, **ESPO, tokens=1.0)
        text = Qwen2Config(vocab_size=vocabulary)
        made.model.config.get_text_config = lambda *_, text=text, **__: text
        loss_and_gradients(made, batch)
        values.append(made._metrics["train"]["clip_ratio/region_mean"][0])
    assert values[0] < values[1]  # with the larger vocabulary the range is half as wide


def test_kl_is_weighted_by_the_groups_ratio() -> None:
    """With TRL's bias correction, the divergence of a token is multiplied by its ratio."""
    batch, logprob, entropy = old_batch(micro_batch(7), reference=True)
    values = []
    for beta in (0.0, 0.3):
        made = trainer(**WHOLE)
        made.beta = beta  # the batch has the reference's scores
        values.append(loss_and_gradients(made, batch)[0])
    mask, shift = batch["completion_mask"].bool(), batch["ref_per_token_logps"].double() - logprob
    terms = espo_terms(
        logprob.float(), batch["old_per_token_logps"], entropy.float(), mask,
        quantiles=[0.8], alpha=ALPHA, denominator="self", vocab_size=VOCABULARY,
    )  # fmt: skip
    divergence = (shift.exp() - shift - 1) * (terms.ratio if made.args.use_bias_correction_kl else 1.0)
    mean = ((divergence * mask).sum(1) / mask.sum(1)).mean() / STEPS
    assert values[1] - values[0] == pytest.approx(0.3 * mean.item(), rel=1e-3)


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_a_token_without_an_entropy_is_in_no_group(loss: str) -> None:
    batch = with_old_policy(micro_batch(8), model())
    entropy = torch.rand(batch["old_per_token_logps"].shape)
    entropy[:, 0] = torch.nan
    made = trainer(**{**WHOLE, "loss_type": loss})
    moved, epsilon = as_espo(batch | {"d3s_entropy": entropy}, batch["old_per_token_logps"], entropy, made.args, 61)
    assert not moved["advantages"][:, 0].any()
    assert not epsilon[:, 0].any()
    assert (moved["advantages"][:, 1:][batch["completion_mask"][:, 1:].bool()] != 0).all()


def test_clip_metrics_are_of_the_tokens_own_ranges() -> None:
    batch, logprob, entropy = old_batch(micro_batch(5))
    made = trainer(**ESPO, tokens=1.0)
    loss_and_gradients(made, batch)
    logged = made._metrics["train"]
    clipped = espo_loss(logprob, entropy, batch)[1]
    assert 0 < logged["clip_ratio/region_mean"][0] <= clipped.sum() / batch["completion_mask"].sum()
    assert (made.epsilon_low, made.epsilon_high) == (made.args.epsilon, made.args.epsilon)


def test_a_batch_is_used_again_as_it_was() -> None:
    batch = with_old_policy(micro_batch(6), model())
    before, made = dict(batch), trainer(**ESPO)
    first, gradient = loss_and_gradients(made, batch)
    assert batch.keys() == before.keys()
    assert all(batch[name] is before[name] for name in batch)
    second, again = loss_and_gradients(made, batch)
    assert second == first
    assert torch.equal(again, gradient)
