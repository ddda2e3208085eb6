"""The time of a whole model, computed from the times of two models that have few of its layers.

Qwen2.5-7B has 28 layers, and its LM head is 7.7 % of its products. With two layers the head is 54 %. So pages do not
show the times of the two models, but the time of the whole model. This time is computed from the times of the two
models, since each further layer adds the same time.
"""

from dataclasses import replace
from statistics import median

from .page import duration
from .targets import COMPUTED_FROM, LAYERS_OF_7B
from .timing import Contenders, Timing

FEW, MORE = COMPUTED_FROM
SOURCE = f"7B, {MORE} and {FEW} layers"  # ends the names of contests in which both models run, in turns
WHOLE = f"7B, {LAYERS_OF_7B} layers, computed"
WITH_FEW = f", {FEW} layers"  # ends the names of the contenders with few layers


def is_source(contest: str) -> bool:
    """Whether a contest only serves to compute another contest from its times."""
    return contest.endswith(SOURCE)


def with_computed(contests: dict[str, Contenders]) -> dict[str, Contenders]:
    """The contests; computed contests replace their sources."""
    return {
        contest.replace(SOURCE, WHOLE): whole(rivals) if is_source(contest) else rivals
        for contest, rivals in contests.items()
    }


def whole(rivals: Contenders) -> Contenders:
    """The contenders that ran with both models, with the time of the whole model in each round."""
    return {
        name: of_all_layers(rivals[f"{name}{WITH_FEW}"], timing)
        for name, timing in rivals.items()
        if f"{name}{WITH_FEW}" in rivals
    }


def of_all_layers(few: Timing, more: Timing) -> Timing:
    pairs = list(zip(few.seconds, more.seconds, strict=True))
    layer = [(high - low) / (MORE - FEW) for low, high in pairs]
    seconds = [low + (LAYERS_OF_7B - FEW) * each for (low, _), each in zip(pairs, layer, strict=True)]
    did = f"computed from {FEW} and {MORE} layers, {duration(median(layer))} a layer; {more.did}"
    return replace(more, seconds=seconds, timed_by="computed", did=did, peak_bytes=None, megahertz=None, watts=None)
