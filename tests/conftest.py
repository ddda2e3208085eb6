"""Every run draws its inputs afresh; a failure says how to draw the same again."""

import os
import secrets

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

# Two threads wherever the tests run, so that the parallel paths are taken and results compare between machines.
torch.set_num_threads(2)


class TorchRandom:
    """So that hypothesis can draw the same again when it shrinks what failed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps no reference
register_random(TORCH_RANDOM)
settings.register_profile(
    "d3s",
    max_examples=int(os.environ.get("D3S_TEST_EXAMPLES", "60")),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("d3s")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simd: run again for each SIMD level by test_simd_levels.py")


@pytest.fixture(autouse=True)
def fresh_randomness() -> None:
    seed = int(os.environ.get("D3S_TEST_SEED", secrets.randbits(32)))
    torch.manual_seed(seed)
    print(f"D3S_TEST_SEED={seed} draws the same inputs again")  # pytest shows it where a test fails
