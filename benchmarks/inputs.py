"""Inputs similar to a trainer's, the same in every run."""

import random
from functools import lru_cache
from typing import NamedTuple

import torch

from d3s_kernels import SamplingMask

from .sizes import Sizes

device = torch.device("cpu")  # of all inputs; conftest.py sets it before the first is made


def generator() -> torch.Generator:
    return torch.Generator(device).manual_seed(20_250_922)


@lru_cache(maxsize=1)
def logits_and_labels(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """[sequences, tokens, vocabulary] and the sampled tokens.

    Normal logits; in every fourth row the sampled token's logit is far above the others. They are filled in place, so
    that the peak of memory is the size of the result.
    """
    random = generator()
    shape = sizes.sequences, sizes.tokens
    logits = torch.empty(*shape, sizes.vocabulary, dtype=dtype, device=device).normal_(std=3, generator=random)
    labels = torch.randint(sizes.vocabulary, shape, generator=random, device=device)
    peaked = torch.arange(0, labels.numel(), 4, device=device)
    height = torch.empty(len(peaked), device=device).uniform_(15, 30, generator=random)
    logits.view(-1, sizes.vocabulary)[peaked, labels.view(-1)[peaked]] = height.to(dtype)
    return logits, labels


class Kept(NamedTuple):
    mask: SamplingMask
    labels: torch.Tensor  # [sequences, tokens], each in its span
    padded: torch.Tensor  # the ids as trainers hold them, [sequences, tokens, K], -1 past the last


@lru_cache(maxsize=1)
def kept_tokens(sizes: Sizes) -> Kept:
    """Spans with the sizes that prime-rl reports for top-p 0.97: 45 % have one token, mean 8, 99 % up to 82."""
    shape = sizes.sequences, sizes.tokens
    draws = torch.Generator().manual_seed(20_250_922)
    lengths = torch.randn(shape, generator=draws).mul(1.19).add(1.9).exp().long().clamp(2, 512).flatten()
    lengths[torch.rand(len(lengths), generator=draws) < 0.45] = 1
    choose = random.Random(20_250_922)
    spans = [choose.sample(range(sizes.vocabulary), length) for length in lengths.tolist()]
    padded = torch.nested.to_padded_tensor(torch.nested.nested_tensor([torch.tensor(span) for span in spans]), -1)
    labels = torch.tensor([span[0] for span in spans])
    return Kept(
        SamplingMask.from_lists(spans, device=device),
        labels.view(shape).to(device),
        padded.view(*shape, -1).to(device),
    )


def entropies(*shape: int) -> torch.Tensor:
    """Random entropies: near 0 for most tokens, large for a few."""
    return 8 * torch.rand(shape, generator=generator(), device=device) ** 4


def advantages(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), device=device)


def right_padded(sequences: int, tokens: int) -> torch.Tensor:
    """A mask [sequences, tokens] of completions of different lengths; half of the positions are padding."""
    lengths = (torch.arange(sequences, device=device) + 0.5) * tokens / sequences
    return torch.arange(tokens, device=device) < lengths.round().unsqueeze(1)
