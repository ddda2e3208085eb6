"""Chooses the queries to train on: a profile of the initial policy, sGPO's plan from this profile, and a sampler.
Imports ``_arguments``.
"""

from .plan import EVERY_PHASE, NOT_TRAINED, RolloutPlan, plan_rollouts
from .profile import load_profile
from .sampler import PlanSampler

__all__ = ["EVERY_PHASE", "NOT_TRAINED", "PlanSampler", "RolloutPlan", "load_profile", "plan_rollouts"]
