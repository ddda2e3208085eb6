"""Which queries to train on: the plan of sGPO, the sampler that serves it, and the profile that it is made from."""

from .plan import EVERY_PHASE, NOT_TRAINED, RolloutPlan, plan_rollouts
from .profile import load_profile
from .sampler import PlanSampler

__all__ = ["EVERY_PHASE", "NOT_TRAINED", "PlanSampler", "RolloutPlan", "load_profile", "plan_rollouts"]
