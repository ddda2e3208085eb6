"""D3S for verl (tested with 0.9.1): a trainer mode, two policy losses, and :func:`select` for loops of your own.

The trainer mode ``d3s_sync`` is in :mod:`.trainer`. The policy losses ``d3s`` and ``espo`` are in :mod:`.loss` and
:mod:`.espo`. verl loads all three through :mod:`.plugin`. The names exported here can be used without verl.
``docs/verl.md`` has the commands.
"""

from .options import D3SOptions
from .rows import select

__all__ = ["D3SOptions", "select"]
