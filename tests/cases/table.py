"""The table of ops: each op of ``csrc/ops`` once, how its arguments are drawn, its exact results, and the
allowed errors. ``FUNCTIONS`` is the same for the public functions, of which most are one op, and some several.

``tests/test_table.py``, the fuzzer, torch's opcheck, the emulated and the GPU suites, and both sanitizer runs each run
all ops of the table that they can run. A test fails if an op is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from d3s_kernels.check import tolerances

from . import head as head  # each file puts its ops into the table
from . import logprobs, rollouts, tokens
from . import ratios as ratios
from . import token_logprobs as token_logprobs
from . import topk_logprobs as topk_logprobs
from .draw import Draw
from .meaning import public_arguments
from .row import OPS as OPS
from .row import Arguments, DrawArguments, Row

# Ops over the ranks of a process group: tests/test_vocab_parallel.py draws their arguments.
OF_RANKS = ("vocab_parallel_logprob_entropy", "vocab_parallel_support_logprob_entropy")


def _public(name: str, draw_some: DrawArguments, draw: Draw) -> Arguments:
    return public_arguments(name, draw_some(draw))


# What draws the arguments of public functions; of one that is not listed, they are those of the op of the same name.
_DRAWN: Mapping[str, DrawArguments] = {
    "entropy": logprobs.rows_of_logits,
    "logprob_entropy": lambda draw: logprobs.with_labels(draw, logprobs.rows_of_logits(draw)),
    "group_advantages": lambda draw: rollouts.whole_rewards(draw, rollouts.group_advantages(draw)),
    "groups_without_spread": lambda draw: rollouts.whole_rewards(draw, rollouts.group_advantages(draw)),
    "variance_mass": lambda draw: rollouts.whole_rewards(draw, rollouts.group_advantages(draw)),
    "select_tokens": tokens.token_rules,
    "random_prefixes": tokens.random_prefixes,
    "select_rollouts": rollouts.rollout_rules,
    "shared_tokens": tokens.shared_tokens,
}
if forgotten := tolerances.FUNCTIONS.keys() - OPS.keys() - _DRAWN.keys():
    raise AssertionError(f"nothing in tests/cases draws the arguments of {', '.join(sorted(forgotten))}")
FUNCTIONS = {
    name: Row(**vars(row), draw=partial(_public, name, _DRAWN.get(name) or OPS[name].draw))
    for name, row in tolerances.FUNCTIONS.items()
}
