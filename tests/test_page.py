"""The page of selected tokens: what it shows, that text stays text, and what it refuses."""

from __future__ import annotations

import html
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import d3s_kernels as d3s
from d3s_kernels.report.render import darkest_from, shade
from d3s_kernels.report.text import token_texts

HOSTILE = [
    "</script><script>alert(1)</script>",
    '<img src=x onerror="document.title=1">',
    "</div></article></main><style>*{display:none}</style>",
    '"onmouseover="alert(1)',
    "--><!-- ]]> &lt;b&gt; &#60;",
    "abc\u202edcba\u202c \u2066isolated\u2069 \u200f\u200e\u061c",  # marks of the writing direction
    "\x00\x07\x1b[31m\x7f\x85\u2028\u2029\ufeff\u200b",  # control characters and invisible ones
    "\U000e0041\U000e0042 hidden tags, \u00ad\u034f\u180e\u2060\u3164\ufff9\U000e0101 and more that is not seen",
    "a\ud800b",  # half of a pair
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",  # Arabic and Hebrew
    "z" + "\u0335\u0321\u0322" * 40,  # stacked marks
    "x" * 3000,  # a word without an end
]


# Characters that would be invisible, or would change the text around them. (Written out here, not taken from the code.)
HIDDEN = (
    "\x00\x07\x1b\x7f\x85\u00ad\u034f\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202c\u202e\u2060\u2066\u2069\u3164\ufeff\ufff9"
    "\ud800\U000e0041\U000e0042\U000e0101"
)


def decode(ids: list[int]) -> str:
    """The text of bytes of UTF-8."""
    return bytes(ids).decode("utf-8", errors="replace")


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8, as those of byte-level BPE partly are."""

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces  # else spaces between tokens would vanish
        return decode(ids)


Batch = tuple[list[str], list[list[str]], dict[str, Any]]


def batch(groups: int, group: int, tokens: int, *, lengths: list[int] | None = None, all_kept: bool = False) -> Batch:
    """Prompts, the texts of tokens, and the other arguments of a page: random ones of fitting shapes."""
    rollouts = groups * group
    if lengths is None:
        lengths = torch.randint(tokens if all_kept else tokens // 2, tokens + 1, (rollouts,)).tolist()
    words = [" the", " num", "ber", " is", " 4", "2", ".", " because", " we", "\n", "<", " é"]
    texts = [[words[i] for i in torch.randint(len(words), (length,)).tolist()] for length in lengths]
    kept = torch.rand(rollouts) < (1 if all_kept else 0.5)
    valid = (torch.arange(tokens) < torch.tensor(lengths)[:, None]) & kept[:, None]
    values = {
        "kept_tokens": valid & (torch.rand(rollouts, tokens) < 0.3),
        "entropy": torch.rand(rollouts, tokens) * 3,
        "advantages": torch.randn(groups, group).abs() * (-1.0) ** torch.arange(rollouts).view(groups, group),
        "rewards": torch.rand(groups, group),
        "kept_rollouts": kept.view(groups, group),
    }
    return [f"Question {number}?" for number in range(groups)], texts, values


class Seen(HTMLParser):
    """What a page consists of: its tags, its tokens with their attributes, and the text of each rollout."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tokens: list[tuple[str, dict[str, Any], str]] = []
        self.texts: list[str] = []
        self._in_text = self._in_token = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append(tag)
        if values.get("class") == "text":
            self._in_text = True
            self.texts.append("")
        self._in_token = "data-s" in values
        if self._in_token:
            self.tokens.append((tag, values, ""))

    def handle_endtag(self, tag: str) -> None:
        self._in_text = self._in_text and tag != "div"
        self._in_token = False

    def handle_data(self, data: str) -> None:
        if self._in_text:
            self.texts[-1] += data
        if self._in_token:
            tag, values, text = self.tokens[-1]
            self.tokens[-1] = tag, values, text + data


def test_marks_shades_and_numbers_are_those_of_the_tensors() -> None:
    prompts, texts, values = batch(groups=3, group=4, tokens=9)
    seen = Seen(d3s.selection_page(prompts, texts, **values))
    kept = values["kept_rollouts"].flatten()
    lengths = [len(row) for row in texts]
    places = [(row, column) for row in range(len(texts)) if kept[row] for column in range(lengths[row])]
    assert len(seen.tokens) == len(places)
    scores = values["advantages"].flatten().abs()[:, None] * values["entropy"]
    top = darkest_from([float(scores[place]) for place in places])
    for (tag, attributes, text), place in zip(seen.tokens, places, strict=True):
        assert (tag == "mark") == bool(values["kept_tokens"][place])
        assert text == texts[place[0]][place[1]].replace("\n", "\u21b5\n")
        assert float(attributes["data-s"]) == pytest.approx(float(scores[place]), rel=6e-3)
        assert float(attributes["data-h"]) == pytest.approx(float(values["entropy"][place]), rel=6e-3)
        assert attributes["class"] == f"s{shade(float(scores[place]), top)}"
    assert seen.texts == [
        "".join(row).replace("\n", "\u21b5\n" if keep else "\n") for row, keep in zip(texts, kept, strict=True)
    ]
    assert seen.tags.count("article") == int(kept.sum())
    assert seen.tags.count("details") == int((~kept).sum())
    page = d3s.selection_page(prompts, texts, **values)
    assert "Score of a token, |advantage| x entropy: 0" in page
    assert not re.search(r"\b(?:src|href)=|url\(|://", page)  # nothing else is loaded
    fewer = {name: values[name][kept] for name in ("kept_tokens", "entropy")}  # rows of the kept rollouts alone
    assert d3s.selection_page(prompts, texts, **(values | fewer)) == page


def test_any_scores_instead_of_the_default() -> None:
    scores = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    page = d3s.selection_page(["?"], [["a", "b", "c", "d"]], torch.zeros(1, 4).bool(), scores=scores)
    shades = [(attributes["class"], attributes["data-s"]) for _, attributes, _ in Seen(page).tokens]
    assert shades == [("s0", "nan"), ("s9", "inf"), ("s0", "-inf"), ("s9", "1")]
    assert "data-h=" not in page
    assert "|advantage| x entropy" not in page


def test_an_empty_completion_and_no_kept_rollout() -> None:
    nothing = torch.zeros(2, 0)
    page = d3s.selection_page(["?"], [[], []], nothing.bool(), scores=nothing, kept_rollouts=torch.zeros(2).bool())
    assert "<b>0 of 2</b> rollouts" in page


# ---- text ------------------------------------------------------------------------------------------------------------


def test_hostile_text_stays_text() -> None:
    _, _, values = batch(groups=len(HOSTILE), group=2, tokens=2)
    prompts, texts = list(HOSTILE), [[text, text] for text in HOSTILE for _ in range(2)]
    harmless = Seen(d3s.selection_page(["x"] * len(prompts), [["x", "x"]] * len(texts), **values))
    page = d3s.selection_page(prompts, texts, title=HOSTILE[0], **values)
    assert Seen(page).tags == harmless.tags  # not one element more
    page.encode("utf-8")  # no lone surrogate is left
    hidden = sorted({character for text in HOSTILE for character in text} & set(HIDDEN))
    assert len(hidden) > 20
    for character in hidden:
        assert character not in page
        assert f"\u27e8U+{ord(character):04X}\u27e9" in page  # it is named instead
    for text in ("</script><script>alert(1)</script>", '"onmouseover="alert(1)'):
        assert html.escape(text, quote=False) in page


def test_line_breaks_and_empty_tokens_are_visible() -> None:
    prompts, texts, values = batch(groups=1, group=1, tokens=3, all_kept=True)
    texts[0] = ["a", "\n", ""]
    seen = Seen(d3s.selection_page(prompts, texts, **values))
    assert [text for _, _, text in seen.tokens] == ["a", "\u21b5\n", "\u25ab"]
    texts[0] = ["\u200d", "\ufe0f", "\u200d\U0001f466"]  # the parts of an emoji as SmolLM2 splits it
    seen = Seen(d3s.selection_page(prompts, texts, **values))
    assert [text for _, _, text in seen.tokens] == ["\u25ab\u200d", "\u25ab\ufe0f", "\u200d\U0001f466"]


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=12))
def test_the_texts_of_byte_tokens_join_to_the_whole(text: str) -> None:
    tokens = list(text.encode())
    texts = token_texts(decode, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text
    assert [part for part in texts if part] == list(text)  # each character is the text of its last byte


@given(tokens=st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_text_lose_nothing(tokens: list[int]) -> None:
    texts = token_texts(decode, tokens)
    assert len(texts) == len(tokens)
    found = iter("".join(texts))
    assert all(character in found for character in decode(tokens))  # in this order


def test_a_space_that_the_tokenizer_drops_at_the_start_is_kept_between_tokens() -> None:
    words = ["\u2581the", "\u2581end", "s", "\u2581."]

    def decode(ids: list[int]) -> str:  # as SentencePiece does
        return "".join(words[token] for token in ids).replace("\u2581", " ").removeprefix(" ")

    assert token_texts(decode, [0, 1, 2, 3]) == ["the", " end", "s", " ."]


def test_tokens_that_do_not_count_are_shown_without_a_score() -> None:
    """Those of tools, between the tokens of the model."""
    ids = torch.tensor([[*b"abcde", 0, 0], [*b"xyz", 0, 0, 0, 0]])
    mask = torch.tensor([[1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
    kept = torch.zeros(2, 7).bool()
    kept[0, 3] = True
    scores = torch.where(mask == 1, 0.5, 99.0)  # of tokens that do not count: not in the scale either
    values = {"kept_tokens": kept, "scores": scores, "mask": mask}
    page = d3s.selection_page(["?"], ids, tokenizer=Bytes(), **values)
    assert "<b>1 of 6</b> tokens (16.7%)" in page
    assert "1 of 3 tokens kept" in page
    assert Seen(page).texts == ["abcde", "xyz"]
    assert [(text, attributes["class"]) for _, attributes, text in Seen(page).tokens] == [(c, "s9") for c in "adexyz"]
    lists = [["a", "b", "c", "d", "e"], ["x", "y", "z"]]
    assert d3s.selection_page(["?"], lists, **values) == page
    kept[0, 1] = True
    with pytest.raises(ValueError, match="kept_tokens: got 1 in dropped rollouts or where mask is 0"):
        d3s.selection_page(["?"], lists, **values)


def test_entropies_that_are_not_known_are_not_shown() -> None:
    values = {"entropy": torch.tensor([[torch.nan, 1.0]]), "advantages": torch.zeros(1)}
    page = d3s.selection_page(["?"], [["a", "b"]], torch.zeros(1, 2).bool(), **values)
    assert [attributes.get("data-h") for _, attributes, _ in Seen(page).tokens] == [None, "1"]
    assert "none is above 0" in page


def test_ten_shades_rise_with_the_square_root_and_one_very_large_score_does_not_make_the_others_pale() -> None:
    assert [shade(score, 4.0) for score in (0.0, 0.03, 0.05, 0.99, 1.01, 3.2, 3.3, 9.0)] == [0, 0, 1, 4, 5, 8, 9, 9]
    assert shade(math.nextafter(1e-300, 0), 1e-300) == 9
    assert darkest_from([1.0] * 200 + [1e9, math.inf, math.nan] + [0.0] * 10_000) == 1.0


# ---- size ------------------------------------------------------------------------------------------------------------


def test_sixty_four_rollouts_stay_below_two_megabytes() -> None:
    prompts, texts, values = batch(groups=8, group=8, tokens=2048, all_kept=True)
    page = d3s.selection_page(prompts, texts, **values)
    assert len(page.encode()) < 2_000_000
    kept = int(values["kept_tokens"].sum())
    hidden = sum(int(number.replace(",", "")) for number in re.findall(r"not shown, ([\d,]+) of them kept", page))
    assert page.count("<mark class=s") + hidden == kept
    assert page.count("tokens are not shown") == 64


def test_the_middle_of_a_long_rollout_is_left_out() -> None:
    prompts, texts, values = batch(groups=1, group=2, tokens=9, lengths=[9, 9])
    texts = [[f"{place} " for place in range(9)] for _ in texts]
    values["kept_rollouts"] = torch.tensor([True, False])
    values["kept_tokens"][1] = False
    seen = Seen(d3s.selection_page(prompts, texts, longest=5, **values))
    assert [text for _, _, text in seen.tokens] == [*texts[0][:3], *texts[0][-2:]]
    assert seen.texts[1] == "".join(texts[1][:3]) + " [4 tokens are not shown] " + "".join(texts[1][-2:])


# ---- what it refuses -------------------------------------------------------------------------------------------------

# Two groups of two rollouts with five tokens each, the first of each group kept; and what is changed of it.
REFUSED: dict[str, dict[str, Any]] = {
    "prompts: got 3 for 4 rollouts": {"prompts": ["?"] * 3},
    "prompts: got ": {"prompts": [3, "?"]},
    "completions: got a list with int 3; takes integers": {"completions": [["a"], [3], ["a"], ["a"]]},
    "completions: got list ['text', [": {"completions": ["text", ["a"], ["a"], ["a"]]},
    "completions: got ": {"completions": iter([["a"]])},
    "completions: got torch.float32 of shape [4, 5]; takes integers": {"completions": torch.zeros(4, 5)},
    "tokenizer: got NoneType with token ids": {"completions": torch.zeros(4, 5).long()},
    "completions: got the token id -100; takes ids of at least 0": {
        "completions": torch.full((4, 5), -100), "tokenizer": Bytes(),
    },
    "title: got int; takes a text": {"title": 3},
    "scores: got None without entropy and advantages": {"entropy": None},
    "entropy: got shape [3, 5]; takes 4, or 2 ": {"entropy": torch.zeros(3, 5)},
    "entropy: got list; takes a float tensor": {"entropy": [[1.0]]},
    "advantages: got shape [3]; takes one value": {"advantages": torch.zeros(3)},
    "rewards: got torch.int64; takes a float": {"rewards": torch.ones(4).long()},
    "kept_tokens: got dtype torch.float32": {"kept_tokens": torch.ones(4, 5)},
    "kept_tokens: got 10 in dropped rollouts or where ": {"kept_tokens": torch.ones(4, 5).bool()},
    "longest: got 1; takes at least 2": {"longest": 1},
    "mask: got shape [3, 5]; takes [4, 5]": {"mask": torch.ones(3, 5)},
    "mask: got row 0 with a token after the 5 of its completion; takes 0 there": {"mask": torch.ones(4, 6)},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(message: str) -> None:
    prompts, texts, values = batch(groups=2, group=2, tokens=5, lengths=[5] * 4)
    values["kept_rollouts"] = torch.tensor([True, False, True, False])
    values["kept_tokens"] = values["kept_tokens"] & values["kept_rollouts"][:, None]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        d3s.selection_page(**{"prompts": prompts, "completions": texts, **values, **REFUSED[message]})
