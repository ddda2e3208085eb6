"""The page of selected tokens, rendered by a real browser (Debian's package chromium)."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, Browser
from page_batch import HOSTILE, batch, hostile_batch

import d3s_kernels as d3s
from d3s_kernels.report.text import as_html, token_as_html

pytestmark = [
    pytest.mark.slow("the page as a browser renders it"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

# Whether two colours, the second over a third one, can be told apart: the contrast of the Web's accessibility rules.
CONTRAST = """
(selector => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const over = (top, ground) => top.slice(0, 3).map((c, i) => c * (top[3] ?? 1) + ground[i] * (1 - (top[3] ?? 1)));
  const light = colour => colour.map(c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const element = document.querySelector(selector), style = getComputedStyle(element);
  let ground = numbers(getComputedStyle(document.body).backgroundColor).slice(0, 3);
  const card = element.closest("article, details");
  if (card) ground = over(numbers(getComputedStyle(card).backgroundColor), ground);
  ground = over(numbers(style.backgroundColor), ground);
  const pair = [light(over(numbers(style.color), ground)), light(ground)].sort((a, b) => b - a);
  return (pair[0] + .05) / (pair[1] + .05);
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


def test_kept_tokens_are_those_of_the_mask(browser: Browser, path: Path) -> None:
    prompts, texts, values = batch(groups=4, group=4, tokens=60)
    path.write_text(d3s.selection_page(prompts, texts, **values), encoding="utf-8")
    browser.open(path)
    assert browser.value("document.querySelectorAll('mark[data-s]').length") == int(values["kept_tokens"].sum())
    kept = values["kept_rollouts"].flatten().tolist()
    shown = browser.value("[...document.querySelectorAll('article > .text')].map(e => e.textContent)")
    of_rows = ["".join(html.unescape(token_as_html(text)) for text in row) for row in texts]
    assert shown == [row for row, keep in zip(of_rows, kept, strict=True) if keep]
    unfolded = "[...document.querySelectorAll('details > .text')].map(e => e.checkVisibility())"
    assert browser.value(unfolded) == [False] * kept.count(False)
    browser.value("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.value(unfolded) == [True] * kept.count(False)
    assert browser.requests() == [path.as_uri()]  # nothing else was loaded


def test_pointing_at_a_token_shows_its_numbers(browser: Browser, path: Path) -> None:
    prompts, texts, values = batch(groups=1, group=1, tokens=8, all_kept=True)
    values["kept_tokens"][0] = torch.arange(8) == 0
    path.write_text(d3s.selection_page(prompts, texts, **values), encoding="utf-8")
    browser.open(path, width=360)
    entropy = values["entropy"][0, 0]
    score = float(values["advantages"].abs() * entropy)
    browser.point_at("mark[data-s]")
    after = "getComputedStyle(document.querySelector('mark[data-s]'), '::after')"
    shown = browser.value(f"{after}.content").replace('" "', "").replace('"', "")
    assert shown == f"kept: score {score:.3g}, entropy {float(entropy):.3g} nats"
    assert browser.value(f"{after}.position") == "fixed"  # at the edge of the window, so it covers no neighbour


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_shade(browser: Browser, path: Path, scheme: str) -> None:
    prompts, texts, values = batch(groups=2, group=8, tokens=200, all_kept=True)
    path.write_text(d3s.selection_page(prompts, texts, **values), encoding="utf-8")
    browser.open(path, scheme=scheme)
    selectors = [f"article .s{level}" for level in range(10)] + [".legend", ".facts", ".prompt", "b.good", "b.bad"]
    for selector in selectors:
        assert browser.value(f"{CONTRAST}('{selector}')") >= 4.5, selector
    grounds = [
        browser.value(f"getComputedStyle(document.querySelector('{place}')).backgroundColor")
        for place in ("body", *selectors[:10])
    ]
    assert len(set(grounds[1:])) == 10  # every level is another shade
    assert (grounds[0] == "rgb(13, 17, 23)") == (scheme == "dark")


def test_hostile_text_does_nothing_and_fits_a_phone(browser: Browser, path: Path) -> None:
    prompts, texts, values = hostile_batch()
    path.write_text(d3s.selection_page(prompts, texts, title=HOSTILE[0], **values), encoding="utf-8")
    browser.open(path, width=360, height=740)
    assert browser.value("document.querySelectorAll('script, img, main style, [onerror], [onmouseover]').length") == 0
    assert browser.value("document.title") == HOSTILE[0]
    assert not [event for event in browser.events if event.get("method") == "Page.javascriptDialogOpening"]
    assert browser.requests() == [path.as_uri()]
    browser.value("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= 360
    shown = browser.value("[...document.querySelectorAll('.prompt')].map(e => e.textContent)")
    assert shown == [html.unescape(as_html(text)) for text in HOSTILE]
    # What is written from right to left keeps to its own block.
    blocks = browser.value("[...document.querySelectorAll('.text')].map(e => getComputedStyle(e).unicodeBidi)")
    assert set(blocks) == {"isolate"}
