"""D3S in TRL's trainer: the cost of an update, against GRPO's update on the same batch."""

import pytest

from . import inputs, trl_peers
from .harness import Contest
from .sizes import Sizes, rollouts
from .targets import STEP_CONTEST

SHAPES = ["0.5B", "7B, 2 of its layers"] if inputs.contests_of == "cuda" else ["small"]


@pytest.fixture(autouse=True)
def trls_trainer() -> None:
    pytest.importorskip("datasets")  # a stand-in suffices for TRL's functions, but not for its trainer
    if trl_peers.imported("trl.trainer.grpo_trainer") is None:
        pytest.skip("TRL's trainer cannot be imported here")


@pytest.fixture
def model(shape: str) -> str:
    """The shape of the model. A rehearsal runs a GPU's contests, but with the CPU's model."""
    return "small" if inputs.device.type == "cpu" else shape


def of(what: str, shape: str) -> str:
    return what if shape == "small" else f"{what}, {shape}"


@pytest.mark.parametrize("shape", SHAPES)
def test_update(contest: Contest, sizes: Sizes, shape: str, model: str) -> None:
    from .trl_step import GRPO, GRPO_OUR_HEAD, OURS, OURS_PASS, update

    contest(
        of(STEP_CONTEST, shape),
        rollouts(sizes),
        update(OURS, sizes, model),
        peers={GRPO: update(GRPO, sizes, model)},
        yardsticks={name: update(name, sizes, model) for name in (GRPO_OUR_HEAD, OURS_PASS)},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_known_tokens(contest: Contest, sizes: Sizes, shape: str, model: str) -> None:
    from .trl_step import known_update

    contest(
        of("TRL's update, 10% of the tokens known before, of what they need", shape),
        rollouts(sizes),
        known_update(sizes, model, cut=True),
        yardsticks={"all tokens forwarded": known_update(sizes, model, cut=False)},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_useless_rollouts(contest: Contest, sizes: Sizes, shape: str, model: str) -> None:
    from .trl_step import entropy_pass

    contest(
        of("entropy pass, half of the rollouts without advantage", shape),
        rollouts(sizes),
        entropy_pass(sizes, model, useful=0.5),
        yardsticks={"all with one": entropy_pass(sizes, model, useful=1)},
    )
