"""The table of ops. It has each op of ``csrc/library.cpp`` once, with a function that draws the arguments, a function
that computes the exact results, and the allowed errors.

This table is used by ``tests/test_table.py``, the fuzzer, torch's opcheck, the emulated and the GPU suites, and both
sanitizer runs. Each of them runs all ops of the table that it can run. A test fails if an op is missing here.
``FUNCTIONS`` is a table of the public functions, with rows of the same kind. Most functions are one op; some consist of
several ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from d3s_kernels import _exact

from . import head as head  # each file puts its ops into the table
from . import ratios as ratios
from . import rollouts, tokens, vocabulary
from .draw import Draw
from .meaning import public_arguments
from .row import OPS as OPS
from .row import Arguments, DrawArguments, Row

# Ops over the ranks of a process group: tests/test_vocab_parallel.py draws their arguments.
OF_RANKS = ("vocab_parallel_logprob_entropy",)


def _public(name: str, draw_some: DrawArguments, draw: Draw) -> Arguments:
    return public_arguments(name, draw_some(draw))


# The functions that draw the arguments of public functions. A public function that is not listed here has the arguments
# of the op with the same name.
_DRAWN: Mapping[str, DrawArguments] = {
    "entropy": vocabulary.rows_of_logits,
    "logprob_entropy": lambda draw: vocabulary.with_labels(draw, vocabulary.rows_of_logits(draw)),
    "group_advantages": lambda draw: rollouts.whole_rewards(draw, rollouts.group_advantages(draw)),
    "groups_without_spread": lambda draw: rollouts.whole_rewards(draw, rollouts.group_advantages(draw)),
    "select_tokens": tokens.token_rules,
    "select_rollouts": rollouts.rollout_rules,
}
if forgotten := _exact.FUNCTIONS.keys() - OPS.keys() - _DRAWN.keys():
    raise AssertionError(f"nothing in tests/cases draws the arguments of {', '.join(sorted(forgotten))}")
FUNCTIONS = {
    name: Row(**vars(row), draw=partial(_public, name, _DRAWN.get(name) or OPS[name].draw))
    for name, row in _exact.FUNCTIONS.items()
}
