"""Draws generation batches, and counts the operations of an update on a batch: of TRL's update, and of updates with the
choices of D3S.

TRL's LM head computes four products for a labelled token: in the forward the logits; in the backward the logits again,
and the gradients of the hidden state and of the weight. Our head computes ``1 + 3 r`` products, where ``r`` is the
share of the tokens that are kept. If the kept tokens are known before the update (``entropy_from="rollout"``), our head
computes ``4 r`` products, and the body computes only the rows with a kept token, and only the columns up to the last
kept token.

TRL's micro-batches have equal numbers of rows, all as wide as the batch. Our micro-batches are as with
``order_rows="auto"``.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from .._segments.quota import Quota
from ..rollouts.micro_batches import micro_batches
from ..rollouts.select_rollouts import group_advantages
from ..selection.selection import Selection
from ..tokens.random_prefixes import random_prefixes
from ..tokens.select_tokens import select_tokens
from .model import Model

PARTS = ("body forward", "recompute", "body backward", "head forward", "head backward", "passes without gradient")
TRL, NOTHING = "TRL as it is", "nothing dropped"
CHOICES = {  # for each: whether rollouts are chosen, and how tokens are chosen
    TRL: (False, "all"), NOTHING: (False, "all"), "rollouts": (True, "all"),
    "tokens in the update": (False, "in update"), "tokens known before": (False, "known"),
    "off-policy tokens": (False, "on-policy"), "random prefixes": (False, "prefix"),
    "rollouts + tokens in the update": (True, "in update"), "rollouts + tokens known before": (True, "known"),
    "rollouts + random prefixes": (True, "prefix"),
}  # fmt: skip
SIGMA = 0.9  # standard deviation of the logarithms of lengths, as in a benchmark of TRL (trl#6092)
SPREAD = 2.0  # a prompt's rate of success is drawn from Beta(SPREAD s, SPREAD (1 - s)), whose mean is s
# Percentiles 0, 5, ..., 100 of a token's entropy in nats. The tokens are from 64 answers of SmolLM2-135M
# (benchmarks/recorded.json).
ENTROPIES = (
    0.0, 0.04, 0.11, 0.21, 0.36, 0.49, 0.65, 0.83, 1.03, 1.22, 1.41, 1.58, 1.74, 1.97, 2.19, 2.49, 2.74, 3.11, 3.59,
    4.13, 7.56,
)  # fmt: skip


def number(text: str) -> Any:
    """Returns the value of a JSON text. If the text is not JSON, returns the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def lengths_of(text: str) -> Callable[[Random], int]:
    """Returns a function that draws a completion's length: either a random line of a file, or a log-normal value, but
    at most a given maximum. Bisection finds the log-normal's mu for which lengths have the given mean.
    """
    mean, _, most = map(number, text.partition(","))
    if type(mean) is int and type(most) is int and 0 < mean <= most:
        at, low, high = [NormalDist(0, SIGMA).inv_cdf((n + 0.5) / 999) for n in range(999)], -9.0, math.log(most) + 9
        for _ in range(60):
            mu = (low + high) / 2
            found = sum(min(most, math.exp(mu + value)) for value in at) / 999
            low, high = (mu, high) if found <= mean else (low, mu)
        return lambda draws: max(1, min(most, round(draws.lognormvariate(mu, SIGMA))))
    if not Path(text).is_file():
        raise ValueError(f"--lengths: got {text!r}; takes a file, or a mean and a maximum above it, as in 400,1024")
    values = [number(line) for line in Path(text).read_text(encoding="utf-8", errors="replace").splitlines()]
    values = [value.get("length") if isinstance(value, dict) else value for value in values]
    for line, value in enumerate(values or [None], 1):
        if type(value) is not int or value < 1:
            raise ValueError(f"--lengths: {text}, line {line}: got {value!r}; takes a whole number of at least 1")
    return lambda draws: int(draws.choice(values))


def drawn(seed: int, options: Namespace) -> tuple[Tensor, ...]:
    """Draws a batch of R rollouts, each with at most T tokens. Lengths, rewards and tokens are independent of each
    other.

    Returns:
        lengths int64 ``[R]``; advantages float32 ``[groups, n]``; entropies float32 ``[R, T]``, in nats; the mask of
        tokens that are not off-policy, bool ``[R, T]``; the position of each rollout after TRL's shuffling, int64
        ``[R]``; and the number in [0, 1) by which each rollout is cut, ``[R]``.
    """
    draws, generator, s = Random(seed), torch.Generator().manual_seed(seed), options.success
    rates = [draws.betavariate(SPREAD * s, SPREAD * (1 - s)) for _ in range(options.prompts)]
    rewards = torch.tensor([[float(draws.random() < rate) for _ in range(options.group_size)] for rate in rates])
    lengths = torch.tensor([options.lengths(draws) for _ in range(rewards.numel())])
    at_random = torch.rand((2, len(lengths), int(lengths.max())), generator=generator)
    table, place = torch.tensor(ENTROPIES), at_random[0] * (len(ENTROPIES) - 1)
    entropy = torch.lerp(table[place.floor().long()], table[place.ceil().long()], place.frac())
    order = torch.randperm(len(lengths), generator=generator)
    cuts = torch.rand(len(lengths), generator=generator)
    return lengths, group_advantages(rewards), entropy, at_random[1] >= options.off_policy, order, cuts


def update(options: Namespace, batch: tuple[Tensor, ...], choice: str) -> tuple[Counter[str], int]:
    """Counts the update of an optimizer step that trains on a whole batch. Returns the number of operations, by part,
    and the number of positions of the largest micro-batch. The entry "padding" has the operations that the body's
    forward spends on columns that a row does not need.
    """
    model: Model = options.model
    all_lengths, advantages, entropy, on_policy, order, cuts = batch
    (chooses, tokens), prompt, size = CHOICES[choice], options.prompt_length, options.micro_batch
    rows, head, total, largest = torch.arange(len(order)), 2 * model.hidden * model.vocabulary, Counter[str](), 0

    def add_pass(lengths: Tensor, width: int) -> None:
        """Adds a pass without gradient over rows of a batch of this width, in as many forwards as TRL makes."""
        forwards = [(len(lengths), prompt + width)]
        if choice != TRL and len(lengths) > size:
            parts = micro_batches(prompt + lengths, -(-len(lengths) // size))
            forwards = [(len(part.rows), part.width) for part in parts]
        total[PARTS[-1]] += sum(model.body(*forward)[0] for forward in forwards) + head * int(lengths.sum())

    if options.passes == "vllm":  # vLLM's correction is computed before rollouts are chosen
        add_pass(all_lengths, int(all_lengths.max()))
    if chooses:
        selection = Selection(rollouts_start=options.rollouts_kept, rollouts_end=options.rollouts_kept)
        rows = selection.rollouts(advantages, 0.0, multiple_of=len(order) // size).flatten().nonzero()[:, 0]
    lengths, advantages = all_lengths[rows], advantages.flatten()[rows]
    width = int(lengths.max())
    needed = torch.arange(width) < lengths[:, None]  # the tokens that the head computes
    if tokens == "prefix":
        needed = random_prefixes(needed, draws=cuts[rows]).mask
    if options.passes == "old":
        add_pass(needed.sum(dim=1), width)
    elif options.passes == "none" and tokens == "known":  # an extra pass, only for entropies
        add_pass(lengths[advantages != 0], width)

    if tokens in ("known", "on-policy", "prefix"):
        needed &= on_policy[rows, :width]
    if tokens == "known":
        needed = select_tokens(entropy[rows, :width], advantages, options.token_share, mask=needed).mask
    # A row needs the columns of its prompt, and the columns up to its last needed token. A row without a needed token
    # needs no columns.
    columns = (needed * torch.arange(prompt + 1, prompt + width + 1)).amax(dim=1)
    places = order[rows].argsort().chunk(len(order) // size)
    if choice != TRL and tokens != "in update":
        places = tuple(part.rows for part in micro_batches(columns, len(places)))
    share = Quota(ratio=options.token_share if tokens == "in update" else 1.0)
    for place in places:
        used = int((columns[place] > 0).sum()) or 1  # as in the trainer: one row if no row has a token
        widest = prompt + width if choice == TRL else max(prompt + 1, int(columns[place].max()))
        forward, recompute, backward = model.body(used, widest, options.lora)
        labelled, chosen_from = needed[place].sum(), (needed & on_policy[rows, :width])[place].sum()
        of_kept = (
            head
            * int(share.of(chosen_from if tokens == "in update" else labelled))
            * (2 if options.lora or options.frozen_head else 3)
        )
        total.update(dict(zip(PARTS, (forward, recompute, backward, head * int(labelled), of_kept), strict=False)))
        total["padding"] += forward - sum(model.body(1, of_row)[0] for of_row in columns[place].tolist())
        largest = max(largest, used * widest)
    total["recompute"] *= not options.no_checkpointing
    return total, largest
