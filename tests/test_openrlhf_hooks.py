"""OpenRLHF's hooks, called by a stand-in that is written from the table of what is assumed about OpenRLHF."""

from __future__ import annotations

import pickle
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_stand_ins
from ranks import Ranks, world
from torch import Tensor

from d3s_kernels import reference
from d3s_kernels.integrations import openrlhf
from d3s_kernels.integrations._assumptions import load

GROUPS, GROUP, RATIO = 4, 6, 0.25
OPTIONS = ["--d3s.rollouts", "2", f"--d3s.token_ratio={RATIO}"]
# What the stand-in's command does: its strategy, which here is its arguments, goes to another process and back.
COMMAND = """
if __name__ == "__main__":
    import pickle, sys
    from openrlhf import utils
    (strategy,) = train(utils.ARGUMENTS, utils.get_strategy)
    utils.arrived = pickle.dumps(strategy), sys.argv
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Any]:
    """OpenRLHF's stand-in: its package ``openrlhf.utils``."""
    with trainer_stand_ins.installed(tmp_path, openrlhf.TABLE.assumptions):
        with (tmp_path / "openrlhf" / "cli" / "train_ppo_ray.py").open("a", encoding="utf-8") as file:
            file.write(COMMAND)
        (tmp_path / "openrlhf" / "utils" / "__init__.py").write_text("from .utils import get_strategy")
        openrlhf._set_hooks.cache_clear()
        yield __import__("openrlhf.utils").utils


def nested(values: dict[str, Any]) -> SimpleNamespace:
    root = SimpleNamespace()
    for path, value in values.items():
        node, *names = root, *path.split(".")
        for name in names[:-1]:
            if not hasattr(node, name):
                setattr(node, name, SimpleNamespace())
            node = getattr(node, name)
        setattr(node, names[-1], value)
    return root


def arguments(**changed: Any) -> SimpleNamespace:
    """OpenRLHF's arguments, after its own checks."""
    given = {
        "algo.advantage.estimator": "group_norm", "train.dynamic_batch_enable": False, "train.batch_size": 4,
        "rollout.batch_size": GROUPS, "rollout.micro_batch_size": 1, "rollout.n_samples_per_prompt": GROUP,
        "actor.entropy_coef": 0, "actor.num_nodes": 1, "actor.num_gpus_per_node": 4, "ds.ring_attn_size": 2,
        "ds.tensor_parallel_size": 1,
    }  # fmt: skip
    return nested(given | changed)


def started(stand_in: Any, monkeypatch: pytest.MonkeyPatch, *options: str, **changed: Any) -> Any:
    """The arguments as another process gets them, in which the hooks are then set."""
    stand_in.ARGUMENTS = arguments(**changed)
    monkeypatch.setattr("sys.argv", [])
    openrlhf.main(["--actor.optim", "adam", *OPTIONS, *options, "--use_ms"])
    strategy, argv = stand_in.arrived
    assert argv[1:] == ["--actor.optim", "adam", "--use_ms"]
    return pickle.loads(strategy)


# ---- rollouts --------------------------------------------------------------------------------------------------------


def made(args: Any, rewards: Tensor) -> tuple[list[Any], list[Any]]:
    """All experiences, and those that the stand-in's maker trains on."""
    maker = load(openrlhf._MAKER)()
    maker.args = args
    given = [SimpleNamespace(rewards=reward.view(1)) for reward in rewards.flatten()]
    (kept,) = type(maker).make_experience_batch(self=maker, experiences=list(given))
    return given, kept


@pytest.mark.parametrize(("estimator", "scale"), [("group_norm", "group"), ("dr_grpo", "none")])
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_rollouts(stand_in: Any, monkeypatch: pytest.MonkeyPatch, estimator: str, scale: str, scope: str) -> None:
    options = [f"--d3s.rollout_scope={scope}"]
    args = started(stand_in, monkeypatch, *options, **{"algo.advantage.estimator": estimator})
    rewards = torch.randn(GROUPS, GROUP) * 10.0 ** torch.arange(GROUPS).unsqueeze(1)
    given, kept = made(args, rewards)
    chosen = reference.select_rollouts(reference.group_advantages(rewards, scale=scale), 2, scope=scope).flatten()
    assert kept == [one for one, keep in zip(given, chosen.tolist(), strict=True) if keep]
    assert all(torch.equal(one.advantages, one.rewards * 2) for one in kept)  # the stand-in's, as it set them


@pytest.mark.parametrize(("ring", "number"), [(1, 8), (2, 6)])
def test_every_rank_gets_equally_many(stand_in: Any, monkeypatch: pytest.MonkeyPatch, ring: int, number: int) -> None:
    """The last batch of an epoch may have fewer prompts: of 3, with 2 rollouts each, 8 are kept on 4 ranks."""
    args = started(stand_in, monkeypatch, **{"ds.ring_attn_size": ring})
    assert len(made(args, torch.randn(3, GROUP))[1]) == number


def test_all_rollouts(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = started(stand_in, monkeypatch, "--d3s.rollouts=1", **{"algo.advantage.estimator": "gae"})
    given, kept = made(args, torch.randn(GROUPS, GROUP))
    assert kept == given


# ---- tokens ----------------------------------------------------------------------------------------------------------


class Actor(torch.nn.Module):
    """Entropies of prompts, of 7 tokens, are the highest."""

    def forward(self, experience: Any) -> tuple[Tensor, Any]:
        entropy = torch.cat([torch.full((len(experience.entropy), 7), 50.0), experience.entropy], 1)
        return experience.logprob * 1, SimpleNamespace(entropy=entropy)


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, action_mask: Tensor, rollout_log_probs: Any, scale: float
) -> Tensor:
    """Of whole sequences, with a weight for each token: what a token has of it shows in its gradient."""
    ratio = ((log_probs - old) * action_mask * torch.arange(1, 1 + old.shape[1])).sum(1, keepdim=True).exp()
    return (ratio * advantages * action_mask).sum() * scale


def experience_of(rows: int = 5, width: int = 12) -> Any:
    mask = torch.arange(width) < torch.randint(width // 2, width, (rows, 1))
    return SimpleNamespace(
        logprob=(torch.randn(rows, width) * 0.01).requires_grad_(),
        action_log_probs=torch.randn(rows, width) * 0.01,
        rollout_log_probs=None,
        advantages=torch.randn(rows, 1).expand(rows, width).contiguous(),
        action_mask=mask.long(),
        entropy=torch.where(mask, torch.rand(rows, width) + 0.1, 99.0).requires_grad_(),
    )


def step(args: Any, experience: Any, group: Any = None) -> tuple[dict[str, Any], Tensor]:
    """The status of a training step of the stand-in, and the gradient of the log-probabilities."""
    trainer = load(openrlhf._ACTOR)()
    trainer.args, trainer.actor, trainer.actor_loss_fn = args, Actor(), policy_loss
    trainer.strategy = SimpleNamespace(ds_device_mesh={"dp": SimpleNamespace(get_group=lambda: group)})
    status = trainer.training_step(experience, 0.0, 3, {"scale": 0.5})
    assert trainer.actor_loss_fn is policy_loss
    assert not trainer.actor._forward_hooks
    (gradient,) = torch.autograd.grad(status["metrics"]["loss"], experience.logprob)
    return status, gradient


def expected(experience: Any, kept: Tensor) -> tuple[Tensor, Tensor]:
    old, advantages, mask = experience.action_log_probs, experience.advantages, experience.action_mask
    loss = policy_loss(experience.logprob * 1, old, advantages, mask, None, 0.5)
    (gradient,) = torch.autograd.grad(loss, experience.logprob)
    return loss, torch.where(kept, gradient, 0.0)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_tokens(stand_in: Any, monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    args, experience = started(stand_in, monkeypatch, f"--d3s.token_scope={scope}"), experience_of()
    status, gradient = step(args, experience)
    mask = experience.action_mask.bool()
    kept = reference.select_tokens(
        experience.entropy.detach(), experience.advantages, RATIO, mask=mask, scope=scope
    ).mask
    loss, of_kept = expected(experience, kept)
    assert torch.equal(status["metrics"]["loss"], loss)
    assert torch.equal(gradient, of_kept)
    assert (gradient != 0).sum() == kept.sum() < mask.sum()
    assert status["metrics"]["d3s/token_share"] == kept.sum() / mask.sum()
    assert status["weights"]["d3s/token_share"] == "token"


def test_all_tokens(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = started(stand_in, monkeypatch, "--d3s.token_ratio=1", **{"actor.entropy_coef": None})
    experience = experience_of()
    status, gradient = step(args, experience)
    assert torch.equal(gradient, expected(experience, experience.action_mask.bool())[1])
    assert list(status["metrics"]) == ["loss"]


def tokens_rank(ranks: Ranks, seed: int) -> None:
    """The ranks choose one exact share of their micro-batches together."""
    torch.manual_seed(seed)  # the same on all ranks
    rows = openrlhf.TABLE.assumptions
    with tempfile.TemporaryDirectory() as folder, trainer_stand_ins.installed(Path(folder), rows):
        openrlhf._set_hooks()
        parts = [experience_of() for _ in range(ranks.size)]
        names = ("entropy", "advantages", "action_mask")
        entropy, advantages, mask = (torch.cat([getattr(one, name) for one in parts]).detach() for name in names)
        kept = reference.select_tokens(entropy, advantages, RATIO, mask=mask.bool()).mask.chunk(ranks.size)
        args = SimpleNamespace(d3s=openrlhf.D3SOptions(token_ratio=RATIO))
        _, gradient = step(args, parts[ranks.rank], ranks.group)
        assert torch.equal(gradient, expected(parts[ranks.rank], kept[ranks.rank])[1])


def test_tokens_of_all_ranks() -> None:
    world(2).run(tokens_rank, int(torch.randint(2**31, ())))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        (["--d3s.rollouts", "1.5"], {}, r"--d3s\.rollouts: got 1\.5; takes a share"),
        (["--d3s.rolouts=2"], {}, r"--d3s\.rolouts: got 2, but it is no option; the options are --d3s\.rollouts, "),
        (["--d3s.rollouts"], {}, r"--d3s\.rollouts: got no value"),
        (["--d3s.token_rule=best"], {}, r"--d3s\.token_rule: got 'best'; takes 'advantage_entropy' or"),
        (["--d3s.token_rule=random"], {}, r"token_rule: got 'random' with ds\.ring_attn_size or"),
        ([], {"algo.advantage.estimator": "gae"}, r"algo\.advantage\.estimator: got 'gae'; takes 'group_norm', "),
        ([], {"train.dynamic_batch_enable": True}, r"train\.dynamic_batch_enable: got True; takes False"),
        ([], {"rollout.micro_batch_size": 2}, r"rollout\.micro_batch_size: got 2; takes 1"),
        ([], {"train.batch_size": 6}, r"train\.batch_size: got 6, but 8 rollouts are kept; takes a divisor of 8"),
        ([], {"actor.entropy_coef": None}, r"actor\.entropy_coef: got None; takes a number, such as 0"),
    ],
)
def test_refused_before_anything_starts(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, options: list[str], changed: dict[str, Any], message: str
) -> None:
    stand_in.ARGUMENTS = arguments(**changed)
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(ValueError, match=message):
        openrlhf.main([*OPTIONS, *options])
    assert not hasattr(stand_in, "arrived")


def test_another_openrlhf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in openrlhf.TABLE.assumptions if row.expected != "(self, experiences)"]
    rows.append(openrlhf.TABLE.assumptions[3]._replace(expected="(self, experiences, rewards)"))
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: pytest.fail("it was started"))
    with (
        trainer_stand_ins.installed(tmp_path, rows),
        pytest.raises(
            RuntimeError, match=r"takes \(self, experiences\), .*found it takes \(self, experiences, rewards"
        ),
    ):
        openrlhf.main([])
