"""The time of a whole model, computed from the times of two models that have few of its layers.

A model of 7B with 28 layers takes longer to time than a lent GPU allows, and its LM head is 7.7 % of its products; with
two layers it is 54 %. So pages show neither of the two measured models, but what they say of the whole one: time grows
by the same amount with each layer.
"""

from dataclasses import replace
from statistics import median

from .page import duration
from .targets import COMPUTED_FROM, LAYERS, SEVEN_BILLION
from .timing import Contenders

FEW, MORE = (f"{SEVEN_BILLION}, {layers} of {LAYERS} layers" for layers in COMPUTED_FROM)
UNKNOWN = ("peak_bytes", "megahertz", "watts")  # of a model that was not run
WHOLE = f"{SEVEN_BILLION}, {LAYERS} layers, computed"


def is_source(contest: str) -> bool:
    """Whether a contest is measured only to compute another one from it."""
    return contest.endswith((FEW, MORE))


def with_computed(contests: dict[str, Contenders]) -> dict[str, Contenders]:
    """The contests without the sources, and with what is computed from them."""
    found = {contest: rivals for contest, rivals in contests.items() if not is_source(contest)}
    for contest, few in contests.items():
        more = contests.get(contest.replace(FEW, MORE), {})
        if contest.endswith(FEW) and more:
            found[contest.replace(FEW, WHOLE)] = whole(few, more)
    return found


def whole(few: Contenders, more: Contenders) -> Contenders:
    """Both contests in the order of their rounds, so that a ratio of each round is one of two near moments."""
    fewer, further = COMPUTED_FROM
    steps = (LAYERS - fewer) / (further - fewer)
    found = {}
    for name in few.keys() & more.keys():
        pairs = list(zip(few[name].seconds, more[name].seconds, strict=False))
        seconds = [low + steps * (high - low) for low, high in pairs]
        layer = median(high - low for low, high in pairs) / (further - fewer)
        did = f"computed from {fewer} and {further} layers, {duration(layer)} a layer; {few[name].did}"
        found[name] = replace(few[name], seconds=seconds, timed_by="computed", did=did, **dict.fromkeys(UNKNOWN))
    return {name: found[name] for name in few if name in found}
