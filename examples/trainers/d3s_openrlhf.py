"""OpenRLHF: the update gets only the rollouts that D3S keeps.

OpenRLHF starts from its script ``openrlhf/cli/train_ppo_ray.py``. Copy it, copy this file beside it, and change three
places of the script::

    from d3s_openrlhf import D3SActorGroup, parse_args  # one more import

    actor_model = D3SActorGroup(args, ...)  # in train(), for RayActorGroup(...) with PolicyModelActor

    args = parse_args(parser)  # for parser.parse_args()

Then start the copy, with ``--d3s.rollouts_start 0.5 --d3s.rollouts_end 0.5`` among OpenRLHF's arguments. The signatures
were read in OpenRLHF 0.11.2 and at 3c3be62, 2026-08-13.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import torch
from openrlhf.trainer.ray.launcher import RayActorGroup

import d3s_kernels as d3s

PREFIX = "--d3s."
TAKEN = ("rollouts_start", "rollouts_end", "rollout_rule", "rollout_scope")
# Estimators whose advantages are rewards minus the mean of their group, and what each estimator divides by.
SCALES = {"group_norm": "group", "dr_grpo": "none", "rloo": "none", "reinforce_baseline": "none"}


def parse_args(parser: ArgumentParser) -> Namespace:
    """OpenRLHF's command-line arguments. The arguments that begin with ``--d3s.`` are in a section "d3s".

    Raises:
        ValueError: an unknown option of D3S, or a bad value; the message names it.
    """
    words = sys.argv[1:]
    selection, rest = d3s.Selection.from_words(words)
    args = parser.parse_args(rest)
    for word in words:
        if word.startswith(PREFIX):
            name = word.removeprefix(PREFIX).partition("=")[0]
            setattr(args, f"d3s.{name}", getattr(selection.options, name))
    return args


def selection_of(args: Any) -> d3s.Selection:
    """The selection that OpenRLHF's arguments ask for.

    Args:
        args: as OpenRLHF's script has them after its own checks, with or without a section ``args.d3s``.

    Raises:
        ValueError: a bad option, or one that OpenRLHF cannot follow; an argument of OpenRLHF with which the choice
            would be wrong, such as ``train.dynamic_batch_enable``. The message names it.
    """
    given = vars(getattr(args, "d3s", Namespace()))
    for name, value in given.items():
        if name not in TAKEN:
            takes = ", ".join(PREFIX + each for each in TAKEN)
            raise ValueError(f"{PREFIX}{name}: got {value!r}, but only rollouts are chosen in OpenRLHF; takes {takes}")
    selection = d3s.Selection.from_mapping(given, PREFIX)
    start, end = selection.options.rollouts_start, selection.options.rollouts_end
    if start != end:
        raise ValueError(
            f"{PREFIX}rollouts_end: got {end} with {PREFIX}rollouts_start {start}; takes {start}, because "
            "train.batch_size stays the same"
        )
    if args.algo.advantage.estimator not in SCALES:
        takes = " or ".join(map(repr, SCALES))
        raise ValueError(f"algo.advantage.estimator: got {args.algo.advantage.estimator!r}; takes {takes}")
    if args.train.dynamic_batch_enable:
        raise ValueError("train.dynamic_batch_enable: got True; takes False: its experiences are in another order")
    if (size := args.rollout.micro_batch_size) != 1:
        raise ValueError(f"rollout.micro_batch_size: got {size}; takes 1: experiences are kept or dropped whole")
    groups, n = args.rollout.batch_size, args.rollout.n_samples_per_prompt
    _, kept = selection.number_of_rollouts(0.0, groups, n, multiple_of=ranks_of(args))
    if kept % args.train.batch_size:
        raise ValueError(
            f"train.batch_size: got {args.train.batch_size}, but {kept} rollouts are kept; takes a divisor of {kept}"
        )
    return selection


def ranks_of(args: Any) -> int:
    """The number of ranks among which OpenRLHF divides experiences."""
    actors = args.actor.num_nodes * args.actor.num_gpus_per_node
    return int(actors // args.ds.ring_attn_size // args.ds.tensor_parallel_size)


class D3SActorGroup(RayActorGroup):
    """The actors of the policy, to which only the kept rollouts are handed for the update.

    Args:
        args: OpenRLHF's arguments.
        given, named: the arguments of RayActorGroup.

    Raises:
        ValueError: as :func:`selection_of`, before an actor starts.
    """

    def __init__(self, args: Any, *given: Any, **named: Any) -> None:
        self.args, self.selection = args, selection_of(args)
        super().__init__(*given, **named)

    def async_run_method_batch(self, method_name: str, **values: Any) -> list[Any]:
        """As RayActorGroup's. Trainers hand experiences over with ``append``, once these have their advantages."""
        if method_name == "append":
            values["experience"] = self.kept(values["experience"])
        return super().async_run_method_batch(method_name, **values)

    def kept(self, experiences: list[Any]) -> list[Any]:
        """The experiences of the kept rollouts, in their order; each has one rollout, and groups follow each other.

        Every rank gets equally many: with a different number of micro-batches, ranks would wait for each other forever.
        """
        rewards = torch.cat([experience.rewards for experience in experiences]).float()
        rewards = rewards.view(-1, self.args.rollout.n_samples_per_prompt)
        advantages = d3s.group_advantages(rewards, scale=SCALES[self.args.algo.advantage.estimator])
        kept = self.selection.rollouts(advantages, 0.0, multiple_of=ranks_of(self.args)).flatten().tolist()
        return [experience for experience, keep in zip(experiences, kept, strict=True) if keep]
