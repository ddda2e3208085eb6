"""TRL's ``GRPOConfig`` with the options of D3S."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trl import GRPOConfig

from ...off_policy.trusted_tokens import weighs
from ...selection.loss_weights import DENOMINATORS
from ...selection.options import (
    ALPHA,
    FLAG,
    QUANTILES,
    SelectionOptions,
    check_options,
    one_of,
    option,
    require_mode,
    whole,
)
from ...selection.schedule import DownSamplingSchedule
from ...selection.selection import Selection
from .._head_options import HeadOptions
from .._transformers import check_token_options, imply_from_quantile, imply_keep_all

ESPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")  # they clip as PPO does; each token may have its own clip range
# Options of transformers' generation that exclude ids from sampling, each with the values that exclude no id.
_CUTS: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0), "top_h": (None, 1.0), "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0, 1.0), "eta_cutoff": (None, 0.0, 1.0),
}  # fmt: skip
# The other options that generation_kwargs may have. They change no probability.
_HARMLESS = {
    "max_new_tokens", "max_time", "eos_token_id", "pad_token_id", "bos_token_id", "stop_strings", "use_cache",
    "cache_implementation", "cache_config", "prefill_chunk_size", "compile_config",
}  # fmt: skip


@dataclass
class D3SConfig(SelectionOptions, HeadOptions, GRPOConfig):  # type: ignore[misc]  # TRL has no types
    """``GRPOConfig`` with the options of D3S (arXiv 2509.22115), which also work on the command line and in YAML.

    If ``top_entropy_quantile`` is below 1, its value is the share of tokens that every step keeps, and
    ``token_rule="entropy"`` and ``loss_denominator="all"`` are set. ``docs/trl.md`` lists the differences from TRL's
    mask.

    Raises:
        ValueError: an option has a bad value; ``top_entropy_quantile`` is combined with another choice of tokens; the
            rule "entropy_quantile" is used with several processes, each of which would use its own quantile; importance
            ratios of entropy groups are used with a loss that does not clip them; ``sampling_mask`` is on, but
            generation excludes no id, or the sets of the remaining ids cannot be recorded.

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
    order_rows: Literal["auto", "work", "none"] = option(
        "auto",
        "'work': order the rows of each optimizer step by length, divide them into micro-batches of equal work instead "
        "of equal numbers of rows, and cut each to its own columns. 'auto': as 'work' where this changes the gradient "
        "by rounding alone; elsewhere TRL's rows, each micro-batch cut to its own columns. 'none': TRL's rows and "
        "columns.",
        one_of("auto", "work", "none"),
    )
    keep_all: bool = option(
        False,
        "Train on all rollouts and all tokens: GRPOTrainer's gradient, in less time where lengths differ.",
        FLAG,
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
        imply_keep_all(self)
        imply_from_quantile(self)
        super().__post_init__()
        check_options(self)
        if self.loss_type not in DENOMINATORS:
            raise ValueError(f"loss_type: got {self.loss_type!r}; takes {' or '.join(map(repr, sorted(DENOMINATORS)))}")
        if self.importance_sampling_level == "entropy_group" and self.loss_type not in ESPO_LOSSES:
            raise ValueError(
                f"loss_type: got {self.loss_type!r} with importance_sampling_level 'entropy_group'; takes "
                f"{' or '.join(map(repr, ESPO_LOSSES))}"
            )
        if self.importance_sampling_level != "entropy_group":
            of_espo = "espo_quantiles", "espo_alpha", "espo_denominator"
            require_mode(self, "importance_sampling_level='entropy_group'", of_espo)
        if not self.sampling_mask:
            require_mode(self, "sampling_mask=True", ["max_kept"])
        check_token_options(self)
        if self.token_rule == "prefix" and self.entropy_from != "auto":
            raise ValueError(f"entropy_from: got {self.entropy_from!r} with token_rule 'prefix'; takes 'auto'")
        rule = self.off_policy_rule
        if rule != "none" and self.entropy_from == "update":  # the rule is applied before the update
            raise ValueError(f"entropy_from: got 'update' with off_policy_rule {rule!r}; takes 'auto' or 'rollout'")
        if self.use_vllm and self.vllm_importance_sampling_correction and weighs(rule):
            raise ValueError(
                f"vllm_importance_sampling_correction: got True with off_policy_rule {rule!r}, whose weights are the "
                "same ratios; takes False, or a rule without weights"
            )
        for name, takes in (
            ("scale_rewards", ("group", "none")),  # otherwise a group's advantages depend on other groups
            ("multi_objective_aggregation", ("sum_then_normalize",)),
        ):
            if self.refill and (value := getattr(self, name)) not in takes:
                raise ValueError(f"{name}: got {value!r} with refill; takes {' or '.join(map(repr, takes))}")
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if self.refill and self.world_size > 1 and rows % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size: got {self.per_device_train_batch_size} with {self.steps_per_generation} "
                f"steps per generation and refill; takes whole groups of {self.num_generations} on each process"
            )
        if self.sampling_mask:
            self._require_sampled_sets()

    def _require_sampled_sets(self) -> None:
        """Raises a ValueError if generation excludes no id, or if the sets of the remaining ids cannot be recorded."""
        refused = {
            "use_vllm": (False, "vLLM returns the sets from 0.28 on, but TRL hands on ids and log-probabilities alone"),
            "use_transformers_continuous_batching": (
                False, "generate_batch takes no processors, which record the sets",
            ),
            "repetition_penalty": (1.0, "it changes scores, and the sets do not record that"),
        }  # fmt: skip
        for name, (takes, reason) in refused.items():
            if (value := getattr(self, name)) != takes:
                raise ValueError(f"{name}: got {value!r} with sampling_mask; takes {takes!r}: {reason}")
        generation: dict[str, Any] = self.generation_kwargs or {}
        for name in generation:
            if name not in _CUTS and name not in _HARMLESS:
                raise ValueError(
                    f"generation_kwargs: got {name!r} with sampling_mask; takes {', '.join(sorted(_CUTS))}, which "
                    f"leave tokens out, and what changes no probability: {', '.join(sorted(_HARMLESS))}"
                )
        if all(generation.get(name, getattr(self, name, None)) in values for name, values in _CUTS.items()):
            raise ValueError(
                f"sampling_mask: got True with top_p {self.top_p}, top_k {self.top_k} and min_p {self.min_p}, which "
                "leave no token out; takes top_p below 1, top_k above 0 or min_p above 0"
            )

    def schedule(self) -> DownSamplingSchedule:
        """Returns the schedule of the trainer's budget, with rollouts as counts, not as shares."""
        return Selection(self).schedule(self.num_generations)
