"""The policy loss ``d3s``, found and configured through verl, around verl's own losses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl_losses import POLICY_LOSS, actor_config, gradient

import d3s_kernels as d3s

OURS = (
    f"{POLICY_LOSS}.loss_mode=d3s",
    f"{POLICY_LOSS}._target_=d3s_kernels.integrations.verl.loss.D3SPolicyLossConfig",
)


def options(**values: Any) -> list[str]:
    return [*OURS, *(f"+{POLICY_LOSS}.{key}={value}" for key, value in values.items())]


def make_batch(rows: int = 6, length: int = 20) -> dict[str, Tensor]:
    """Ratios stay inside verl's clipping, so every token that counts has a gradient other than zero."""
    old = -torch.rand(rows, length) * 3 - 0.05
    mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1))
    return {
        "old_log_prob": old,
        "log_prob": (old + 0.02 * torch.randn(rows, length)).requires_grad_(),
        "advantages": torch.randn(rows, 1).expand(rows, length) * mask,
        "response_mask": mask,
        "rollout_is_weights": torch.rand(rows, length) + 0.5,
    }


def top_tokens(batch: dict[str, Tensor], ratio: float) -> Tensor:
    """The ceil(ratio * n) tokens of the micro-batch with the highest |A| * -old_log_prob, by sorting."""
    score = (batch["advantages"].abs() * -batch["old_log_prob"]).masked_fill(~batch["response_mask"], -1.0)
    count = math.ceil(ratio * int(batch["response_mask"].sum()) - 1e-9)
    mask = torch.zeros(score.numel(), dtype=torch.bool)
    mask[score.flatten().sort(descending=True, stable=True).indices[:count]] = True
    return mask.view_as(score)


@pytest.mark.parametrize("rule", ["entropy", "advantage", "entropy_quantile"])
def test_other_rules(rule: Any) -> None:
    batch = make_batch()
    kept = d3s.select_tokens(
        -batch["old_log_prob"], batch["advantages"], 0.3, rule=rule, mask=batch["response_mask"]
    ).mask
    _, found = gradient("d3s", batch, actor_config(*options(token_ratio=0.3, token_rule=rule)))
    assert torch.equal(found != 0, kept)


@pytest.mark.parametrize(
    ("base", "agg"),
    [
        ("vanilla", "token-mean"),
        ("vanilla", "seq-mean-token-sum"),
        ("gspo", "seq-mean-token-mean"),
        ("cispo", "token-mean"),
        ("geo_mean", "token-mean"),
        ("gpg", "token-mean"),
        ("espo", "token-mean"),
    ],
)
@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0])
def test_gradient_on_exactly_the_kept_tokens(base: str, agg: str, ratio: float) -> None:
    """On the kept tokens the gradient is that of the base loss. The value of the loss does not change."""
    batch = make_batch()
    values = {"base_loss": base, "token_ratio": ratio}
    if base == "espo":  # its clipping is much narrower
        values |= {"vocab_size": 1000, "entropy_source": "surprisal", "alpha": 100}
    config = actor_config(*options(**values))
    loss, grad = gradient(config.policy_loss.loss_mode, batch, config, agg)
    whole_loss, whole_grad = gradient(base, batch, config, agg)
    kept = top_tokens(batch, ratio)
    assert torch.equal(grad != 0, kept)
    assert torch.equal(grad, torch.where(kept, whole_grad, 0.0))
    assert torch.equal(loss, whole_loss)


def test_gspo_with_d3s() -> None:
    """GSPO's gradient by hand: a sequence's ratio is over all its tokens, and only the kept ones have a gradient."""
    batch = make_batch()
    config = actor_config(*options(base_loss="gspo", token_ratio=0.3))
    _, grad = gradient("d3s", batch, config, "seq-mean-token-mean")
    kept = top_tokens(batch, 0.3)
    for row, mask in enumerate(batch["response_mask"]):
        moved = (batch["log_prob"] - batch["old_log_prob"]).detach()[row][mask]
        ratio = math.exp(float(moved.double().mean()))
        expected = -batch["advantages"][row] * ratio * batch["rollout_is_weights"][row] / len(moved) / len(kept)
        torch.testing.assert_close(grad[row], expected * kept[row], rtol=1e-5, atol=1e-8)


def test_a_share_of_each_sequence() -> None:
    batch = make_batch()
    config = actor_config(*options(token_ratio=0.5, token_scope="sequence"))
    _, grad = gradient("d3s", batch, config)
    lengths = batch["response_mask"].sum(-1)
    assert torch.equal((grad != 0).sum(-1), (lengths + 1) // 2)


def test_zeros_can_be_dropped() -> None:
    """Fewer than half of the tokens have an advantage. (The gradient of ``dro`` is not 0 where the advantage is 0.)"""
    batch = make_batch(rows=2)
    batch["response_mask"] = torch.arange(20) < torch.tensor([[5], [20]])
    batch["advantages"] = torch.tensor([[1.0], [0.0]]).expand(2, 20)
    for drop, kept in ((False, 13), (True, 5)):
        values = options(base_loss="dro", token_ratio=0.5, drop_zeros=drop)
        config = actor_config(*values, f"{POLICY_LOSS}.dro_beta=1")
        _, grad = gradient("d3s", batch, config)
        assert int((grad != 0).sum()) == kept
        assert (grad[0, :5] != 0).all()


def test_rows_of_padding_and_masks_of_numbers() -> None:
    """An empty micro-batch still has a gradient, of zeros."""
    batch = make_batch()
    config = actor_config(*options())
    batch["response_mask"] = batch["response_mask"].long()
    assert int((gradient("d3s", batch, config)[1] != 0).sum()) == math.ceil(
        0.2 * int(batch["response_mask"].sum()) - 1e-9
    )
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    config.global_batch_info["batch_num_tokens"] = 7  # from other micro-batches
    assert not gradient("d3s", batch, config)[1].any()


def test_its_options_have_defaults() -> None:
    config = actor_config(*OURS).policy_loss
    assert type(config).__name__ == "D3SPolicyLossConfig"
    assert (config.base_loss, config.token_ratio, config.token_scope, config.drop_zeros) == (
        "vanilla",
        0.2,
        "batch",
        False,
    )
    assert config.clip_cov_ratio == 0.0002  # verl's own options are all there


def test_without_its_class_it_has_its_defaults() -> None:
    batch = make_batch()
    plain = actor_config(f"{POLICY_LOSS}.loss_mode=d3s")
    assert torch.equal(gradient("d3s", batch, plain)[1], gradient("d3s", batch, actor_config(*OURS))[1])


def test_verls_class_refuses_the_options() -> None:
    """That is why D3S has its own class."""
    with pytest.raises(Exception, match="token_ratio"):
        actor_config(f"{POLICY_LOSS}.loss_mode=d3s", f"+{POLICY_LOSS}.token_ratio=0.1")


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("token_ratio", 0.0, r"a number in \(0, 1\]"),
        ("token_ratio", 1.5, r"a number in \(0, 1\]"),
        ("token_scope", "group", "'batch' or 'sequence'"),
        ("drop_zeros", 1, "true or false"),
        ("base_loss", "d3s", "the name of another policy loss"),
    ],
)
def test_bad_options(key: str, value: Any, takes: str) -> None:
    with pytest.raises(Exception, match=rf"policy_loss\.{key}: got {value!r}; takes {takes}"):
        actor_config(*options(**{key: value}))


def test_an_unknown_base_loss() -> None:
    config = actor_config(*options(base_loss="none_such"))
    with pytest.raises(ValueError, match="none_such"):
        get_policy_loss_fn("d3s")(**make_batch(), config=config)


def test_no_config() -> None:
    with pytest.raises(ValueError, match="config: got None"):
        get_policy_loss_fn("d3s")(**make_batch())
