"""Figures that were withdrawn, and why. The JSON of a result keeps them; no page shows them or counts their targets."""

from typing import Any, NamedTuple

H100 = "nvidia-h100-80gb-hbm3-2026-11-26"
H200 = "nvidia-h200-2026-11-27"
XEON = "intel-r-xeon-r-processor-2-cores-2026-11-27"
GPUS = (H100, H200)

UPDATE = "TRL's update, half of the rollouts and 10% of their tokens"
KNOWN = "TRL's update, 10% of the tokens known before, of what they need"
PASS = "entropy pass, half of the rollouts without advantage"
TWO_LAYERS = "7B, 2 of its layers"


# All completions of this contest are full. Since there is one with recorded lengths, its name says so.
FULL_UPDATE = f"{UPDATE}, full completions, 0.5B"
RENAMED = {f"{UPDATE}, 0.5B": FULL_UPDATE}


class Withdrawn(NamedTuple):
    results: tuple[str, ...]  # the names of their files
    rows: tuple[tuple[str, str | None], ...]  # the contest, and the contender that leaves it; None: the whole contest
    why: str  # a sentence that names the rows


WITHDRAWN = (
    Withdrawn(
        GPUS,
        ((f"{UPDATE}, {TWO_LAYERS}", None), (f"{KNOWN}, {TWO_LAYERS}", None), (f"{PASS}, {TWO_LAYERS}", None)),
        "TRL's update and entropy pass with two layers of a 7B model: the LM head makes 54 % of their products, and "
        "7.7 % with all 28 layers.",
    ),
    Withdrawn(
        GPUS,
        ((f"{KNOWN}, 0.5B", None), (f"{UPDATE}, 0.5B", "d3s_kernels, entropy from a pass before")),
        "TRL's update with tokens chosen before it: with random weights all entropies are alike (11.752 ± 0.0008), so "
        "all kept tokens lie in 2 of 16 rollouts, and the model skips the others.",
    ),
    Withdrawn(
        GPUS,
        (("linear_logprob_entropy forward + backward, 10% of the tokens, wide, bf16", "all tokens"),),
        "The wide LM head with 10 % of the tokens beside all tokens: these took 9 % longer than in another contest of "
        "the same run, most likely at a lower clock.",
    ),
    Withdrawn(
        GPUS,
        (("logprob_entropy forward", "read"), ("logprob_entropy forward, in Triton", "read")),
        "The forward's percentage of the bandwidth of `read`: that is torch's sum, which itself reaches only 90 % of "
        "the specified bandwidth.",
    ),
    Withdrawn(
        (*GPUS, XEON),
        (("logprob_entropy forward, with a sampling mask", None),),
        "The forward over logits with a sampling mask: the 2.5 MB that it reads (on the CPU 0.5 MB) stay in the cache "
        "from one call of a round to the next.",
    ),
    Withdrawn(
        (XEON,),
        ((UPDATE, None), (KNOWN, None), (PASS, None), ("TRL's update, peak memory beyond its model", None)),
        "TRL's update on the CPU, its memory and its entropy pass: the LM head makes 95 % of the products of that "
        "model, which has two layers of width 256.",
    ),
)


def reasons(result: str) -> list[str]:
    return [withdrawn.why for withdrawn in WITHDRAWN if result in withdrawn.results]


def what_stands(run: dict[str, Any], result: str) -> dict[str, Any]:
    """The run without the rows that were withdrawn from the result of this name; contests have their names of today."""
    rows = {row for withdrawn in WITHDRAWN if result in withdrawn.results for row in withdrawn.rows}

    def stands(contest: str, contender: str) -> bool:
        return not rows & {(contest, None), (contest, contender)}

    kept = {
        contest: {name: timing for name, timing in rivals.items() if stands(contest, name)}
        for contest, rivals in run["contests"].items()
    }
    return run | {
        "targets": [
            row | {"what": RENAMED.get(row["what"], row["what"])}
            for row in run["targets"]
            if stands(row["what"], row["against"].partition(":")[0])
        ],
        "contests": {RENAMED.get(contest, contest): rivals for contest, rivals in kept.items() if rivals},
    }
