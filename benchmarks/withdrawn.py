"""Figures that were withdrawn, and why. The JSON of a result keeps them; no page shows them or counts their targets."""

from typing import Any, NamedTuple

H100 = "nvidia-h100-80gb-hbm3-2026-11-26"
H200 = "nvidia-h200-2026-11-27"
XEON = "intel-r-xeon-r-processor-2-cores-2026-11-27"
GPUS = (H100, H200)

UPDATE = "TRL's update, half of the rollouts and 10% of their tokens"  # also a present name (targets.py)
KNOWN = "TRL's update, 10% of the tokens known before, of what they need"
PASS = "entropy pass, half of the rollouts without advantage"
TWO_LAYERS = "7B, 2 of its layers"
MASKED, ADDED = "linear_logprob_entropy forward + backward, with a sampling mask", ", added to a gradient"
SETS = ("1", "64", "512", "4,096")


# All completions of this contest are full. Its name says so now, since there is also a contest with recorded lengths.
# Today the contest has recorded rewards and entropies. Earlier, its rollouts were one group with normally distributed
# advantages.
FULL_COMPLETIONS = "full completions"
FULL_UPDATE = f"{UPDATE}, {FULL_COMPLETIONS}, 0.5B"
RENAMED = {f"{UPDATE}, 0.5B": FULL_UPDATE}


class Withdrawn(NamedTuple):
    results: tuple[str, ...]  # the names of the results' files
    rows: tuple[tuple[str, str | None], ...]  # the contest, and its withdrawn contender; None: the whole contest
    why: str  # a sentence that names the rows


WITHDRAWN = (
    Withdrawn(
        GPUS,
        ((f"{UPDATE}, {TWO_LAYERS}", None), (f"{KNOWN}, {TWO_LAYERS}", None), (f"{PASS}, {TWO_LAYERS}", None)),
        "TRL's update and entropy pass with two layers of a 7B model: there the LM head makes 54 % of the products; "
        "with all 28 layers it makes 7.7 %.",
    ),
    Withdrawn(
        GPUS,
        ((f"{KNOWN}, 0.5B", None), (f"{UPDATE}, 0.5B", "d3s_kernels, entropy from a pass before")),
        "TRL's update with tokens chosen before it: random weights make all entropies alike (11.752 ± 0.0008), so all "
        "kept tokens lie in 2 of 16 rollouts, and the model skips the other 14.",
    ),
    Withdrawn(
        GPUS,
        (("linear_logprob_entropy forward + backward, 10% of the tokens, wide, bf16", "all tokens"),),
        "The wide LM head with 10 % of the tokens, beside all tokens: the calls with all tokens took 9 % longer than "
        "in another contest of this run, most likely at a lower clock.",
    ),
    Withdrawn(
        GPUS,
        (("logprob_entropy forward", "read"), ("logprob_entropy forward, in Triton", "read")),
        "`logprob_entropy`'s forward, in per cent of `read`'s bandwidth: `read` is torch's sum, which reaches only "
        "90 % of the specified bandwidth.",
    ),
    Withdrawn(
        (*GPUS, XEON),
        (("logprob_entropy forward, with a sampling mask", None),),
        "`logprob_entropy`'s forward with a sampling mask: it reads 2.5 MB (on the CPU 0.5 MB), which stay in the "
        "cache between calls.",
    ),
    Withdrawn(
        (XEON,),
        tuple(
            (f"{MASKED}{more}", "all tokens")
            for more in ("", ADDED, *(f"{ADDED}, mean of {n} kept tokens" for n in SETS))
        ),
        "The LM head's forward and backward with a sampling mask, beside no mask, on the CPU: only one call without a "
        "mask was timed. It took 3.6 s; in other contests of this run, the fastest took 2.2 s.",
    ),
    Withdrawn(
        (XEON,),
        ((UPDATE, None), (KNOWN, None), (PASS, None), ("TRL's update, peak memory beyond its model", None)),
        "TRL's update, its memory and its entropy pass on the CPU: that model has two layers of width 256, so the LM "
        "head makes 95 % of its products.",
    ),
)


def reasons(result: str) -> list[str]:
    return [withdrawn.why for withdrawn in WITHDRAWN if result in withdrawn.results]


def what_stands(run: dict[str, Any], result: str) -> dict[str, Any]:
    """The run without the rows that were withdrawn from the result with this name. Contests get their current names."""
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
