"""D3S in TRL's trainer: the cost of an update, against GRPO's update on the same batch."""

import pytest

from . import inputs, trl_peers
from .harness import Contest
from .sizes import Sizes, rollouts
from .targets import COMPUTED_FROM, FULL_COMPLETIONS, LAYERS, RECORDED, SEVEN_BILLION, SMALL_MODEL, STEP_CONTEST

SHAPES = ["0.5B", *(f"{SEVEN_BILLION}, {few} of {LAYERS} layers" for few in COMPUTED_FROM)]
BY_DEVICE = SHAPES if inputs.contests_of == "cuda" else [SMALL_MODEL]


@pytest.fixture(autouse=True)
def trls_trainer() -> None:
    pytest.importorskip("datasets")  # a stand-in suffices for TRL's functions, but not for its trainer
    if trl_peers.imported("trl.trainer.grpo_trainer") is None:
        pytest.skip("TRL's trainer cannot be imported here")


@pytest.fixture
def model(shape: str) -> str:
    """The shape of the model. A rehearsal runs a GPU's contests, but with the CPU's model."""
    return SMALL_MODEL if inputs.device.type == "cpu" else shape


@pytest.mark.parametrize("shape", BY_DEVICE)
@pytest.mark.parametrize("lengths", [RECORDED, FULL_COMPLETIONS])
def test_update(contest: Contest, sizes: Sizes, lengths: str, shape: str, model: str) -> None:
    from .trl_step import GRPO, GRPO_OUR_HEAD, OURS, OURS_PASS, OURS_ROLLOUTS, Update

    def of(name: str) -> Update:
        return Update(name, sizes, model, full=lengths == FULL_COMPLETIONS)

    contest(
        f"{STEP_CONTEST}, {lengths}, {shape}",
        rollouts(sizes),
        of(OURS),
        peers={GRPO: of(GRPO)},
        yardsticks={name: of(name) for name in (GRPO_OUR_HEAD, OURS_ROLLOUTS, OURS_PASS)},
        with_range=True,
    )


@pytest.mark.parametrize("shape", BY_DEVICE[:1])
def test_known_tokens(contest: Contest, sizes: Sizes, shape: str, model: str) -> None:
    from .trl_step import KnownUpdate

    contest(
        f"TRL's update, 10% of the tokens chosen before it, {RECORDED}, {shape}",
        rollouts(sizes),
        KnownUpdate(sizes, model, cut=True),
        yardsticks={"all tokens forwarded": KnownUpdate(sizes, model, cut=False)},
    )


@pytest.mark.parametrize("shape", BY_DEVICE[:1])
def test_useless_rollouts(contest: Contest, sizes: Sizes, shape: str, model: str) -> None:
    from .trl_step import EntropyPass

    contest(
        f"entropy pass, of the rollouts with an advantage, {RECORDED}, {shape}",
        rollouts(sizes),
        EntropyPass(sizes, model, every=False),
        yardsticks={"of all": EntropyPass(sizes, model, every=True)},
    )
