"""Makes the HTML of a page of selected tokens from plain Python values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .text import NO_TEXT, as_html, token_as_html

LEVELS = 10  # the number of shades of a token, from no shade to the darkest
_STYLE = Path(__file__).with_name("style.css")
# With this policy, a browser runs no script of the page and loads nothing, even if some text were not escaped.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Rollout(NamedTuple):
    """The values of one rollout. A dropped rollout has no scores, entropies or kept tokens."""

    texts: list[str]  # a text for each token
    counts: list[bool]  # whether each token could be kept; the other tokens are shown without a score
    reward: float | None
    advantage: float | None
    kept: bool
    scores: list[float]
    entropies: list[float]  # NaN for an entropy that was not computed
    kept_tokens: list[bool]


def page(title: str, formula: str, prompts: Sequence[str], rollouts: Sequence[Rollout], longest: int) -> str:
    """Returns the whole page. A rollout with more than ``longest`` tokens is shown without its middle.

    Args:
        formula: the formula of the scores, or "" if it is unknown.
        rollouts: the rollouts of all prompts, in the order of the prompts; every prompt has the same number of
            rollouts.
    """
    top = darkest_from(
        score
        for rollout in rollouts
        for score, counts in zip(rollout.scores, rollout.counts, strict=False)  # a dropped rollout has no scores
        if counts
    )
    size = len(rollouts) // len(prompts)
    sections = []
    for number, prompt in enumerate(prompts):
        group = enumerate(rollouts[number * size : (number + 1) * size], start=1)
        shown = "\n".join(_rollout(rollout, place, top, longest) for place, rollout in group)
        sections.append(
            f"<section>\n<h2>Prompt {number + 1}</h2>\n"
            f'<div class="text prompt" dir="auto">{as_html(prompt)}</div>\n{shown}\n</section>'
        )
    body = "\n".join(sections)
    return (
        "<!doctype html>\n"
        f'<html lang="en">\n<meta charset="utf-8">\n<title>{as_html(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n"
        f"<h1>{as_html(title)}</h1>\n{_summary(rollouts)}\n{_legend(formula, top)}\n"
        f"<main>\n{body}\n</main>\n</html>\n"
    )


def darkest_from(scores: Iterable[float]) -> float:
    """Returns the lowest score with the darkest shade: the 99th percentile of the positive scores. With the maximum
    instead, one very large score would make all others pale.
    """
    positive = sorted(score for score in scores if 0 < score < math.inf)
    return positive[math.ceil(0.99 * len(positive)) - 1] if positive else math.inf


def shade(score: float, top: float) -> int:
    """Returns the level of a score's shade: 0 for a score of 0 or NaN, 9 for scores from ``top`` on. The level grows
    with the square root of the score. Only few scores are large, so on a linear scale most tokens would look alike.
    """
    if math.isnan(score) or score <= 0:
        return 0
    return LEVELS - 1 if score >= top else min(LEVELS - 1, int(LEVELS * math.sqrt(score / top)))


def _summary(rollouts: Sequence[Rollout]) -> str:
    trained = [rollout for rollout in rollouts if rollout.kept]
    kept = sum(sum(rollout.kept_tokens) for rollout in trained)
    tokens = sum(sum(rollout.counts) for rollout in trained)
    share = f" ({kept / tokens:.1%})" if tokens else ""
    return (
        f"<p><b>{len(trained)} of {len(rollouts)}</b> rollouts are kept, and in them <b>{kept:,} of {tokens:,}</b> "
        f"tokens{share}.</p>"
    )


def _legend(formula: str, top: float) -> str:
    shades = "".join(f'<i class="s{level}"></i>' for level in range(1, LEVELS))
    scale = f"0 {shades} {top:.3g} or more (square-root scale)" if math.isfinite(top) else "none is above 0"
    formula = f", {as_html(formula)}" if formula else ""
    return (
        f'<p class="legend">Score of a token{formula}: {scale}. <mark>Underlined and bold</mark>: kept, with a '
        "gradient. Folded: a dropped rollout; open it to read it. Point at a token, or tap it, for its numbers. "
        f"{NO_TEXT} is a token without a text of its own, such as a part of a character.</p>"
    )


def _rollout(rollout: Rollout, place: int, top: float, longest: int) -> str:
    """Returns the HTML of a rollout. A kept rollout has a shade for each token; a dropped rollout is folded text."""
    count = len(rollout.texts)
    head, tail, cut = count, count, ""  # the first ``head`` tokens are shown, and all tokens from ``tail`` on
    if count > longest:
        head, tail = longest - longest // 2, count - longest // 2
        kept = f", {sum(rollout.kept_tokens[head:tail]):,} of them kept" if rollout.kept else ""
        cut = f' <span class="cut">[{tail - head:,} tokens are not shown{kept}]</span> '

    facts = [f"Rollout {place}"]
    if rollout.reward is not None:
        facts.append(f"reward {rollout.reward:.3g}")
    if rollout.advantage is not None:
        kind = "good" if rollout.advantage > 0 else "bad" if rollout.advantage < 0 else ""
        facts.append(f'advantage <b class="{kind}">{rollout.advantage:+.2f}</b>')
    known = ", ".join(facts)
    if not rollout.kept:
        text = as_html("".join(rollout.texts[:head])) + cut + as_html("".join(rollout.texts[tail:]))
        return f'<details>\n<summary>{known}, dropped</summary>\n<div class="text" dir="auto">{text}</div>\n</details>'
    countable = sum(rollout.counts)
    share = f"{sum(rollout.kept_tokens):,} of {countable:,} tokens kept" if countable else "not in the loss"
    start, end = ("".join(_token(rollout, index, top) for index in part) for part in (range(head), range(tail, count)))
    return (
        f'<article>\n<div class="facts">{known}, {share}</div>\n'
        f'<div class="text" dir="auto">{start}{cut}{end}</div>\n</article>'
    )


def _token(rollout: Rollout, index: int, top: float) -> str:
    text = token_as_html(rollout.texts[index])
    if not rollout.counts[index]:
        return text
    name = "mark" if rollout.kept_tokens[index] else "i"
    score, entropy = rollout.scores[index], rollout.entropies[index]
    # Numbers need no quotes as attribute values; without quotes the page is smaller.
    known = "" if math.isnan(entropy) else f" data-h={entropy:.3g}"
    return f"<{name} class=s{shade(score, top)} data-s={score:.3g}{known}>{text}</{name}>"
