"""D3S in TRL's trainer: what an update costs, beside GRPO's on the same batch."""

import pytest

from . import inputs, trl_peers
from .harness import Contest
from .sizes import Sizes, rollouts
from .targets import STEP_CONTEST

SHAPES = ["0.5B", "7B, 2 of its layers"] if inputs.device.type == "cuda" else ["small"]


@pytest.mark.parametrize("shape", SHAPES)
def test_update(contest: Contest, sizes: Sizes, shape: str) -> None:
    if trl_peers.imported("trl.trainer.grpo_trainer") is None:
        pytest.skip("TRL's trainer cannot be imported here")
    from .trl_step import GRPO, GRPO_OUR_HEAD, OURS, OURS_PASS, update

    contest(
        STEP_CONTEST if shape == "small" else f"{STEP_CONTEST}, {shape}",
        rollouts(sizes),
        update(OURS, sizes, shape),
        yardsticks={name: update(name, sizes, shape) for name in (GRPO, GRPO_OUR_HEAD, OURS_PASS)},
    )
