"""D3S for verl (tested with 0.9.1): a trainer mode, a policy loss, and :func:`select` for loops of your own.

The trainer mode ``d3s_sync`` is in :mod:`.trainer`, the policy loss ``d3s`` in :mod:`.loss`; verl loads both by itself,
through :mod:`.plugin`. What can be imported from here does not need verl. ``docs/verl.md`` has the lines to type.
"""

from .options import D3SOptions
from .rows import select

__all__ = ["D3SOptions", "select"]
