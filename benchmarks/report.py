"""Reports one run in three forms: as a table in the terminal, in a few characters, and as plain data, from which
page.py makes a page.
"""

import re
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from .clock import FEW_CALLS, NOT_RECORDED
from .harness import OURS
from .judging import REPORTED, Faster, Ratio, Rule, ShareOf, Target, Verdict, Within, interval, verdict
from .page import SPECIFIED, duration, elements
from .timing import SAME_CLOCK, Contenders, Log, Timing, at_another_clock

PEAK_STEP = 256 * 1024  # Linux counts a process's pages in batches; smaller peaks are not visible


@dataclass(frozen=True)
class Line:
    """A target and its outcome. A target without a bound is only reported; a target whose peer is missing is not
    measured.
    """

    what: str
    size: str
    ours: str
    against: str
    value: str
    bound: str
    verdict: Verdict | None
    did: str = ""  # what the two contenders did in their times, if they report it

    @property
    def outcome(self) -> str:
        return self.verdict.outcome if self.verdict else "not measured"


def lines(
    contests: dict[str, Contenders],
    targets: tuple[Target, ...],
    rule: Rule,
    *,
    short: bool = False,
    whole: bool = False,
    gpu: str = "",
) -> list[Line]:
    """The targets in their order, then all other contests. A short run judges nothing: its inputs are too small.

    For a whole run, targets whose contest was not run are listed too.
    """
    named = {target.contest for target in targets}
    others = [target for contest in contests if contest not in named for target in reported(contest, contests[contest])]
    held = [target for target in (*targets, *others) if whole or target.contest in contests]
    judged = [
        judge(target, contests[target.contest], rule, gpu) if target.contest in contests else absent(target)
        for target in held
    ]
    return [unbound(line) for line in judged] if short else judged


def absent(target: Target) -> Line:
    return Line(target.contest, "", "", "no time was taken in this run", "", target.bound, None)


def reported(contest: str, contenders: Contenders) -> list[Target]:
    if OURS not in contenders:
        return []
    peers = tuple(name for name, timing in contenders.items() if timing.role == "peer")
    yardsticks = [name for name, timing in contenders.items() if timing.role == "yardstick"]
    return [Faster(contest, peers)] * bool(peers) + [Within(contest, name) for name in yardsticks]


def judge(target: Target, contenders: Contenders, rule: Rule, gpu: str = "") -> Line:
    judged = target.judge(contenders, rule)
    share = share_of_specified(target, contenders[OURS], rule, gpu)
    return Line(
        what=target.contest,
        size=contenders[OURS].size,
        ours=times(contenders[OURS], rule),
        against=against(target, judged, contenders, rule),
        value=f"{judged.value:.3g}{target.unit}{beside(judged, rule)}{share}" if judged else "",
        bound=target.bound,
        verdict=judged,
        did=what_they_did(contenders[OURS], contenders.get(judged.against) if judged else None),
    )


def what_they_did(ours: Timing, other: Timing | None) -> str:
    found = {"ours": ours.did, "the other": other.did if other else ""}
    return "; ".join(f"{who}: {did}" for who, did in found.items() if did)


def against(target: Target, verdict: Verdict | None, contenders: Contenders, rule: Rule) -> str:
    if verdict is None:
        return f"{' or '.join(target.than if isinstance(target, Faster | ShareOf) else [target.of])}: missing here"
    return f"{verdict.against}: {times(contenders[verdict.against], rule)}" if verdict.against else ""


def share_of_specified(target: Target, ours: Timing, rule: Rule, gpu: str) -> str:
    """Our share of the GPU's specified bandwidth, as text. In a line, the text follows our share of the bandwidth that
    a contender reaches on the same GPU. The share of a contender's bandwidth may exceed 100 %, but the share of the
    specified bandwidth cannot.
    """
    rate = SPECIFIED.get(gpu)
    if rate is None or not isinstance(target, ShareOf):
        return ""
    moved = target.moves * elements(ours.size) * getattr(torch, ours.size.split()[-1]).itemsize
    return f"; {100 * moved / rule.of(ours) / rate:.3g}% of the specified bandwidth"


OTHER = {"fastest": "median", "median": "fastest"}


def times(timing: Timing, rule: Rule) -> str:
    """The time that is judged, followed by the other time if the two differ: `16.1 ms (median 16.5)`."""
    shown, other = duration(rule.of(timing)), duration(getattr(timing, OTHER[rule.time]))
    if other == shown:
        return shown
    return f"{shown} ({OTHER[rule.time]} {other.removesuffix(shown[shown.index(' ') :])})"


def beside(judged: Verdict, rule: Rule) -> str:
    """The text after a ratio: its range and, if the fastest rounds decide, also the median of the rounds' ratios."""
    found = [f"{judged.interval[0]:.3g} to {judged.interval[1]:.3g}"] if judged.interval else []
    found += [f"median {judged.median:.3g}"] if rule.time == "fastest" else []
    return f" ({'; '.join(found)})" if found else ""


def unbound(line: Line) -> Line:
    return replace(line, bound="", verdict=line.verdict and replace(line.verdict, outcome=REPORTED))


def memory_line(
    what: str,
    size: str,
    peaks: dict[str, int],
    *,
    short: bool,
    allowed: int | None = None,
    share: float | None = None,
) -> list[Line]:
    """Compares our memory with the memory of the peer that needs the least. The bound is `allowed` bytes, or a `share`
    of this peer's memory.
    """
    if not peaks.keys() - {OURS}:
        return []
    rival = min(peaks.keys() - {OURS}, key=peaks.__getitem__)
    mine, value = max(peaks[OURS], PEAK_STEP), peaks[OURS] / max(peaks[rival], 1)
    bound, most = "", None
    if allowed is not None:
        bound, most = f"<= {mebibytes(allowed)}", allowed
    if share is not None:
        bound, most = f"<= {share:g}x the memory", share * peaks[rival]
    # Memory is measured only once: unlike its time, the memory of a call does not vary.
    found = Ratio(value, (value, value), value)
    held = verdict(found, "one measurement", rival, None if most is None else lambda _: mine <= most)
    line = Line(
        what=what,
        size=size,
        ours=mebibytes(peaks[OURS]),
        against=f"{rival}: {mebibytes(peaks[rival])}",
        value=mebibytes(peaks[OURS]) if share is None else f"{value:.3g}x the memory",
        bound=bound,
        verdict=held,
    )
    return [unbound(line) if short else line]


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= PEAK_STEP else f"< {PEAK_STEP / 2**20:g} MiB"


def gigabytes_per_second(contests: dict[str, Contenders], rule: Rule, gpu: str = "") -> dict[str, float]:
    """The bandwidths of reading and of copying memory, and the specified bandwidth. In a copy, both the bytes that are
    read and the bytes that are written count. A sum does not always read as fast as the memory allows, so reading is at
    least as fast as copying.
    """
    found = contests.get("memory bandwidth", {})
    moved = {"read": 1, "copy": 2}
    rates = {name: moved[name] * byte_count(timing) / rule.of(timing) / 1e9 for name, timing in found.items()}
    rates |= {"read": max(rates.values())} if "read" in rates else {}
    rate = SPECIFIED.get(gpu)
    return rates | ({"specified": rate / 1e9} if rates and rate else {})


def teraflops(contests: dict[str, Contenders], rule: Rule) -> dict[str, float]:
    """The rates of bare matrix products, in 1e12 operations per second."""
    found = {name.removeprefix("bare "): next(iter(of.values())) for name, of in contests.items() if "bare " in name}
    return {name: 2 * elements(timing.size) / rule.of(timing) / 1e12 for name, timing in found.items()}


def byte_count(timing: Timing) -> int:
    return int(timing.size.removesuffix(" bytes").replace(",", ""))


SHORTER = {
    "linear_logprob_entropy": "head",
    "logprob_entropy": "logprob",
    "forward + backward": "both ways",
    "max_variance_select": "max_variance",
    "importance_ratio": "ratio",
    "with a sampling mask": "sampling mask",
}
MOST_CHARACTERS = 11_000
WORST_FIRST = ("missed", "undecided", "met", REPORTED)


def compact(caption: str, judged: list[Line], log: Log) -> str:
    """A run in few characters: failures, outcomes (missed targets first), contests not reached."""
    lines = [f"FAILED {test}: {why}"[:200] for test, why in log.failed.items()]
    waits = [name for name, of in log.contests.items() if OURS in of and of[OURS].timed_by == NOT_RECORDED]
    lines += [shorter(f"WAITS, or cannot be recorded: {name}") for name in waits]
    lines += other_clocks(log.contests)
    judged = sorted(judged, key=lambda line: [*log.contests, line.what].index(line.what))  # in the order of measurement
    reasons = dict.fromkeys(f"missing: {name}: {why}"[:160] for of in log.missing.values() for name, why in of.items())
    reasons |= dict.fromkeys(
        shorter(f"missing: {line.what}: {line.against}") for line in judged if line.ours and not line.verdict
    )
    not_reached = dict.fromkeys(shorter(line.what) for line in judged if not line.ours)
    for outcome in WORST_FIRST:
        if outcome == REPORTED:  # lines from here on are left out first
            lines += reasons
            lines += [f"not measured: {'; '.join(not_reached)}"[:1000]] if not_reached else []
        rows = [replace(line, size="") for line in judged if line.outcome == outcome]
        if outcome == REPORTED:
            rows = [replace(line, value=line.value.partition(" (")[0]) for line in rows]
        lines += [shorter(" | ".join((outcome, *filter(None, cells(line)[:-1])))) for line in rows]
    text = shorter(caption)[:600]
    for line in lines:
        if len(text) + len(line) > MOST_CHARACTERS:
            return f"{text}\n... and more: the page has all"
        text += f"\n{line}"
    return text


def other_clocks(contests: dict[str, Contenders]) -> list[str]:
    """The contenders whose clock differed from ours in rounds that count."""
    rivals = [
        (contest, name, of[OURS], timing)
        for contest, of in contests.items()
        if OURS in of
        for name, timing in of.items()
    ]
    counts = [(f"{contest}: {name}", at_another_clock(timing, ours)) for contest, name, ours, timing in rivals]
    told = [shorter(f"{what} ({sum(apart)} of {len(apart)})") for what, apart in counts if any(apart)]
    return [f"CLOCKS more than {SAME_CLOCK:.0%} from ours, in rounds: {'; '.join(told)}"[:1000]] if told else []


def shorter(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return re.sub(r" \(fastest [^)]*\)", "", text)


COLUMNS = ("what", "size", "ours", "against", "ratio", "target", "")


def cells(line: Line) -> tuple[str, ...]:
    value = "; ".join(filter(None, (line.value, line.did)))
    return line.what, line.size, line.ours, line.against, value, line.bound, line.outcome


def table(title: str, caption: str, judged: list[Line]) -> Table:
    colour = {"met": "green", "missed": "bold red", "undecided": "yellow", REPORTED: "dim", "not measured": "yellow"}
    result = Table(title=title, caption=caption, header_style="bold", row_styles=["", "on grey7"])
    for column in COLUMNS:
        is_number = column in ("ours", "ratio", "target")
        result.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=column in ("target", ""),
            min_width=30 if column == "what" else None,
        )
    for line in judged:
        *plain, outcome = cells(line)
        result.add_row(*plain, Text(outcome, style=colour[outcome]))
    return result


def data(judged: list[Line], contests: dict[str, Contenders], rule: Rule, gpu: str = "") -> dict[str, Any]:
    return {
        "judged_by": rule.name,
        "gigabytes_per_second": gigabytes_per_second(contests, rule, gpu),
        "teraflops": teraflops(contests, rule),
        "targets": [asdict(line) | {"outcome": line.outcome} for line in judged],
        "contests": {
            contest: {
                name: of_contender(timing)
                | {"times_ours": times_ours(name, rivals, rule)}
                | of_clock(timing, rivals.get(OURS, timing))
                for name, timing in rivals.items()
            }
            for contest, rivals in contests.items()
        },
    }


def of_contender(timing: Timing) -> dict[str, Any]:
    return {
        "role": timing.role,
        "size": timing.size,
        "fastest_seconds": timing.fastest,
        "median_seconds": timing.median,
        "median_interval": None if timing.timed_by == FEW_CALLS else interval(timing.seconds),
        "rounds": len(timing.seconds),
        "calls_per_round": timing.calls_per_round,
        "timed_by": timing.timed_by,
        "peak_extra_bytes": timing.peak_bytes,
        "did": timing.did,
    }


def of_clock(timing: Timing, ours: Timing) -> dict[str, Any]:
    """Clock and power of a contender; empty if the clock is not known."""
    if timing.megahertz is None:
        return {}
    return {
        "median_megahertz": median(timing.megahertz),
        "megahertz_range": [min(timing.megahertz), max(timing.megahertz)],
        "median_watts": timing.watts and median(timing.watts),
        "rounds_at_another_clock": sum(at_another_clock(timing, ours)),
        "rounds_taken_again": timing.rounds_taken_again,
    }


def times_ours(name: str, rivals: Contenders, rule: Rule) -> dict[str, Any] | None:
    """How many times as fast as the contender ours is; None if the contest has no time of ours."""
    return rule.of_contenders(rivals, name, OURS)._asdict() if OURS in rivals else None
