"""Inputs similar to a trainer's, the same in every run."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from d3s_kernels import SamplingMask

from .sizes import Sizes

device = torch.device("cpu")  # the device of all inputs; conftest.py sets it before the first input is made
SECTOR = 32  # bytes of a GPU's memory that are read together
contests_of = "cpu"  # the device whose contests run; a rehearsal runs a GPU's contests on the CPU


def generator() -> torch.Generator:
    return torch.Generator(device).manual_seed(20_250_922)


@lru_cache(maxsize=1)
def logits_and_labels(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [sequences, tokens, vocabulary], and the sampled tokens as labels.

    The logits are normally distributed; in every fourth row the sampled token's logit is far above the others. The
    logits are filled in place, so that the peak of memory is the size of the result.
    """
    random = generator()
    shape = sizes.sequences, sizes.tokens
    logits = torch.empty(*shape, sizes.vocabulary, dtype=dtype, device=device).normal_(std=3, generator=random)
    labels = torch.randint(sizes.vocabulary, shape, generator=random, device=device)
    peaked = torch.arange(0, labels.numel(), 4, device=device)
    height = torch.empty(len(peaked), device=device).uniform_(15, 30, generator=random)
    logits.view(-1, sizes.vocabulary)[peaked, labels.view(-1)[peaked]] = height.to(dtype)
    return logits, labels


@dataclass(frozen=True)
class Kept:
    mask: SamplingMask
    labels: torch.Tensor  # [...]; each label is one of its span's ids

    @cached_property
    def padded(self) -> torch.Tensor:
        """The supports as trainers hold them: int64 [..., K], padded with -1."""
        lengths = self.mask.offsets.diff()
        row = torch.repeat_interleave(lengths)
        place = torch.arange(len(row), device=row.device) - self.mask.offsets[row]
        padded = torch.full((len(lengths), int(lengths.max())), -1, device=row.device)
        padded[row, place] = self.mask.token_ids.long()
        return padded.view(*self.labels.shape, -1)

    def moved(self, by: int, vocabulary: int) -> "Kept":
        """The same spans, but with other tokens."""
        ids = (self.mask.token_ids + by) % vocabulary
        other = Kept(SamplingMask(ids, self.mask.offsets), (self.labels + by) % vocabulary)
        _ = other.padded  # it waits for the GPU, which must not happen in a call that is timed
        return other

    def sectors(self, vocabulary: int, itemsize: int) -> int:
        """How many sectors of a GPU's memory contain a logit of a support, if each logit has `itemsize` bytes."""
        row = torch.repeat_interleave(self.mask.offsets.diff())
        return ((row * vocabulary + self.mask.token_ids) * itemsize // SECTOR).unique().numel()


@lru_cache(maxsize=1)
def kept_tokens(sizes: Sizes) -> Kept:
    return draw_kept(sizes.vocabulary, sizes.sequences, sizes.tokens)


def draw_kept(vocabulary: int, *shape: int, mean: float = 8) -> Kept:
    """Supports, each a span of ids, with the sizes that prime-rl reports for top-p 0.97: 45 % have one id, the mean is
    8 ids, and 99 % have at most 82 ids. For another mean, all sizes are scaled.
    """
    draws = torch.Generator().manual_seed(20_250_922)
    lengths = torch.randn(shape, generator=draws).mul(1.19).add(1.9).exp().long().clamp(2, 512).flatten()
    lengths[torch.rand(len(lengths), generator=draws) < 0.45] = 1
    lengths = lengths.mul(mean / 8).round().long().clamp(1, vocabulary)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    # Each span is a part of one shuffled vocabulary, so that millions of ids take no time.
    start = torch.randint(vocabulary, (len(lengths),), generator=draws) - offsets[:-1]
    place = torch.arange(int(offsets[-1])) + torch.repeat_interleave(start, lengths)
    ids = torch.randperm(vocabulary, generator=draws)[place % vocabulary].to(device)
    offsets = offsets.to(device)
    return Kept(SamplingMask(ids.int(), offsets), ids[offsets[:-1]].view(shape))


def lm_head(sizes: Sizes, width: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the LM head's weight, and labels; the logits are roughly normal, with standard deviation 3."""
    features, random = getattr(sizes, width), generator()
    like = {"dtype": dtype, "device": device}
    hidden = torch.empty(sizes.head_tokens, features, **like).normal_(generator=random)
    weight = torch.empty(sizes.vocabulary, features, **like).normal_(std=3 / features**0.5, generator=random)
    return hidden, weight, torch.randint(sizes.vocabulary, (sizes.head_tokens,), generator=random, device=device)


def entropies(*shape: int) -> torch.Tensor:
    """Random entropies: near 0 for most tokens, large for a few."""
    return 8 * torch.rand(shape, generator=generator(), device=device) ** 4


def advantages(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(), device=device)


def right_padded(sequences: int, tokens: int) -> torch.Tensor:
    """A mask [sequences, tokens] of completions of different lengths; half of the positions are padding."""
    lengths = (torch.arange(sequences, device=device) + 0.5) * tokens / sequences
    return torch.arange(tokens, device=device) < lengths.round().unsqueeze(1)
