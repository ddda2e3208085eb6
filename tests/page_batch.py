"""Batches for the tests of the page, and texts that would do harm if they were not escaped."""

from __future__ import annotations

from typing import Any

import torch

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


def hostile_batch() -> Batch:
    """A group of two rollouts for each hostile text, which is also its prompt."""
    _, _, values = batch(groups=len(HOSTILE), group=2, tokens=2)
    return list(HOSTILE), [[text, text] for text in HOSTILE for _ in range(2)], values
