"""The choice of the queries to train on: a profile of the initial policy, sGPO's plan, which is made from the profile,
and a sampler, which serves the plan.
"""

from .plan import EVERY_PHASE, NOT_TRAINED, RolloutPlan, plan_rollouts
from .profile import load_profile
from .sampler import PlanSampler

__all__ = ["EVERY_PHASE", "NOT_TRAINED", "PlanSampler", "RolloutPlan", "load_profile", "plan_rollouts"]
