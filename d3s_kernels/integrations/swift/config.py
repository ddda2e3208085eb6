"""Adds the options of D3S to the options of ms-swift's GRPO, and refuses unsupported combinations.

ms-swift parses its command line before it imports plug-ins, so a plug-in cannot add options to the command line.
Instead, D3S's options are the entries of ``--model_kwargs`` whose names begin with ``d3s_``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift.rlhf_trainers import GRPOConfig

from ...off_policy.trusted_tokens import weighs
from ...selection.options import SelectionOptions, check_options, option_names
from .._transformers import check_token_options, imply_from_quantile

PREFIX = "d3s_"
LOSSES = ("grpo", "sapo", "bnpo", "dr_grpo", "dapo", "cispo")  # supported losses; DENOMINATORS has an entry for each


@dataclass
class D3SConfig(SelectionOptions, GRPOConfig):  # type: ignore[misc]  # ms-swift has no types
    """ms-swift's ``GRPOConfig`` with the options of D3S (arXiv 2509.22115), which are read from ``model_kwargs``."""

    model_kwargs: dict[str, Any] | None = None  # ms-swift passes the value of its own option of this name
    top_entropy_quantile: float = 1.0  # ms-swift has this option too, with the same default

    def __post_init__(self) -> None:
        known = option_names(SelectionOptions)
        for key, value in (self.model_kwargs or {}).items():
            name = key.removeprefix(PREFIX)
            if name != key and name in known:
                setattr(self, name, value)
            elif key.lower().startswith("d3s"):
                takes = ", ".join(PREFIX + name for name in known)
                raise ValueError(f"model_kwargs: got {key!r}, which is no option of D3S; takes {takes}")
        imply_from_quantile(self)
        super().__post_init__()
        check_options(self, PREFIX)
        check_token_options(self, PREFIX)
        self.top_entropy_quantile = 1.0  # otherwise ms-swift would mask tokens too
        self._refuse_what_is_not_covered()

    def _refuse_what_is_not_covered(self) -> None:
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type: got {self.loss_type!r}; takes {' or '.join(map(repr, LOSSES))}")
        if self.num_generations < 2:
            raise ValueError(f"num_generations: got {self.num_generations}; takes at least 2")
        refused = {
            "rollout_importance_sampling_mode": (
                weighs(self.off_policy_rule) and self.rollout_importance_sampling_mode,
                f"{PREFIX}off_policy_rule weighs by the same ratios",
            ),
            "use_liger_kernel": (self.use_liger_kernel, "its loss hands out no log-probabilities of tokens"),
            "kl_in_reward": (self.kl_in_reward and self.beta != 0, "advantages would need a forward of all rollouts"),
            "chord_sft_dataset": (self.chord_sft_dataset, "the choice covers no loss of other data"),
            "sdar_loss_coef": (self.sdar_loss_coef > 0, "the choice covers no loss of a teacher"),
            "advantage_reweight": (self.advantage_reweight, "advantages of tokens come after the choice of rollouts"),
            "off_policy_sequence_mask_delta": (
                self.off_policy_sequence_mask_delta is not None, "it leaves out rollouts after the choice",
            ),
            "log_entropy": (self.log_entropy and self.log_completions, "log_completions has dropped rollouts too"),
        }  # fmt: skip
        for name, (is_set, reason) in refused.items():
            if is_set:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, which D3S does not take: {reason}")
        if self.drop_shared_tokens:
            raise ValueError(f"{PREFIX}drop_shared_tokens: got True, which D3S does not take in ms-swift")
        if self.advantages_from == "kept" and (self.advantage_estimator != "grpo" or self.scale_rewards == "gdpo"):
            raise ValueError(
                f"{PREFIX}advantages_from: got 'kept' with advantage_estimator {self.advantage_estimator!r} and "
                f"scale_rewards {self.scale_rewards!r}; takes 'all', or 'grpo' without 'gdpo'"
            )
