"""What a trainer calls: ``Selection`` with its options, schedule, metrics and weights of the loss. Imports
``_arguments``, ``_collectives``, ``_rules``, ``distributed``, ``off_policy``, ``rollouts`` and ``tokens``.
"""

from .options import SelectionOptions
from .selection import Selection, choose_rollouts, in_groups

__all__ = ["Selection", "SelectionOptions", "choose_rollouts", "in_groups"]
