"""prime-rl: D3S's two selections, by starting its processes through this module.

``python -m d3s_kernels.integrations.prime_rl rl --d3s.rollouts 0.5 --d3s.token_ratio 0.2 @ rl.toml`` stands for
``rl @ rl.toml``, on one node. Processes that are started one by one have ``orchestrator`` or ``trainer`` in its place.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..rollouts import select_rollouts
from ._assumptions import Assumption, Table, load, require
from ._hook_options import PREFIX, CommandOptions
from ._options import rollouts_of

_OURS = "d3s_kernels.integrations.prime_rl"
_TRAIN = "prime_rl.trainer.rl.train"
_LOSS = "prime_rl.trainer.rl.loss"
_ALGORITHMS = "prime_rl.orchestrator.algo"
_ENTROPIES = "shift_tensor_right(out['entropy'], pad_value=torch.log(torch.tensor(float(vocab_size))).item())"

TABLE = Table(
    "prime_rl", "PrimeIntellect-ai/prime-rl", "559b447", "2026-08-21",
    (
        Assumption("rl", "prime_rl.entrypoints.rl:main", "calls", "rl(cli(RLConfig))", "where a run starts"),
        Assumption("rl", "prime_rl.entrypoints.rl:rl", "reads", "slurm", "what a run is refused for"),
        Assumption(
            "rl", "prime_rl.entrypoints.rl:rl_local", "reads", f"Popen orchestrator torchrun {_TRAIN}",
            "the two commands in whose place ours are started",
        ),
        Assumption(
            "orchestrator", "prime_rl.entrypoints.orchestrator:main", "calls", "run_orchestrator(config)",
            "where the orchestrator starts",
        ),
        Assumption(
            "orchestrator", "prime_rl.orchestrator.envs:TrainEnvs", "calls",
            "build_algorithm(config.algo, policy_pool)", "where an algorithm gets the hook",
        ),
        Assumption(
            "orchestrator", f"{_ALGORITHMS}.base:Algorithm.finalize_group", "calls", "self.score_group(episodes)",
            "the call of the hook",
        ),
        Assumption(
            "orchestrator", f"{_ALGORITHMS}.base:iter_trainable_traces", "takes", "(episodes)", "a group's rollouts"
        ),
        Assumption(
            "orchestrator", f"{_ALGORITHMS}.routing:assign_advantages", "takes", "(trace, values)", "dropping a rollout"
        ),
        Assumption(
            "orchestrator", f"{_ALGORITHMS}.routing:is_trainable", "reads", "nodes advantages",
            "where a rollout has its advantage",
        ),
        Assumption(
            "orchestrator", "prime_rl.orchestrator.train_sink:TrainSink.process_batch", "reads",
            "train filter_zero_advantages", "what leaves dropped rollouts out of the batch",
        ),
        Assumption("trainer", f"{_TRAIN}:main", "calls", "train(cli(TrainerConfig))", "where the trainer starts"),
        Assumption("trainer", f"{_TRAIN}:train", "calls", _ENTROPIES, "the entropies"),
        Assumption("trainer", f"{_TRAIN}:train", "reads", "compute_loss", "the loss, which the hook stands before"),
        Assumption("trainer", f"{_LOSS}:shift_tensor_right", "takes", "(t, pad_value)", "the entropies"),
        Assumption(
            "trainer", f"{_LOSS}:compute_loss", "takes",
            "(trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, rl_weights, ce_weights, "
            "ref_kl_weights, rl_loss_fn, rl_scale, ce_scale, ref_kl_scale)",
            "the micro-batch",
        ),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class D3SOptions(CommandOptions):
    """The options ``--d3s.…``."""

    rollout_scope: Literal["group"] = "group"
    token_pool: Literal["micro_batch"] = "micro_batch"

    def __post_init__(self) -> None:
        if self.rollout_scope != "group":
            raise ValueError(f"{PREFIX}rollout_scope: got {self.rollout_scope!r}; takes 'group': each is scored alone")
        if self.token_pool != "micro_batch":
            raise ValueError(f"{PREFIX}token_pool: got {self.token_pool!r}; takes 'micro_batch', which is packed")


def main(arguments: Sequence[str]) -> None:
    """Starts the process that the first argument names, with its own arguments among the others.

    Raises:
        ValueError: another process; a bad option; a configuration that does not fit, such as one for Slurm.
        RuntimeError: prime-rl differs from what is assumed.
    """
    process = "".join(arguments[:1])
    if process not in _PROCESSES:
        raise ValueError(f"process: got {process!r}; takes {' or '.join(map(repr, _PROCESSES))}, before its arguments")
    options, rest = D3SOptions.from_command(arguments[1:])
    require(TABLE, process)
    sys.argv = [process, *rest]
    _PROCESSES[process](options)


def _launch(options: D3SOptions) -> None:
    launcher: Any = importlib.import_module("prime_rl.entrypoints.rl")
    start, popen = launcher.rl, launcher.Popen

    def rl(config: Any) -> None:
        if config.slurm is not None:
            raise ValueError("slurm: got a section; takes none, because its script starts the processes without hooks")
        _require_fit(config.orchestrator, options)
        start(config)

    def with_hooks(command: Any, *given: Any, **named: Any) -> Any:
        if command[0] == "orchestrator":
            command = [sys.executable, "-m", _OURS, "orchestrator", *options.as_command(), *command[1:]]
        elif command[0] == "torchrun":
            at = command.index(_TRAIN)
            command = [*command[:at], _OURS, "trainer", *options.as_command(), *command[at + 1 :]]
        return popen(command, *given, **named)

    launcher.rl, launcher.Popen = rl, with_hooks
    launcher.main()


def _orchestrate(options: D3SOptions) -> None:
    orchestrator: Any = importlib.import_module("prime_rl.orchestrator.orchestrator")
    envs: Any = importlib.import_module("prime_rl.orchestrator.envs")
    start, build = orchestrator.run_orchestrator, envs.build_algorithm

    async def run_orchestrator(config: Any) -> None:
        _require_fit(config, options)
        await start(config)

    def build_algorithm(config: Any, policy_pool: Any) -> Any:
        algorithm = build(config, policy_pool)
        algorithm.score_group = partial(keep_rollouts, options, algorithm.score_group)
        return algorithm

    orchestrator.run_orchestrator = run_orchestrator
    if options.rollouts != 1:
        envs.build_algorithm = build_algorithm
    importlib.import_module("prime_rl.entrypoints.orchestrator").main()


def _train(options: D3SOptions) -> None:
    trainer: Any = importlib.import_module(_TRAIN)
    start = trainer.train

    def train(config: Any) -> None:
        if options.token_rule == "random" and config.model.cp > 1:
            raise ValueError(
                f"{PREFIX}token_rule: got 'random' with trainer.model.cp {config.model.cp}; takes another rule, "
                "because ranks that share a micro-batch would draw different tokens"
            )
        start(config)

    trainer.train = train
    if options.token_ratio != 1:
        hooks = keep_tokens(trainer.shift_tensor_right, trainer.compute_loss, options)
        trainer.shift_tensor_right, trainer.compute_loss = hooks
    trainer.main()


_PROCESSES = {"rl": _launch, "orchestrator": _orchestrate, "trainer": _train}


def _require_fit(config: Any, options: D3SOptions) -> None:
    """Raises a ValueError for an orchestrator that would train on a rollout whose advantage is set to 0."""
    if options.rollouts == 1:
        return
    if not config.train.filter_zero_advantages:
        raise ValueError("train.filter_zero_advantages: got False; takes True, which leaves dropped rollouts out")
    for source in config.train.source:
        if source.algo.type not in ("grpo", "max_rl"):
            raise ValueError(f"algo.type: got {source.algo.type!r}; takes 'grpo' or 'max_rl', or {PREFIX}rollouts 1")


async def keep_rollouts(options: D3SOptions, score_group: Callable[..., Any], episodes: list[Any]) -> None:
    """An algorithm's ``score_group``, which then sets the advantage of the rollouts not chosen to 0."""
    await score_group(episodes)
    iter_trainable_traces = load(f"{_ALGORITHMS}.base:iter_trainable_traces")
    assign_advantages = load(f"{_ALGORITHMS}.routing:assign_advantages")
    traces = [trace for _, trace in iter_trainable_traces(episodes)]
    advantages = torch.tensor([next(a for node in trace.nodes for a in node.advantages or ()) for trace in traces])
    keep = rollouts_of(options.rollouts, len(traces))
    kept = select_rollouts(advantages, keep, rule=options.rollout_rule, scope="group")
    for trace, chosen in zip(traces, kept.tolist(), strict=True):
        if not chosen:
            assign_advantages(trace, 0.0)


def keep_tokens(
    shift_tensor_right: Callable[..., Tensor], compute_loss: Callable[..., Any], options: D3SOptions
) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """The two functions of a training step: the first remembers the entropies, with which the second chooses tokens.

    The loss's value does not change; tokens of the components "ce" and "ref_kl" keep their gradient.
    """
    seen: list[Tensor] = []

    def shifted(t: Tensor, pad_value: float | None = None) -> Tensor:
        result = shift_tensor_right(t, pad_value=pad_value)
        if pad_value is not None and pad_value > 0:  # entropies are padded with log V, log-probabilities with -log V
            seen.append(result)
        return result

    def loss_of_chosen(**given: Any) -> Any:
        logprob, mask = torch.cat(given["trainer_logprobs"]), torch.cat(given["loss_mask"])
        lengths = [len(part) for part in given["trainer_logprobs"]]
        if given["rl_weights"] is not None:
            mask = mask & (torch.cat(given["rl_weights"]) != 0)
        offsets = torch.tensor([0, *lengths], device=logprob.device).cumsum(0)
        advantages = torch.cat(given["advantages"])
        kept = options.chosen_tokens(seen.pop().flatten(), advantages, options.token_ratio, mask, offsets=offsets)
        chosen = torch.where(kept | ~mask, logprob, logprob.detach()).split(lengths)  # type: ignore[no-untyped-call]
        loss, metrics = compute_loss(**given | {"trainer_logprobs": chosen})
        return loss, {**metrics, "d3s/token_share": (kept.sum() / mask.sum().clamp(min=1)).view(1)}

    return shifted, loss_of_chosen


if __name__ == "__main__":
    main(sys.argv[1:])
