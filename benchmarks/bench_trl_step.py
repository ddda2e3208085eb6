"""D3S in TRL's trainer: the cost of an update, compared with GRPO's update on the same batch."""

import pytest

from . import inputs, trl_peers
from .clock import Slow
from .computed import FEW, MORE, SOURCE, WITH_FEW
from .harness import Contest
from .recorded import LIMIT_6092
from .sizes import Sizes, rollouts
from .targets import (
    ALL_TOKENS,
    DEEP_MODEL,
    GRPO,
    GRPO_CUT,
    HALF,
    NOTHING,
    PREFIXES,
    RECORDED,
    SMALL_MODEL,
    SMALL_VOCABULARY,
    TRL_6092,
    in_micro_batches,
)
from .withdrawn import FULL_COMPLETIONS, UPDATE

LENGTHS = [RECORDED, FULL_COMPLETIONS]
SHAPE = "0.5B" if inputs.contests_of == "cuda" else SMALL_MODEL
MODEL = SMALL_MODEL if inputs.device.type == "cpu" else SHAPE  # a rehearsal has a GPU's contests, but the CPU's model


@pytest.fixture(autouse=True)
def trls_trainer() -> None:
    pytest.importorskip("datasets")  # a stand-in suffices for TRL's functions, but not for its trainer
    if trl_peers.imported("trl.trainer.grpo_trainer") is None:
        pytest.skip("TRL's trainer cannot be imported here")


@pytest.fixture
def size(sizes: Sizes) -> str:
    return rollouts(sizes, SMALL_VOCABULARY if MODEL == SMALL_MODEL else sizes.vocabulary)


@pytest.mark.parametrize(("number", "lengths"), [(2, RECORDED), (4, RECORDED), (8, RECORDED), (8, TRL_6092)])
def test_micro_batches(contest: Contest, sizes: Sizes, number: int, lengths: str) -> None:
    """An update as TRL's users run it. On a CPU, where it is slow, all contenders except ours are timed only once, for
    both contests.
    """
    from .trl_step import OURS_PADDED, OURS_ROLLOUTS, SHAPES, Step, shape_and_sizes

    model, sizes = shape_and_sizes(number, sizes)
    scale = f", lengths / {LIMIT_6092 // sizes.completion}" if lengths == TRL_6092 else ""
    theirs, cut, padded = (Slow(Step(name, sizes, model, lengths)) for name in (GRPO, GRPO_CUT, OURS_PADDED))
    for dropped, name in ((NOTHING, ALL_TOKENS), (HALF, OURS_ROLLOUTS)):
        contest(
            in_micro_batches(number, dropped, lengths, "0.5B" if inputs.contests_of == "cuda" else DEEP_MODEL),
            rollouts(sizes, SHAPES[model].vocabulary or sizes.vocabulary) + scale,
            Step(name, sizes, model, lengths),
            peers={GRPO: theirs},
            yardsticks={GRPO_CUT: cut, OURS_PADDED: padded},
        )


def test_prefixes(contest: Contest, sizes: Sizes) -> None:
    """NAT at half of the tokens, in eight micro-batches of equal work, compared with all tokens; on a GPU, where it is
    fast enough, also with `GRPOTrainer`.
    """
    from .trl_step import OURS_PREFIXES, SHAPES, Step, shape_and_sizes

    model, sizes = shape_and_sizes(8, sizes)
    peers = [GRPO] if inputs.contests_of == "cuda" else []
    contest(
        in_micro_batches(8, PREFIXES, RECORDED, "0.5B" if inputs.contests_of == "cuda" else DEEP_MODEL),
        rollouts(sizes, SHAPES[model].vocabulary or sizes.vocabulary),
        Step(OURS_PREFIXES, sizes, model, RECORDED),
        peers={name: Step(name, sizes, model, RECORDED) for name in peers},
        yardsticks={ALL_TOKENS: Step(ALL_TOKENS, sizes, model, RECORDED)},
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_update(contest: Contest, sizes: Sizes, size: str, lengths: str) -> None:
    from .trl_step import GRPO_OUR_HEAD, OURS, OURS_PASS, OURS_ROLLOUTS, Update

    def of(name: str) -> Update:
        return Update(name, sizes, MODEL, lengths)

    contest(
        f"{UPDATE}, {lengths}, {SHAPE}",
        size,
        of(OURS),
        peers={GRPO: of(GRPO)},
        yardsticks={name: of(name) for name in (GRPO_OUR_HEAD, OURS_ROLLOUTS, OURS_PASS)},
        with_range=True,
    )


@pytest.mark.skipif(inputs.contests_of == "cpu", reason="a CPU takes minutes for it")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_whole_model(contest: Contest, sizes: Sizes, size: str, lengths: str) -> None:
    """Times two models with few layers, in turns. From their times, the time of the whole model is computed."""
    from .trl_step import OURS, OURS_ROLLOUTS, Update

    def of(name: str, layers: int) -> Update:
        model = SMALL_MODEL if MODEL == SMALL_MODEL else f"7B, {layers} layers"
        return Update(name, sizes, model, lengths)

    contest(
        f"{UPDATE}, {lengths}, {SOURCE}",
        size,
        of(OURS, MORE),
        peers={GRPO: of(GRPO, MORE)},
        yardsticks={OURS_ROLLOUTS: of(OURS_ROLLOUTS, MORE)}
        | {f"{name}{WITH_FEW}": of(name, FEW) for name in (OURS, GRPO, OURS_ROLLOUTS)},
        with_range=True,
    )


def test_known_tokens(contest: Contest, sizes: Sizes, size: str) -> None:
    from .trl_step import KnownUpdate

    contest(
        f"TRL's update, 10% of the tokens chosen before it, {RECORDED}, {SHAPE}",
        size,
        KnownUpdate(sizes, MODEL, cut=True),
        yardsticks={"all tokens forwarded": KnownUpdate(sizes, MODEL, cut=False)},
        with_range=True,
    )


def test_useless_rollouts(contest: Contest, sizes: Sizes, size: str) -> None:
    from .trl_step import EntropyPass

    contest(
        f"entropy pass, of the rollouts with an advantage, {RECORDED}, {SHAPE}",
        size,
        EntropyPass(sizes, MODEL, every=False),
        yardsticks={"of all": EntropyPass(sizes, MODEL, every=True)},
        with_range=True,
    )
