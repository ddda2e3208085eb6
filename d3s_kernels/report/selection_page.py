"""An HTML page that shows which rollouts and tokens of a batch are kept, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._arguments.checks import whole_number
from .batch import brief, completion_texts, is_list, per_rollout, per_token
from .render import Rollout, page


def selection_page(
    prompts: Sequence[str],
    completions: Tensor | Sequence[Sequence[str]],
    kept_tokens: Tensor,
    *,
    entropy: Tensor | None = None,
    advantages: Tensor | None = None,
    scores: Tensor | None = None,
    kept_rollouts: Tensor | None = None,
    rewards: Tensor | None = None,
    mask: Tensor | None = None,
    tokenizer: Any = None,
    title: str = "Which tokens are trained on",
    longest: int = 512,
) -> str:
    """Returns a self-contained HTML page of a batch: the text of its rollouts, with tokens shaded by score and kept
    tokens marked.

    The default score is D3S's ``|advantage| * entropy``. Dropped rollouts are folded. The page needs no network and
    runs no script, so it can be mailed or put beside logs. Its layout fits phones, and follows the reader's light or
    dark theme. All text is escaped; control characters and text-direction marks are shown as code points. A page with
    64 rollouts of up to 512 tokens is smaller than 2 MB, not counting the prompts.

    Args:
        prompts: G texts, one for each group. Rollouts are ordered by prompt; each prompt has the same number of
            rollouts, R / G.
        completions: token ids, integer ``[R, T]``, with ``tokenizer``; or a list of token texts for each rollout.
        kept_tokens: bool, or integer (0 means False) ``[R, T]``, such as ``select_tokens(...).mask``.
        entropy: float ``[R, T]``, nats; shown, and part of the default score. NaN where it was not computed.
        advantages: float, R values of any shape; shown, and part of the default score.
        scores: float ``[R, T]``, shown instead of the default score.
        kept_rollouts: bool or integer, R values of any shape, such as ``select_rollouts(...)``. None means that all are
            kept. With ``kept_rollouts``, the arguments ``kept_tokens``, ``entropy`` and ``scores`` may also be
            ``[K, T]``: one row for each of the K kept rollouts. (A trainer does not forward dropped rollouts, so it has
            no entropies for them.)
        rewards: float, R values of any shape; shown.
        mask: ``[R, T]``, non-zero at the tokens that could be kept; None means all tokens. Tokens where the mask is 0,
            such as tool output, are shown without a score. Token ids after a row's last non-zero mask value are
            padding.
        tokenizer: an object with the method ``decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=...)``,
            such as any tokenizer of ``transformers``.
        title: the page's heading.
        longest: the maximum number of tokens shown for one rollout. If a rollout has more tokens, half of the shown
            tokens are from the start of the rollout, and half from its end.

    Returns:
        The page. Write it to a file in UTF-8: ``Path("page.html").write_text(page, encoding="utf-8")``.

    Raises:
        ValueError: shapes that do not fit together; R is not a multiple of G; no ``scores``, and ``entropy`` or
            ``advantages`` is missing; ``kept_tokens`` or ``kept_rollouts`` in another dtype; a negative token id; a
            kept token that ``mask`` leaves out; ``longest`` below 2.
        TypeError: an argument of another type; token ids without a tokenizer.

    Example:
        >>> import torch, d3s_kernels as d3s
        >>> texts = [["4", " apples"], ["No", " idea"]]
        >>> entropy, advantages = torch.tensor([[0.1, 0.7], [1.9, 0.2]]), torch.tensor([0.7, -0.7])
        >>> kept = d3s.select_tokens(entropy, advantages, 0.25)
        >>> page = d3s.selection_page(["2 + 2?"], texts, kept.mask, entropy=entropy, advantages=advantages)
        >>> page.count("<mark class=s"), "<mark class=s9 data-s=1.33 data-h=1.9>No</mark>" in page
        (1, True)
    """
    longest = whole_number("longest", longest, at_least=2)
    if not isinstance(title, str):
        raise TypeError(f"title: got {type(title).__name__}; takes a text")
    if scores is None and (entropy is None or advantages is None):
        raise ValueError("scores: got None without entropy and advantages; takes a tensor, or both of these instead")
    texts, counts = completion_texts(completions, mask, tokenizer)
    number = len(texts)
    kept = [True] * number if kept_rollouts is None else per_rollout("kept_rollouts", kept_rollouts, number, "bool")
    lengths = [len(row) if keep else 0 for row, keep in zip(texts, kept, strict=True)]
    tokens = per_token("kept_tokens", kept_tokens, lengths, kept, "bool")
    countable = sum(
        keep and count
        for row, flags in zip(tokens, counts, strict=True)
        for keep, count in zip(row, flags, strict=False)  # the row of a dropped rollout may be empty
    )
    if beyond := int(kept_tokens.count_nonzero()) - countable:
        raise ValueError(f"kept_tokens: got {beyond} in dropped rollouts or where mask is 0; takes none there")

    weights = per_rollout("advantages", advantages, number, "float")
    if entropy is None:
        entropies = [[math.nan] * length for length in lengths]
    else:
        entropies = per_token("entropy", entropy, lengths, kept, "float")
    if scores is None:
        formula = "|advantage| x entropy"
        shown = [
            [abs(weight) * value if weight else 0.0 for value in row]  # 0 also if the entropy is NaN
            for weight, row in zip(weights, entropies, strict=True)
        ]
    else:
        formula, shown = "", per_token("scores", scores, lengths, kept, "float")
    rewarded = per_rollout("rewards", rewards, number, "float")
    rollouts = [
        Rollout(*values)
        for values in zip(texts, counts, rewarded, weights, kept, shown, entropies, tokens, strict=True)
    ]
    if not is_list(prompts) or not all(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(f"prompts: got {brief(prompts)}; takes a list of texts")
    if not prompts or number % len(prompts):
        raise ValueError(f"prompts: got {len(prompts)} for {number} rollouts; takes a number that divides them")
    return page(title, formula, prompts, rollouts, longest)
