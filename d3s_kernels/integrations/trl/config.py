"""The options of D3S, added to TRL's own."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trl import GRPOConfig

from ...denominators import DENOMINATORS
from ...schedule import DownSamplingSchedule
from ...selection import Selection
from ...selection_options import (
    ALPHA,
    FLAG,
    QUANTILES,
    SelectionOptions,
    check_options,
    check_token_rule,
    one_of,
    option,
    whole,
)
from ...trust import weighs
from .._options import check_one_process, choose_by_entropy
from .sampling_options import require_sampled_sets

ESPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")  # with PPO's clipping; its range may differ by token


@dataclass
class D3SConfig(SelectionOptions, GRPOConfig):  # type: ignore[misc]  # TRL has no types
    """``GRPOConfig`` with the options of D3S (arXiv 2509.22115). They can also be set on the command line and in YAML,
    like ``GRPOConfig``'s own.

    TRL's ``top_entropy_quantile`` below 1 sets ``token_rule="entropy"``, that share from start to end, and
    ``loss_denominator="all"``. ``docs/trl.md`` says what differs from TRL's mask.

    Raises:
        ValueError: an option with a bad value; ``top_entropy_quantile`` beside another choice of tokens; the rule
            "entropy_quantile" with several processes, since each would use its own quantile; importance ratios of
            entropy groups with a loss that does not clip them; ``sampling_mask`` if generation cuts no token, or if its
            sets cannot be recorded.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SConfig
        >>> config = D3SConfig("out", num_generations=8, rollouts_end=6, use_cpu=True, bf16=False)
        >>> config.schedule().start, config.schedule().end
        (Budget(rollouts=2, token_ratio=0.05), Budget(rollouts=6, token_ratio=0.2))
    """

    entropy_from: Literal["auto", "update", "rollout"] = option(
        "auto",
        "Whose entropy chooses tokens. 'update': that of the training forward, micro-batch by micro-batch; no extra "
        "pass. 'rollout': that of a pass without gradient over the kept rollouts, for the whole generation batch; the "
        "training forward then skips what was dropped, where that leaves the gradient as it is. 'auto': as 'rollout' "
        "where the trainer makes such a pass anyway, for old log-probabilities, else 'update'.",
        one_of("auto", "update", "rollout"),
    )
    selection_page_steps: int = option(
        0,
        "Every so many steps, write a page that shows the rollouts of a generation batch (at most 64), their tokens "
        "and which were kept, to output_dir/selection/, as soon as the whole batch was trained on. 0: never.",
        whole(0),
    )

    refill: int = option(
        0,
        "DAPO's dynamic sampling: at most so many times, generate for further prompts in place of those whose rewards "
        "are all equal. A group has to be whole on its process.",
        whole(0),
    )

    importance_sampling_level: Literal["token", "sequence", "entropy_group"] = option(
        "token",
        "What an importance ratio is taken over: a 'token', a 'sequence' (GSPO), or an 'entropy_group' of a sequence's "
        "tokens (ESPO), whose clip range is its own and replaces epsilon; for the losses grpo, bnpo, dr_grpo and dapo.",
        one_of("token", "sequence", "entropy_group"),
    )
    espo_quantiles: list[float] = option(
        [0.8], "Where 'entropy_group' cuts a sequence's tokens into groups: 0.8 sets the top fifth apart.", QUANTILES
    )
    espo_alpha: float = option(0.02, "The clip range of a group of the largest entropy there can be.", ALPHA)
    espo_denominator: Literal["self", "old"] = option(
        "self",
        "'self': a token's ratio is its group's. 'old': times the token's own, as ESPO prints it.",
        one_of("self", "old"),
    )

    sampling_mask: bool = option(
        False,
        "Record which tokens top_p, top_k or min_p left when each token was sampled, and take log-probabilities and "
        "entropies over these tokens alone: those of the distribution that was sampled.",
        FLAG,
    )
    max_kept: int = option(
        512,
        "With sampling_mask, the most tokens that a token may be sampled from. One that was sampled from more is an "
        "error; top_k bounds their number.",
        whole(1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)
        if self.loss_type not in DENOMINATORS:
            raise ValueError(f"loss_type: got {self.loss_type!r}; takes {' or '.join(map(repr, sorted(DENOMINATORS)))}")
        if self.importance_sampling_level == "entropy_group" and self.loss_type not in ESPO_LOSSES:
            raise ValueError(
                f"loss_type: got {self.loss_type!r} with importance_sampling_level 'entropy_group'; takes "
                f"{' or '.join(map(repr, ESPO_LOSSES))}"
            )
        if self.top_entropy_quantile < 1:
            choose_by_entropy(self, self.top_entropy_quantile)
        check_token_rule(self)
        check_one_process(self)
        rule, corrects = self.off_policy_rule, self.use_vllm and self.vllm_importance_sampling_correction
        if rule != "none" and self.entropy_from == "update":  # the choice would come too late
            raise ValueError(f"entropy_from: got 'update' with off_policy_rule {rule!r}; takes 'auto' or 'rollout'")
        if corrects and weighs(rule):
            raise ValueError(
                f"vllm_importance_sampling_correction: got True with off_policy_rule {rule!r}, whose weights are the "
                "same ratios; takes False, or a rule without weights"
            )
        if self.refill:
            self._require_refillable()
        if self.sampling_mask:
            require_sampled_sets(self)

    def _require_refillable(self) -> None:
        """Raises if ``refill`` cannot replace groups with these options."""
        rows = self.per_device_train_batch_size * self.steps_per_generation
        for name, given, takes in (
            ("scale_rewards", self.scale_rewards, ("group", "none")),  # else advantages depend on the other groups
            ("multi_objective_aggregation", self.multi_objective_aggregation, ("sum_then_normalize",)),
        ):
            if given not in takes:
                raise ValueError(f"{name}: got {given!r} with refill; takes {' or '.join(map(repr, takes))}")
        if self.world_size > 1 and rows % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size: got {self.per_device_train_batch_size} with {self.steps_per_generation} "
                f"steps per generation and refill; takes whole groups of {self.num_generations} on each process"
            )

    def schedule(self) -> DownSamplingSchedule:
        """The trainer's budget schedule. Its rollouts are numbers, not shares."""
        return Selection(self).schedule(self.num_generations)
