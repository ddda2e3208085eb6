"""What a trainer calls: ``Selection`` with its options, schedule, metrics and weights of the loss. Imports
``_arguments``, ``_collectives``, ``_rules``, ``distributed``, ``off_policy``, ``rollouts`` and ``tokens``.
"""

from .options import SelectionOptions
from .rollouts import choose_rollouts
from .selection import Selection, in_groups

__all__ = ["Selection", "SelectionOptions", "choose_rollouts", "in_groups"]
