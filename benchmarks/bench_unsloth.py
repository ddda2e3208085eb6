"""Compares our LM head with Unsloth's. This file runs in a process of its own, since importing Unsloth changes other
packages.

Unsloth's users run it on a GPU, with Triton. On a CPU, the package is imported in a mode that Unsloth made for
downloading models without a GPU. The head then runs Unsloth's torch code for devices without Triton.
"""

import os

import pytest

from .bench_head import beside_unsloth
from .harness import Contest
from .sizes import Sizes
from .targets import UNSLOTH_ENVIRONMENT

if not os.environ.items() >= UNSLOTH_ENVIRONMENT.items():
    pytest.skip("needs an environment in which Unsloth can be imported without a GPU", allow_module_level=True)


def test_head(contest: Contest, sizes: Sizes) -> None:
    contest.strict = False  # a run must not fail because of a package that was made for GPUs
    beside_unsloth(contest, sizes)
