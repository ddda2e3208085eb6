"""D3S for verl (tested with 0.9.1): a trainer mode, two policy losses, and :func:`select` for loops of your own.

The trainer mode ``d3s_sync`` is in :mod:`.trainer`, the policy losses ``d3s`` and ``espo`` are in :mod:`.loss` and
:mod:`.espo`; verl loads them by itself, through :mod:`.plugin`. What can be imported from here does not need verl.
``docs/verl.md`` has the lines to type.
"""

from .options import D3SOptions
from .rows import select

__all__ = ["D3SOptions", "select"]
