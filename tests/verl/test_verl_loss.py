"""The policy loss ``d3s``, configured through verl, around verl's own losses; and the options of ``espo`` too."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl_losses import POLICY_LOSS, TARGET, actor_config, gradient, make_batch, options

from d3s_kernels import select_tokens


def a_batch(rows: int = 6) -> dict[str, Tensor]:
    """Ratios stay inside verl's clipping, so every token that counts has a gradient other than zero."""
    return make_batch(torch.tensor([20, *torch.randint(2, 21, (rows - 1,)).tolist()]), moves=0.02)


def top_tokens(batch: dict[str, Tensor], ratio: float) -> Tensor:
    """The ceil(ratio * n) tokens of the micro-batch with the highest |A| * -old_log_prob, by sorting."""
    score = (batch["advantages"].abs() * -batch["old_log_prob"]).masked_fill(~batch["response_mask"], -1.0)
    count = math.ceil(ratio * int(batch["response_mask"].sum()) - 1e-9)
    mask = torch.zeros(score.numel(), dtype=torch.bool)
    mask[score.flatten().sort(descending=True, stable=True).indices[:count]] = True
    return mask.view_as(score)


def test_the_rule_is_the_option() -> None:
    batch, rule = a_batch(), "entropy_quantile"
    surprisal, mask = -batch["old_log_prob"], batch["response_mask"]
    kept = select_tokens(surprisal, batch["advantages"], 0.3, rule=rule, mask=mask).mask
    _, found = gradient("d3s", batch, actor_config(*options("d3s", token_ratio=0.3, token_rule=rule)))
    assert torch.equal(found != 0, kept)


BASES = [
    ("vanilla", "token-mean"), ("vanilla", "seq-mean-token-sum"), ("gspo", "seq-mean-token-mean"),
    ("cispo", "token-mean"), ("geo_mean", "token-mean"), ("gpg", "token-mean"), ("espo", "token-mean"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "agg"), BASES)
@pytest.mark.parametrize("ratio", [0.05, 1.0])
def test_gradient_on_exactly_the_kept_tokens(base: str, agg: str, ratio: float) -> None:
    """On the kept tokens the gradient is that of the base loss. The value of the loss does not change."""
    batch = a_batch()
    values = {"base_loss": base, "token_ratio": ratio}
    if base == "espo":  # its clipping is much narrower
        values |= {"vocab_size": 1000, "entropy_source": "surprisal", "alpha": 100}
    config = actor_config(*options("d3s", **values))
    loss, grad = gradient(config.policy_loss.loss_mode, batch, config, agg)
    whole_loss, whole_grad = gradient(base, batch, config, agg)
    kept = top_tokens(batch, ratio)
    assert torch.equal(grad != 0, kept)
    assert torch.equal(grad, torch.where(kept, whole_grad, 0.0))
    assert torch.equal(loss, whole_loss)


def test_zeros_can_be_dropped() -> None:
    """Fewer than half of the tokens have an advantage. (The gradient of ``dro`` is not 0 where the advantage is 0.)"""
    batch = a_batch(rows=2)
    batch["response_mask"] = torch.arange(20) < torch.tensor([[5], [20]])
    batch["advantages"] = torch.tensor([[1.0], [0.0]]).expand(2, 20)
    for drop, kept in ((False, 13), (True, 5)):
        values = options("d3s", base_loss="dro", token_ratio=0.5, drop_zeros=drop)
        _, grad = gradient("d3s", batch, actor_config(*values, f"{POLICY_LOSS}.dro_beta=1"))
        assert int((grad != 0).sum()) == kept
        assert (grad[0, :5] != 0).all()


@pytest.mark.parametrize(("name", "values"), [("d3s", {}), ("espo", {"vocab_size": 9, "entropy_source": "surprisal"})])
def test_rows_of_padding_alone(name: str, values: dict[str, Any]) -> None:
    """An empty micro-batch still has a gradient, of zeros."""
    batch, config = a_batch(), actor_config(*options(name, **values))
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    config.global_batch_info.update(batch_num_tokens=7, global_batch_size=8)  # from other micro-batches
    loss, grad = gradient(name, batch, config)
    assert loss == 0
    assert not grad.any()


# ---- options, also of espo -------------------------------------------------------------------------------------------


def test_without_its_class_it_has_its_defaults() -> None:
    batch, plain = a_batch(), actor_config(f"{POLICY_LOSS}.loss_mode=d3s")
    ours = actor_config(*options("d3s"))
    assert torch.equal(gradient("d3s", batch, plain)[1], gradient("d3s", batch, ours)[1])


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("token_ratio", 0.0, r"a number in \(0, 1\]"),
        ("token_ratio", 1.5, r"a number in \(0, 1\]"),
        ("token_scope", "group", "'batch' or 'sequence'"),
        ("drop_zeros", 1, "true or false"),
        ("base_loss", "d3s", "the name of another policy loss"),
        ("quantiles", [0.8, 0.2], r"rising numbers in \(0, 1\), at most 15"),
        ("quantiles", [0.5, 1.0], r"rising numbers in \(0, 1\), at most 15"),
        ("quantiles", 0.8, r"rising numbers in \(0, 1\), at most 15"),
        ("alpha", 0, "a number above 0"),
        ("denominator", "new", "'self' or 'old'"),
        ("vocab_size", 1, "a whole number of at least 2"),
        ("entropy_source", "rollout", "'old' or 'update' or 'surprisal'"),
    ],
)
def test_bad_options(key: str, value: Any, takes: str) -> None:
    got = repr(value).replace("[", r"\[")
    with pytest.raises(Exception, match=rf"policy_loss\.{key}: got {got}; takes {takes}"):
        actor_config(TARGET, f"+{POLICY_LOSS}.{key}={value}")


@pytest.mark.parametrize(("loss", "other", "key"), [("espo", "d3s", "token_ratio"), ("d3s", "espo", "alpha")])
def test_an_option_of_another_loss(loss: str, other: str, key: str) -> None:
    with pytest.raises(Exception, match=rf"policy_loss\.{key}: got 0.3 without loss_mode '{other}', which alone reads"):
        actor_config(*options(loss, **{key: 0.3}))


def test_an_unknown_base_loss() -> None:
    config = actor_config(*options("d3s", base_loss="none_such"))
    with pytest.raises(ValueError, match="none_such"):
        get_policy_loss_fn("d3s")(**a_batch(), config=config)


@pytest.mark.parametrize("name", ["d3s", "espo"])
def test_no_config(name: str) -> None:
    with pytest.raises(ValueError, match="config: got None"):
        get_policy_loss_fn(name)(**a_batch())
