"""The HTML of a page of selected tokens, from plain Python values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .text import NO_TEXT, as_html, token_as_html

LEVELS = 10  # shades of a token, from none to the darkest
_STYLE = Path(__file__).with_name("style.css")
# Nothing on the page runs or is loaded, even if some text were to get past the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Rollout:
    """What the page shows of one rollout. A dropped one has no scores, entropies or kept tokens."""

    texts: list[str]  # of each token
    counts: list[bool]  # the tokens that could be kept; others have no score
    reward: float | None
    advantage: float | None
    kept: bool
    scores: list[float]
    entropies: list[float] | None
    kept_tokens: list[bool]

    @property
    def number(self) -> int:
        """How many tokens could be kept."""
        return sum(self.counts)


@dataclass(frozen=True)
class Group:
    prompt: str
    rollouts: list[Rollout]


def page(title: str, formula: str, groups: Sequence[Group], longest: int) -> str:
    """The whole page. A rollout with more than ``longest`` tokens is shown without its middle.

    Args:
        formula: the scores' formula, or "" if not known.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    top = darkest_from(
        score
        for rollout in rollouts
        for score, counts in zip(rollout.scores, rollout.counts, strict=False)  # a dropped rollout has no scores
        if counts
    )
    body = "\n".join(_group(number, group, top, longest) for number, group in enumerate(groups, start=1))
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
    """The score from which a token has the darkest shade: the 99th percentile of positive scores. With their maximum,
    one very large score would make all others pale.
    """
    positive = sorted(score for score in scores if 0 < score < math.inf)
    return positive[math.ceil(0.99 * len(positive)) - 1] if positive else math.inf


def shade(score: float, top: float) -> int:
    """The level of a score: 0 for 0 and NaN, 9 from ``top`` on. Few scores are large, so levels rise with the square
    root: else all but a few tokens would look alike.
    """
    if math.isnan(score) or score <= 0:
        return 0
    return LEVELS - 1 if score >= top else min(LEVELS - 1, int(LEVELS * math.sqrt(score / top)))


def _summary(rollouts: Sequence[Rollout]) -> str:
    trained = [rollout for rollout in rollouts if rollout.kept]
    kept, tokens = sum(sum(rollout.kept_tokens) for rollout in trained), sum(rollout.number for rollout in trained)
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


def _group(number: int, group: Group, top: float, longest: int) -> str:
    shown = "\n".join(
        (_kept if rollout.kept else _dropped)(rollout, place, top, longest)
        for place, rollout in enumerate(group.rollouts, start=1)
    )
    return (
        f"<section>\n<h2>Prompt {number}</h2>\n"
        f'<div class="text prompt" dir="auto">{as_html(group.prompt)}</div>\n{shown}\n</section>'
    )


def _kept(rollout: Rollout, place: int, top: float, longest: int) -> str:
    count = f"{sum(rollout.kept_tokens):,} of {rollout.number:,} tokens kept" if rollout.number else "not in the loss"
    first, left_out, last = _parts(rollout, longest)
    text = _tokens(rollout, first, top) + left_out + _tokens(rollout, last, top)
    return (
        f'<article>\n<div class="facts">{_facts(rollout, place)}, {count}</div>\n'
        f'<div class="text" dir="auto">{text}</div>\n</article>'
    )


def _dropped(rollout: Rollout, place: int, top: float, longest: int) -> str:
    first, left_out, last = _parts(rollout, longest)
    text = as_html("".join(rollout.texts[first])) + left_out + as_html("".join(rollout.texts[last]))
    return (
        f"<details>\n<summary>{_facts(rollout, place)}, dropped</summary>\n"
        f'<div class="text" dir="auto">{text}</div>\n</details>'
    )


def _facts(rollout: Rollout, place: int) -> str:
    facts = [f"Rollout {place}"]
    if rollout.reward is not None:
        facts.append(f"reward {rollout.reward:.3g}")
    if rollout.advantage is not None:
        kind = "good" if rollout.advantage > 0 else "bad" if rollout.advantage < 0 else ""
        facts.append(f'advantage <b class="{kind}">{rollout.advantage:+.2f}</b>')
    return ", ".join(facts)


def _parts(rollout: Rollout, longest: int) -> tuple[slice, str, slice]:
    """The tokens shown from the start and from the end, and the note on those left out between them."""
    count = len(rollout.texts)
    if count <= longest:
        return slice(count), "", slice(count, count)
    first, last = longest - longest // 2, count - longest // 2
    kept = f", {sum(rollout.kept_tokens[first:last]):,} of them kept" if rollout.kept else ""
    left_out = f' <span class="cut">[{last - first:,} tokens are not shown{kept}]</span> '
    return slice(first), left_out, slice(last, count)


def _tokens(rollout: Rollout, part: slice, top: float) -> str:
    return "".join(_token(rollout, place, top) for place in range(len(rollout.texts))[part])


def _token(rollout: Rollout, place: int, top: float) -> str:
    text = token_as_html(rollout.texts[place])
    if not rollout.counts[place]:
        return text
    name, score = "mark" if rollout.kept_tokens[place] else "i", rollout.scores[place]
    entropy = math.nan if rollout.entropies is None else rollout.entropies[place]
    # Unquoted values keep the page small; numbers need no quotes.
    known = "" if math.isnan(entropy) else f" data-h={entropy:.3g}"
    return f"<{name} class=s{shade(score, top)} data-s={score:.3g}{known}>{text}</{name}>"
