"""prime-rl's hooks, called by a stand-in that is written from the table of what is assumed about prime-rl."""

from __future__ import annotations

import asyncio
import importlib
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_stand_ins
from torch import Tensor

from d3s_kernels import reference
from d3s_kernels.integrations import prime_rl
from d3s_kernels.integrations._assumptions import load

RATIO, VOCABULARY = 0.25, 100
OPTIONS = ["--d3s.rollouts", "3", "--d3s.token_ratio", str(RATIO)]


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", [])
    rows = [*prime_rl.TABLE.assumptions]
    for module in ("orchestrator.orchestrator", "orchestrator.envs"):  # of these, names are replaced
        rows.append(rows[0]._replace(place=f"prime_rl.{module}", kind="reads", expected="nothing"))
    with trainer_stand_ins.installed(tmp_path, rows):
        yield


def part(module: str) -> Any:
    return importlib.import_module(f"prime_rl.{module}")


# ---- rollouts --------------------------------------------------------------------------------------------------------


def orchestrator_config(**changed: Any) -> Any:
    given = {"filter_zero_advantages": True, "algo": "grpo"} | changed
    source = SimpleNamespace(algo=SimpleNamespace(type=given["algo"]))
    train = SimpleNamespace(filter_zero_advantages=given["filter_zero_advantages"], source=[source])
    return SimpleNamespace(train=train)


class GRPO:
    """An algorithm that assigns rewards minus their mean, as prime-rl's does."""

    async def score_group(self, episodes: list[Any]) -> None:
        traces = [trace for _, trace in load("prime_rl.orchestrator.algo.base:iter_trainable_traces")(episodes)]
        for trace, advantage in zip(traces, centred([trace.reward for trace in traces]), strict=True):
            load("prime_rl.orchestrator.algo.routing:assign_advantages")(trace, advantage)


def centred(rewards: list[float]) -> list[float]:
    values = torch.tensor(rewards)
    return (values - values.mean()).tolist()


def orchestrate(config: Any, episodes: list[Any], *options: str) -> None:
    """Starts the orchestrator, which makes an algorithm and scores one group."""
    envs, orchestrator, entry = (
        part("orchestrator.envs"),
        part("orchestrator.orchestrator"),
        part("entrypoints.orchestrator"),
    )

    async def run_orchestrator(_: Any) -> None:
        assert sys.argv == ["orchestrator", "@", "orchestrator.json"]
        built = envs.TrainEnvs(
            build_algorithm=envs.build_algorithm, config=SimpleNamespace(algo="grpo"), policy_pool=None
        )
        finalize_group = load("prime_rl.orchestrator.algo.base:Algorithm").finalize_group
        await finalize_group(self=built[0], episodes=episodes)[0]

    envs.build_algorithm = lambda algo, _: GRPO() if algo == "grpo" else pytest.fail(algo)
    orchestrator.run_orchestrator = run_orchestrator
    main = entry.main  # the real one looks the function up when it runs
    entry.main = lambda: asyncio.run(main(config=config, run_orchestrator=orchestrator.run_orchestrator)[0])
    prime_rl.main(["orchestrator", *OPTIONS, *options, "@", "orchestrator.json"])


def group_of(rewards: Tensor) -> list[Any]:
    """An episode for each reward, whose trace has nodes of several tokens."""

    def trace(reward: float) -> Any:
        nodes = [SimpleNamespace(size=0, advantages=None), *(SimpleNamespace(size=n, advantages=None) for n in (3, 2))]
        return SimpleNamespace(reward=reward, nodes=nodes)

    return [SimpleNamespace(traces=[trace(reward)]) for reward in rewards.tolist()]


@pytest.mark.parametrize("rule", ["max_variance", "highest"])
def test_rollouts(rule: str) -> None:
    rewards = torch.randn(8)
    episodes = group_of(rewards)
    orchestrate(orchestrator_config(), episodes, f"--d3s.rollout_rule={rule}")
    advantages = centred(rewards.tolist())
    kept = reference.select_rollouts(torch.tensor(advantages), 3, rule=rule, scope="group").tolist()
    assert sum(kept) == 3
    for episode, advantage, keep in zip(episodes, advantages, kept, strict=True):
        value = advantage if keep else 0.0
        assert [node.advantages for node in episode.traces[0].nodes] == [[], [value] * 3, [value] * 2]


def test_all_rollouts() -> None:
    rewards = torch.randn(5)
    episodes = group_of(rewards)
    orchestrate(orchestrator_config(algo="rae"), episodes, "--d3s.rollouts=1")
    assert [one.traces[0].nodes[1].advantages[0] for one in episodes] == centred(rewards.tolist())


# ---- tokens ----------------------------------------------------------------------------------------------------------


def train(micro_batch: dict[str, Any], *options: str, cp: int = 1) -> tuple[tuple[Tensor, dict[str, Any]], Tensor]:
    """Starts the trainer, which makes one step: its loss and metrics, and its loss without our hooks."""
    trainer, loss = part("trainer.rl.train"), part("trainer.rl.loss")
    trainer.shift_tensor_right, trainer.compute_loss = loss.shift_tensor_right, loss.compute_loss
    shifts, main, results = trainer.train, trainer.main, []

    def step(shift_tensor_right: Any, compute_loss: Any) -> Any:
        names = {"torch": torch, "float": float, "vocab_size": VOCABULARY, "shift_tensor_right": shift_tensor_right}
        shifts(out={"entropy": micro_batch["entropy"]}, **names)
        logprob = shift_tensor_right(micro_batch["logprobs"], pad_value=-math.log(VOCABULARY))  # in any order
        per_token = {"trainer_logprobs": logprob} | micro_batch["streams"]
        split = {n: v if v is None else v.squeeze().split(micro_batch["lengths"]) for n, v in per_token.items()}
        return compute_loss(**split, **dict.fromkeys(("rl_loss_fn", "rl_scale", "ce_scale", "ref_kl_scale"), 7))

    def start(_: Any) -> None:
        assert sys.argv == ["trainer", "@", "trainer.json"]
        results.append(step(trainer.shift_tensor_right, trainer.compute_loss))
        results.append(step(loss.shift_tensor_right, loss.compute_loss)[0])

    trainer.train = start
    config = SimpleNamespace(model=SimpleNamespace(cp=cp))
    trainer.main = lambda: main(train=trainer.train, cli=lambda _: config, TrainerConfig=None)
    prime_rl.main(["trainer", "@", "trainer.json", *OPTIONS, *options])
    return results[0], results[1]


def micro_batch_of(components: bool) -> dict[str, Any]:
    """A packed micro-batch. Before the shift, the first token's numbers are those of the second."""
    lengths = [9, 14, 6, 11]
    total = sum(lengths)
    weights = (torch.rand(1, total) < 0.7).float() if components else None
    return {
        "lengths": lengths,
        "logprobs": torch.randn(1, total, requires_grad=True),
        "entropy": torch.rand(1, total) + 0.1,
        "streams": {
            "advantages": torch.randn(1, total) * (torch.rand(1, total) < 0.7),
            "loss_mask": torch.rand(1, total) < 0.8,
            "rl_weights": weights,
            **dict.fromkeys(("inference_logprobs", "ref_logprobs", "ce_weights", "ref_kl_weights")),
        },
    }


@pytest.mark.parametrize("components", [False, True])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], {}),
        (["--d3s.token_scope=sequence"], {"scope": "sequence"}),
        (["--d3s.token_rule=entropy"], {"rule": "entropy"}),
        (["--d3s.drop_zeros=true", "--d3s.token_ratio=0.9"], {"drop_zeros": True, "ratio": 0.9}),
    ],
)
def test_tokens(components: bool, options: list[str], named: dict[str, Any]) -> None:
    batch = micro_batch_of(components)
    streams, lengths = batch["streams"], batch["lengths"]
    (loss, metrics), plain = train(batch, *options)
    (gradient,) = torch.autograd.grad(loss, batch["logprobs"])

    advantages, mask = (streams[name].flatten() for name in ("advantages", "loss_mask"))
    of_loss = mask & (streams["rl_weights"].flatten() != 0) if components else mask
    entropy = torch.cat([torch.tensor([math.log(VOCABULARY)]), batch["entropy"][0, :-1]])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    named = {"ratio": RATIO, "mask": of_loss, "offsets": offsets} | named
    kept = reference.select_tokens(entropy, advantages, **named).mask
    assert 0 < kept.sum() < of_loss.sum()
    assert metrics["d3s/token_share"].tolist() == [float(kept.sum() / of_loss.sum())]

    assert torch.equal(torch.cat(metrics["seen"])[1:], batch["logprobs"][0, :-1])
    assert torch.equal(loss, plain)
    (of_all,) = torch.autograd.grad(plain, batch["logprobs"])
    # the first token's log-probability is a constant; those of other components keep their gradient
    with_gradient = torch.cat([(kept | ~of_loss)[1:], torch.tensor([False])])
    assert torch.equal(gradient[0], torch.where(with_gradient, of_all[0], 0.0))


def test_all_tokens() -> None:
    batch = micro_batch_of(False)
    (loss, metrics), plain = train(batch, "--d3s.token_ratio=1")
    gradients = [torch.autograd.grad(value, batch["logprobs"])[0] for value in (loss, plain)]
    assert torch.equal(*gradients)
    assert list(metrics) == ["seen"]


# ---- the launcher ----------------------------------------------------------------------------------------------------


def launch(*options: str, **changed: Any) -> list[list[str]]:
    """The commands that prime-rl's launcher runs with our hooks."""
    launcher, commands = part("entrypoints.rl"), []
    main = launcher.main

    def rl(_: Any) -> None:
        launcher.Popen(["inference", "@", "inference.json"], env={})
        launcher.Popen(["orchestrator", "@", "orchestrator.json"], env={})
        launcher.Popen(["torchrun", "--role=trainer", "-m", "prime_rl.trainer.rl.train", "@", "trainer.json"])
        launcher.Popen("tail -F orchestrator.log", shell=True)

    config = SimpleNamespace(slurm=changed.pop("slurm", None), orchestrator=orchestrator_config(**changed))
    launcher.rl, launcher.Popen = rl, lambda command, **_: commands.append(command)
    launcher.main = lambda: main(rl=launcher.rl, cli=lambda _: config, RLConfig=None)
    prime_rl.main(["rl", *OPTIONS, *options, "@", "rl.toml"])
    assert sys.argv == ["rl", "@", "rl.toml"]
    return commands


def test_the_launcher_starts_our_processes() -> None:
    inference, orchestrator, trainer, tail = launch("--d3s.token_rule=entropy", "--d3s.drop_zeros", "true")
    assert inference == ["inference", "@", "inference.json"]
    assert tail == "tail -F orchestrator.log"
    module = "d3s_kernels.integrations.prime_rl"
    assert orchestrator[:4] == [sys.executable, "-m", module, "orchestrator"]
    assert trainer[:5] == ["torchrun", "--role=trainer", "-m", module, "trainer"]
    for command, rest in ((orchestrator[4:], "orchestrator.json"), (trainer[5:], "trainer.json")):
        options = prime_rl.D3SOptions(rollouts=3, token_ratio=RATIO, token_rule="entropy", drop_zeros=True)
        assert prime_rl.D3SOptions.from_command(command) == (options, ["@", rest])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (partial(launch, slurm=object()), "slurm: got a section; takes none"),
        (partial(launch, filter_zero_advantages=False), r"train\.filter_zero_advantages: got False; takes True"),
        (partial(launch, algo="opd"), r"algo\.type: got 'opd'; takes 'grpo' or 'max_rl', or --d3s\.rollouts 1"),
        (partial(launch, "--d3s.rollout_scope=batch"), r"--d3s\.rollout_scope: got 'batch'; takes 'group'"),
        (partial(launch, "--d3s.token_pool=data_parallel"), r"--d3s\.token_pool: got 'data_parallel'; takes 'micro"),
        (partial(orchestrate, orchestrator_config(algo="rae"), []), r"algo\.type: got 'rae'; takes"),
        (partial(train, {}, "--d3s.token_rule=random", cp=2), r"token_rule: got 'random' with trainer\.model\.cp 2"),
        (partial(prime_rl.main, ["sft"]), "process: got 'sft'; takes 'rl' or 'orchestrator' or 'trainer'"),
        (partial(prime_rl.main, []), "process: got ''; takes 'rl' or"),
    ],
)
def test_refused(start: partial[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start()


def test_another_prime_rl_is_refused(tmp_path: Path) -> None:
    *others, last = prime_rl.TABLE.assumptions
    rows = [*others, last._replace(expected=last.expected.replace("loss_mask, ", ""))]
    with trainer_stand_ins.installed(tmp_path / "other", rows):
        with pytest.raises(RuntimeError, match=r"trainer: this prime_rl is not as .*compute_loss takes "):
            prime_rl.main(["trainer"])
        prime_rl.require(prime_rl.TABLE, "orchestrator")  # what this process relies on is there
