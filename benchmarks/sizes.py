"""The sizes of the inputs: the sizes of the targets, or small sizes for continuous integration."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    # Logits [sequences, tokens, vocabulary].
    sequences: int = 8
    tokens: int = 128
    vocabulary: int = 151_936
    # The LM head: tokens per call, and widths of the hidden states.
    head_tokens: int = 512
    narrow: int = 896
    wide: int = 3_584
    # Scores of tokens: a batch of sequences, and one segment.
    batch: tuple[int, int] = (512, 8_192)
    segment: int = 4 * 1024 * 1024
    # Rollouts: groups of which a few are kept, and one pool.
    groups: tuple[int, int] = (1_024, 64)
    keep: int = 16
    pool: int = 65_536
    pool_keep: int = 16_384
    # TRL's update: the number of rollouts, in groups of 8, and the most tokens of a rollout.
    rollouts: int = 16
    completion: int = 64
    # A contest with a bound has at least `rounds` rounds, the smallest number that gives a range (judging.py). After
    # that, each contest continues until `seconds` have passed, or until it has `most_rounds` rounds.
    rounds: int = 9
    most_rounds: int = 63
    seconds: float = 6.0


FULL = Sizes()
SHORT = Sizes(
    sequences=4,
    tokens=16,
    vocabulary=32_000,
    head_tokens=64,
    narrow=64,
    wide=256,
    batch=(32, 4_096),
    segment=256 * 1024,
    groups=(64, 64),
    pool=4_096,
    pool_keep=1_024,
    completion=16,
    rounds=3,
    most_rounds=21,
    seconds=0.5,
)
# A GPU needs larger inputs to be busy, and takes less time.
FULL_CUDA = replace(
    FULL, tokens=1_024, head_tokens=4_096, rollouts=32, completion=1_024, rounds=6, most_rounds=21, seconds=0.6
)
SHORT_CUDA = replace(SHORT, seconds=0.1)


def sizes_for(device: str, short: bool) -> Sizes:
    full, small = (FULL, SHORT) if device == "cpu" else (FULL_CUDA, SHORT_CUDA)
    return small if short else full


def rollouts(sizes: Sizes, vocabulary: int) -> str:
    return f"{sizes.rollouts} rollouts x {sizes.completion:,} tokens x {vocabulary:,}"
