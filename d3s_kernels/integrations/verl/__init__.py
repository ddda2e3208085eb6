"""D3S for verl 0.9.1: the trainer mode ``d3s_sync`` (:mod:`.trainer`), and the policy losses ``d3s`` and ``espo``
(:mod:`.loss`). verl loads them through :mod:`.plugin`; ``docs/verl.md`` has the commands.
"""

from .options import D3SOptions, PolicyLossOptions

__all__ = ["D3SOptions", "PolicyLossOptions"]
