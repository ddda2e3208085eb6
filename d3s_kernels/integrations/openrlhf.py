"""OpenRLHF: D3S's two selections, by starting its command through this module.

``python -m d3s_kernels.integrations.openrlhf --d3s.rollouts 0.5 --d3s.token_ratio 0.2`` stands for
``python -m openrlhf.cli.train_ppo_ray``; OpenRLHF's own arguments follow. Its trainers run in processes of Ray: the
options travel with its arguments, and set the hooks in each process in which they arrive.
"""

from __future__ import annotations

import dataclasses
import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import cache, partialmethod
from typing import Any, Literal

import torch
from torch import Tensor

from ..rollouts import group_advantages
from ._assumptions import Assumption, Table, load, require
from ._hook_options import PREFIX, CommandOptions
from ._options import rollouts_of
from ._rollouts import choose_rollouts, rows_to_keep

_COMMAND = "openrlhf.cli.train_ppo_ray"
_MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"
_ACTOR = "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer"

TABLE = Table(
    "openrlhf", "OpenRLHF/OpenRLHF", "3c3be62", "2026-08-13",
    (
        Assumption("main", f"{_COMMAND}:train", "calls", "get_strategy(args)", "where its arguments get our options"),
        Assumption("main", "openrlhf.utils.utils:get_strategy", "takes", "(args)", "the call that the options enter"),
        Assumption(
            "main", _COMMAND, "reads",
            "--algo.advantage.estimator --train.dynamic_batch_enable --train.batch_size --rollout.batch_size "
            "--rollout.micro_batch_size --rollout.n_samples_per_prompt --actor.entropy_coef --actor.num_nodes "
            "--actor.num_gpus_per_node --ds.ring_attn_size --ds.tensor_parallel_size", "what a run is refused for",
        ),
        Assumption(
            "keep_rollouts", f"{_MAKER}.compute_advantages_and_returns", "takes", "(self, experiences)",
            "the advantages, before which nothing can be dropped",
        ),
        Assumption(
            "keep_rollouts", f"{_MAKER}.make_experience_batch", "calls",
            "self.compute_advantages_and_returns(experiences)", "the call of the hook",
        ),
        Assumption(
            "keep_rollouts", "openrlhf.trainer.ppo_trainer:BasePPOTrainer.train_step", "calls",
            "self.actor_model_group.async_run_method_batch(method_name='append', experience=experiences)",
            "what is kept is all that is trained on",
        ),
        Assumption(
            "keep_rollouts keep_tokens", "openrlhf.trainer.ppo_utils.experience:Experience", "defines",
            "rewards advantages action_mask", "fields of an experience",
        ),
        Assumption(
            "keep_tokens", f"{_ACTOR}.training_step", "takes", "(self, experience, kl_ctl, step, loss_batch_info)",
            "a micro-batch of the update",
        ),
        Assumption(
            "keep_tokens", f"{_ACTOR}.training_step", "calls",
            "self.actor_loss_fn(action_log_probs, old_action_log_probs, advantages, "
            "action_mask=experience.action_mask, rollout_log_probs=experience.rollout_log_probs, **loss_batch_info)",
            "the policy loss, which gets other log-probabilities",
        ),
        Assumption("keep_tokens", f"{_ACTOR}.training_step", "reads", "metrics weights token", "where a metric goes"),
        Assumption("keep_tokens", "openrlhf.models.actor:Actor.forward", "reads", "entropy log_probs", "its output"),
        Assumption(
            "keep_tokens", "openrlhf.utils.loss_utils:_get_dp_group", "calls", "device_mesh['dp'].get_group()",
            "the ranks with other data",
        ),
    ),
)  # fmt: skip

# Those whose advantages are rewards minus the mean of their group.
_SCALES: dict[str, Literal["group", "none"]] = {
    "group_norm": "group", "dr_grpo": "none", "rloo": "none", "reinforce_baseline": "none",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class D3SOptions(CommandOptions):
    """The options ``--d3s.…``. Unpickled in another process, they set the hooks there."""

    def __reduce__(self) -> tuple[Callable[..., D3SOptions], tuple[dict[str, Any]]]:
        return _arrive, (dataclasses.asdict(self),)


def _arrive(values: dict[str, Any]) -> D3SOptions:
    _set_hooks()
    return D3SOptions(**values)


@cache
def _set_hooks() -> None:
    hooks = ((_MAKER, "compute_advantages_and_returns", keep_rollouts), (_ACTOR, "training_step", keep_tokens))
    for place, method, hook in hooks:
        require(TABLE, hook.__name__)
        owner = load(place)
        setattr(owner, method, partialmethod(hook, getattr(owner, method)))


def main(arguments: Sequence[str]) -> None:
    """Runs OpenRLHF's command with its own arguments among ``arguments``, and the selections that the others describe.

    Raises:
        ValueError: a bad option; an argument of OpenRLHF that does not fit, such as ``train.dynamic_batch_enable``.
        RuntimeError: OpenRLHF differs from what is assumed.
    """
    options, rest = D3SOptions.from_command(arguments)
    for hook in ("main", "keep_rollouts", "keep_tokens"):
        require(TABLE, hook)
    utils: Any = importlib.import_module("openrlhf.utils")
    get_strategy = utils.get_strategy

    def with_options(args: Any) -> Any:
        require_fit(args, options)
        args.d3s = options
        return get_strategy(args)

    utils.get_strategy = with_options
    sys.argv = [_COMMAND, *rest]
    runpy.run_module(_COMMAND, run_name="__main__", alter_sys=True)


def require_fit(args: Any, options: D3SOptions) -> None:
    """Raises a ValueError for arguments of OpenRLHF with which a selection cannot work; the message names one."""
    if options.rollouts != 1:
        estimator, size, steps = args.algo.advantage.estimator, args.rollout.micro_batch_size, args.train.batch_size
        if estimator not in _SCALES:
            takes = ", ".join(map(repr, _SCALES))
            raise ValueError(f"algo.advantage.estimator: got {estimator!r}; takes {takes}, or {PREFIX}rollouts 1")
        if args.train.dynamic_batch_enable:
            raise ValueError("train.dynamic_batch_enable: got True; takes False: its experiences are in another order")
        if size != 1:
            raise ValueError(f"rollout.micro_batch_size: got {size}; takes 1: experiences are kept or dropped whole")
        n = args.rollout.n_samples_per_prompt
        _, kept = rows_to_keep(args.rollout.batch_size, n, rollouts_of(options.rollouts, n), _ranks(args))
        if kept % steps:
            raise ValueError(f"train.batch_size: got {steps}, but {kept} rollouts are kept; takes a divisor of {kept}")
    if options.token_ratio != 1:
        if args.actor.entropy_coef is None:
            raise ValueError("actor.entropy_coef: got None; takes a number, such as 0, which gives the entropies")
        if options.token_rule == "random" and args.ds.ring_attn_size * args.ds.tensor_parallel_size > 1:
            raise ValueError(
                f"{PREFIX}token_rule: got 'random' with ds.ring_attn_size or ds.tensor_parallel_size above 1; takes "
                "another rule, because ranks that share a micro-batch would draw different tokens"
            )


def keep_rollouts(maker: Any, compute: Callable[..., list[Any]], experiences: list[Any]) -> list[Any]:
    """The experience maker's ``compute_advantages_and_returns``, which then drops the rollouts not chosen."""
    experiences, args = compute(maker, experiences), maker.args
    if args.d3s.rollouts == 1:
        return experiences
    n = args.rollout.n_samples_per_prompt
    rewards = torch.cat([experience.rewards for experience in experiences]).view(-1, n)
    kept = choose_rollouts(
        group_advantages(rewards, scale=_SCALES[args.algo.advantage.estimator]),
        rollouts_of(args.d3s.rollouts, n),
        args.d3s.rollout_scope,
        _ranks(args),  # each gets equally many; otherwise ranks would wait for each other forever
        rule=args.d3s.rollout_rule,
    )
    return [experience for experience, keep in zip(experiences, kept.tolist(), strict=True) if keep]


def keep_tokens(
    trainer: Any, step: Callable[..., dict[str, Any]], experience: Any, *given: Any, **named: Any
) -> dict[str, Any]:
    """The actor's ``training_step``, in which the gradient of the policy loss goes through the chosen tokens alone.

    The loss's value does not change; terms for KL and entropy keep all tokens. ``d3s/token_share`` is logged.
    """
    options, policy_loss, mask = trainer.args.d3s, trainer.actor_loss_fn, experience.action_mask.bool()
    if options.token_ratio == 1:
        return step(trainer, experience, *given, **named)
    entropy: list[Tensor] = []
    share: list[Tensor] = []

    def remember(_: Any, __: Any, result: tuple[Tensor, Any]) -> None:
        entropy.append(result[1].entropy[:, -mask.shape[1] :])  # those of the prompt come first

    def of_chosen(log_probs: Tensor, old: Tensor, advantages: Tensor, **rest: Any) -> Any:
        group = trainer.strategy.ds_device_mesh["dp"].get_group()
        kept = options.chosen_tokens(entropy[0], advantages, options.token_ratio, mask, data_parallel=group)
        share.append(kept.sum() / mask.sum().clamp(min=1))
        return policy_loss(torch.where(kept, log_probs, log_probs.detach()), old, advantages, **rest)

    handle = trainer.actor.register_forward_hook(remember)
    trainer.actor_loss_fn = of_chosen
    try:
        status = step(trainer, experience, *given, **named)
    finally:
        trainer.actor_loss_fn = policy_loss
        handle.remove()
    status["metrics"]["d3s/token_share"], status["weights"]["d3s/token_share"] = share[0], "token"
    return status


def _ranks(args: Any) -> int:
    """The ranks among which OpenRLHF divides experiences."""
    actors = args.actor.num_nodes * args.actor.num_gpus_per_node
    return int(actors // args.ds.ring_attn_size // args.ds.tensor_parallel_size)


if __name__ == "__main__":
    # Under its own name, by which the processes of Ray find what they unpickle.
    importlib.import_module("d3s_kernels.integrations.openrlhf").main(sys.argv[1:])
