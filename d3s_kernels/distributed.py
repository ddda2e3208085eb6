"""Functions that need several ranks. Two of them balance the kept rows between ranks; two others compute
log-probabilities and entropies for vocabulary shards.

The selection functions of ``d3s_kernels`` also work across ranks, with their argument ``process_group``.
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
