"""Ops for values that are spread over the ranks of a process group. Imports ``_arguments``, ``_collectives``,
``_dispatch``, ``_lm_head``, ``_rules``, ``_segments`` and ``support``.

The results are the same as on a single device that holds all values. The functions that need several ranks are imported
from here. Two of them balance the kept rows between ranks; the others compute log-probabilities for vocabulary
shards. The selection functions of ``d3s_kernels`` also work across ranks, with their argument
``process_group``.

``agreement`` has the checks before the first collective. Every rank takes part in every collective, even if it has no
values. The number of collectives depends only on information that all ranks have.
"""

from .logprobs import vocab_parallel_linear_logprob_entropy, vocab_parallel_logprob_entropy
from .plan_rows import RowPlan, exchange_rows, plan_rows
from .token_logprobs import vocab_parallel_linear_token_logprobs, vocab_parallel_token_logprobs

__all__ = [
    "RowPlan",
    "exchange_rows",
    "plan_rows",
    "vocab_parallel_linear_logprob_entropy",
    "vocab_parallel_linear_token_logprobs",
    "vocab_parallel_logprob_entropy",
    "vocab_parallel_token_logprobs",
]
