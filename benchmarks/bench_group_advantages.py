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
        d3s.group_advantages,
        inputs=(rewards,),
        peers={
            "TRL": peers.trl_peers.utils() and peers.trl_advantages,
            "verl's loop": peers.looping(peers.verl_advantages),
        },
        agree=close(2e-3),  # verl's epsilon differs from ours
    )
