"""A queue for the tests of the trainer. The ranks of all tests here have imported verl before they are started."""

from collections.abc import Iterator

import pytest
from ranks import PRELOADED

PRELOADED += ["verl"]


@pytest.fixture(scope="session")
def ray_with_a_queue() -> Iterator[None]:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def queue(ray_with_a_queue: None) -> Iterator[None]:
    """verl's storage, which is empty before and after a test."""
    import transfer_queue as tq

    yield
    for partition, keys in (tq.kv_list() or {}).items():
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)
