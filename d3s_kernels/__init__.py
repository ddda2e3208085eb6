"""The selection step of GRPO-style reinforcement learning, as exact, deterministic torch ops."""

from ._build import build_info
from ._dispatch.backends import backends
from ._dispatch.faults import synchronize_checks
from ._own_logits import UnsupportedHead
from .compare import Comparison, Difference, compare
from .heads import lm_head
from .micro_batches import MicroBatch, micro_batches
from .page import selection_page
from .planning import EVERY_PHASE, NOT_TRAINED, PlanSampler, RolloutPlan, load_profile, plan_rollouts
from .prefixes import Prefixes, random_prefixes
from .ratios import adaptive_clip, entropy_groups, importance_ratio
from .rollouts import group_advantages, groups_without_spread, max_variance_select, select_rollouts, variance_mass
from .sampling import SamplingMask
from .sampling_rules import sampling_mask_from_logits
from .schedule import Budget, DownSamplingSchedule, progress_of
from .selection import Selection
from .selection_options import SelectionOptions
from .shared_tokens import shared_tokens
from .tokens import TokenSelection, compact, select_tokens, select_tokens_from_logits, topk_mask
from .trust import TrustedTokens, trusted_tokens
from .vocabulary import entropy, linear_logprob_entropy, logprob_entropy

__version__: str = build_info()["version"]

__all__ = [
    "EVERY_PHASE",
    "NOT_TRAINED",
    "Budget",
    "Comparison",
    "Difference",
    "DownSamplingSchedule",
    "MicroBatch",
    "PlanSampler",
    "Prefixes",
    "RolloutPlan",
    "SamplingMask",
    "Selection",
    "SelectionOptions",
    "TokenSelection",
    "TrustedTokens",
    "UnsupportedHead",
    "adaptive_clip",
    "backends",
    "build_info",
    "compact",
    "compare",
    "entropy",
    "entropy_groups",
    "group_advantages",
    "groups_without_spread",
    "importance_ratio",
    "linear_logprob_entropy",
    "lm_head",
    "load_profile",
    "logprob_entropy",
    "max_variance_select",
    "micro_batches",
    "plan_rollouts",
    "progress_of",
    "random_prefixes",
    "sampling_mask_from_logits",
    "select_rollouts",
    "select_tokens",
    "select_tokens_from_logits",
    "selection_page",
    "shared_tokens",
    "synchronize_checks",
    "topk_mask",
    "trusted_tokens",
    "variance_mass",
]
