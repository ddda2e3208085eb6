"""The versions of a trainer that the tests cover: the integrations override private methods, which change any time."""

from __future__ import annotations

import os
import warnings

from packaging.version import Version


def untested(package: str, found: str, oldest: str, before: str, tests: str) -> str | None:
    """What is wrong with this version of a trainer, and the way out; None if the tests cover it, or if the user has
    said that it may be tried, with a warning. ``tests`` is the folder of the tests.
    """
    if Version(oldest) <= Version(found) and Version(found).release < Version(before).release:
        return None
    message = f"d3s_kernels: found {package} {found}; takes {package}>={oldest},<{before}, which the tests cover"
    variable = f"D3S_{package.rpartition('-')[2].upper()}_UNTESTED"
    if os.environ.get(variable) != "1":
        return f"{message}. To try it nevertheless, run {tests} of a clone with it, then set {variable}=1"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    return None
