"""D3S for verl 0.9.1: the trainer modes ``d3s_sync`` and others (:mod:`.trainer`), and the policy losses ``d3s`` and
``espo`` (:mod:`.loss`). The plug-in :mod:`.plugin` adds modes and losses to verl; ``docs/verl.md`` has the commands.
"""

from .options import D3SOptions, PolicyLossOptions

__all__ = ["D3SOptions", "PolicyLossOptions"]
