"""The forwards from logits as a processor runs them whose best instructions are AVX2.

`python -m benchmarks` runs this file in a process of its own, in which the library, torch's own loops and torch.compile
use no others, so that the yardstick is that of such a processor too.
"""

import os

import pytest

from .bench_logprob_entropy import compiled, labels, logits, size, test_entropy, test_forward  # noqa: F401
from .harness import Contest
from .targets import AVX2_ALONE, AVX2_ENVIRONMENT

if not os.environ.items() >= AVX2_ENVIRONMENT.items():
    pytest.skip("needs an environment with AVX2 alone", allow_module_level=True)


@pytest.fixture
def contest(contest: Contest) -> Contest:
    contest.name_ends = AVX2_ALONE
    return contest
