"""What the tests of the trainer share as fixtures."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the policy, from which TRL also loads the reference policy."""
    from tiny_trl import model  # only where there is TRL

    folder = str(tmp_path_factory.mktemp("policy"))
    model().save_pretrained(folder)
    return folder
