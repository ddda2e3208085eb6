"""The LM head for Megatron-Core 0.15 and 0.16: log-probabilities and entropies of the rows that count, with the
vocabulary over tensor-parallel ranks, with and without sequence parallelism.

This package can be imported without Megatron-Core. ``docs/megatron.md`` is its page.
"""

from .lm_head import LMHead
from .shard import shard_logprob_entropy

__all__ = ["LMHead", "shard_logprob_entropy"]
