"""A small model for the tests of ms-swift."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_swift import make_model

    made: Path = tmp_path_factory.mktemp("swift")
    make_model(made)
    return made
