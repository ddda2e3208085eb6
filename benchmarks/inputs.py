"""Inputs similar to a trainer's, the same in every run."""

from functools import lru_cache

import torch

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


def entropies(*shape: int) -> torch.Tensor:
    """Random entropies: near 0 for most tokens, large for a few."""
    return 8 * torch.rand(shape, generator=generator(), device=device) ** 4


def advantages(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), device=device)


def right_padded(sequences: int, tokens: int) -> torch.Tensor:
    """A mask [sequences, tokens] of completions of different lengths; half of the positions are padding."""
    lengths = (torch.arange(sequences, device=device) + 0.5) * tokens / sequences
    return torch.arange(tokens, device=device) < lengths.round().unsqueeze(1)
