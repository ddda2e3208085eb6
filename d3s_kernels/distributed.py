"""What only several ranks need: kept rows evened out between them, and a vocabulary that they share.

The selections themselves take ``process_group``.
"""

from ._across_ranks.plan_rows import RowPlan, exchange_rows, plan_rows
from ._across_ranks.vocabulary import vocab_parallel_linear_logprob_entropy, vocab_parallel_logprob_entropy

__all__ = [
    "RowPlan",
    "exchange_rows",
    "plan_rows",
    "vocab_parallel_linear_logprob_entropy",
    "vocab_parallel_logprob_entropy",
]
