"""The selection step of GRPO-style reinforcement learning, as exact, deterministic torch ops."""

from ._dispatch.backends import backends
from ._dispatch.build import build_info
from ._dispatch.faults import synchronize_checks
from ._lm_head.from_model import lm_head
from ._lm_head.own_logits import UnsupportedHead
from ._lm_head.token_logprobs import TokenLogprobs
from .check.compare import Comparison, Difference, compare
from .logprobs.logprob_entropy import entropy, linear_logprob_entropy, logprob_entropy
from .logprobs.token_logprobs import linear_token_logprobs, token_logprobs
from .logprobs.topk_logprobs import TopkLogprobs, linear_topk_logprobs, topk_logprobs
from .off_policy.importance_ratio import adaptive_clip, entropy_groups, importance_ratio
from .off_policy.trusted_tokens import TrustedTokens, trusted_tokens
from .planning import EVERY_PHASE, NOT_TRAINED, PlanSampler, RolloutPlan, load_profile, plan_rollouts
from .report.selection_page import selection_page
from .rollouts.micro_batches import MicroBatch, micro_batches
from .rollouts.select_rollouts import (
    group_advantages,
    groups_without_spread,
    max_variance_select,
    select_rollouts,
    variance_mass,
)
from .selection.options import SelectionOptions
from .selection.schedule import Budget, DownSamplingSchedule, progress_of
from .selection.selection import Selection
from .support.from_logits import sampling_mask_from_logits
from .support.sampling_mask import SamplingMask
from .tokens.random_prefixes import Prefixes, random_prefixes
from .tokens.select_tokens import TokenSelection, compact, select_tokens, select_tokens_from_logits, topk_mask
from .tokens.shared_tokens import shared_tokens

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
    "TokenLogprobs",
    "TokenSelection",
    "TopkLogprobs",
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
    "linear_token_logprobs",
    "linear_topk_logprobs",
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
    "token_logprobs",
    "topk_logprobs",
    "topk_mask",
    "trusted_tokens",
    "variance_mass",
]
