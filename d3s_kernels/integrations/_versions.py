"""Checks that the tests cover the installed version of a trainer. The integrations override private methods of the
trainer, which another version of the trainer may change.
"""

from __future__ import annotations

import os
import warnings

from packaging.version import Version


def untested(package: str, found: str, oldest: str, before: str, tests: str) -> str | None:
    """Returns an error message if ``found``, the installed version of ``package``, is untested, else None. If the user
    allows untested versions, the message becomes a warning, and the result is None. ``tests`` is the folder of the
    trainer's tests.
    """
    if Version(oldest) <= Version(found) and Version(found).release < Version(before).release:
        return None
    message = f"d3s_kernels: found {package} {found}; takes {package}>={oldest},<{before}, which the tests cover"
    variable = f"D3S_{package.removeprefix('ms-').removesuffix('-core').upper()}_UNTESTED"
    if os.environ.get(variable) != "1":
        return f"{message}. To try it nevertheless, run {tests} of a clone with it, then set {variable}=1"
    warnings.warn(message, RuntimeWarning, stacklevel=3)
    return None
