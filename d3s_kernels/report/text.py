"""Finds the text of single tokens, and converts a model's text to HTML in which every character is visible and no text
acts as markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "\ufffd"  # the text that a tokenizer returns for an incomplete character
NO_TEXT = "\u25ab"  # ▫: shown for a token without a text of its own
_LONGEST_CHARACTER = 4  # bytes; a run of more unfinished tokens is invalid UTF-8

# Characters that would be invisible, or would change the text around them: control characters, text-direction marks,
# invisible operators, fillers, tags, variation selectors of Han characters, line separators, surrogates. Tab, newline
# and the characters of _WITHIN_WORDS, which emoji and several scripts need, are left as they are.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e007f\U000e0100-\U000e01ef]"
)
_WITHIN_WORDS = "\u200c\u200d\ufe00-\ufe0f"  # joiners and variation selectors
_INVISIBLE = re.compile(f"[{_WITHIN_WORDS}]*")


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Returns the tokenizer's function from token ids to text. The text keeps special tokens and all spaces."""
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_texts(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """Returns, for each token, the text that the token adds to the text before it. The joined texts are the decoded
    text, except for invalid UTF-8.

    If the bytes of a character are spread over several tokens, the text of the last of these tokens is the character,
    and the other tokens have no text. Each token is decoded together with the token before it, since some tokenizers
    drop a space at the start of a text.
    """
    texts: list[str] = []
    first = done = 0  # decoding starts at token ``first``; the tokens before ``done`` already have their texts
    for end in range(1, len(token_ids) + 1):
        before, text = decode(list(token_ids[first:done])), decode(list(token_ids[first:end]))
        last = end == len(token_ids) or end - done >= _LONGEST_CHARACTER
        if text.endswith(UNFINISHED) and not last:
            texts.append("")
            continue
        while not text.startswith(before):  # bytes that were invalid may form a character now
            before = before[:-1]
        texts.append(text[len(before) :])
        first, done = done, end
    return texts


def as_html(text: str) -> str:
    """Escapes a text for the content of an HTML element. Hidden characters become code points, as in ⟨U+202E⟩."""
    return html.escape(_HIDDEN.sub(lambda match: f"\u27e8U+{ord(match[0]):04X}\u27e9", text), quote=False)


def token_as_html(text: str) -> str:
    """Escapes a token's text as :func:`as_html` does. Line breaks, joiners and empty texts become visible too."""
    shown = as_html(text).replace("\n", "\u21b5\n")
    return NO_TEXT + shown if _INVISIBLE.fullmatch(shown) else shown
