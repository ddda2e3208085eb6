"""group_advantages: rewards normalised within their groups."""

import d3s_kernels as d3s

from . import inputs, peers
from .harness import Contest, close, describe
from .sizes import Sizes


def test_group_advantages(contest: Contest, sizes: Sizes) -> None:
    rewards = inputs.advantages(*sizes.groups)
    contest(
        "group_advantages",
        describe(*sizes.groups),
        lambda: d3s.group_advantages(rewards),
        peers={
            "TRL": lambda: peers.trl_advantages(rewards),
            "verl's loop": lambda: peers.verl_advantages(rewards),
        },
        agree=close(2e-3),  # verl's epsilon is another
    )
