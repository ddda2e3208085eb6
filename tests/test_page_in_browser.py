"""The page of selected tokens, rendered by a real browser (Debian's package chromium)."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from page_batch import HOSTILE, batch, hostile_batch

import d3s_kernels as d3s
from d3s_kernels.report.text import as_html, token_as_html

pytestmark = [
    pytest.mark.slow("the page as a browser renders it"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


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
