"""The options of D3S, added to TRL's own."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from ...schedule import DownSamplingSchedule
from .._options import check_options, schedule_of

ESPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")  # with PPO's clipping; its range may differ by token


@dataclass
class D3SConfig(GRPOConfig):  # type: ignore[misc]  # TRL has no types
    """``GRPOConfig`` with the options of D3S (arXiv 2509.22115). They can also be set on the command line, like
    ``GRPOConfig``'s own.

    Raises:
        ValueError: an option with a bad value; ``top_entropy_quantile`` below 1, which would choose tokens a second
            time; importance ratios of entropy groups with a loss that does not clip them.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SConfig
        >>> config = D3SConfig("out", num_generations=8, rollouts_start=2, rollouts_end=8, use_cpu=True, bf16=False)
        >>> config.token_ratio_start, config.token_ratio_end, config.rollout_scope
        (0.05, 0.2, 'batch')
    """

    rollouts_start: int = field(
        default=8,
        metadata={
            "help": "Rollouts of each group that are trained on at the start; clamped to [2, num_generations]. "
            "Altogether they are rounded up to a multiple of processes x steps per generation, so that a small "
            "per_device_train_batch_size leaves little to drop."
        },
    )
    rollouts_end: int = field(
        default=32, metadata={"help": "Rollouts of each group that are trained on at the end; clamped likewise."}
    )
    token_ratio_start: float = field(
        default=0.05, metadata={"help": "Share of the kept rollouts' tokens that gets a gradient at the start."}
    )
    token_ratio_end: float = field(
        default=0.20, metadata={"help": "Share of the kept rollouts' tokens that gets a gradient at the end."}
    )
    schedule_shape: str = field(
        default="linear",
        metadata={
            "help": "The way from start to end; 'linear' is the paper's.",
            "choices": ["linear", "cosine", "exponential"],
        },
    )
    rollout_scope: str = field(
        default="batch",
        metadata={
            "help": "'batch' pools all groups and keeps those rollouts whose advantages vary most (D3S); 'group' keeps "
            "the same number of each group (D3S-I, and the subset that PODS picks).",
            "choices": ["batch", "group"],
        },
    )
    token_scope: str = field(
        default="batch",
        metadata={
            "help": "'batch' ranks tokens by |advantage| x entropy over all sequences of all processes; 'sequence' "
            "keeps the share of each sequence.",
            "choices": ["batch", "sequence"],
        },
    )
    entropy_from: str = field(
        default="auto",
        metadata={
            "help": "Whose entropy chooses tokens. 'update': that of the training forward, micro-batch by micro-batch; "
            "no extra pass. 'rollout': that of a pass without gradient over the kept rollouts, for the whole "
            "generation batch; the training forward then skips what was dropped, where that leaves the gradient as it "
            "is. 'auto': as 'rollout' where the trainer makes such a pass anyway, for old log-probabilities, else "
            "'update'.",
            "choices": ["auto", "update", "rollout"],
        },
    )
    loss_denominator: str = field(
        default="kept",
        metadata={
            "help": "What gradients are averaged over: 'kept' tokens, which makes them larger by about 1 / the share "
            "kept (gradient clipping sees that, AdamW does not: mind max_grad_norm), or 'all' valid ones.",
            "choices": ["kept", "all"],
        },
    )
    drop_zeros: bool = field(
        default=False,
        metadata={"help": "Leave tokens of score 0 out as well, even if fewer than the share remain."},
    )
    advantages_from: str = field(
        default="all",
        metadata={
            "help": "'all': advantages are those of the whole group (D3S). 'kept': normalised anew over the kept "
            "rollouts of each group (PODS, with rollout_scope='group' and token ratios of 1).",
            "choices": ["all", "kept"],
        },
    )
    selection_page_steps: int = field(
        default=0,
        metadata={
            "help": "Every so many steps, write a page that shows the rollouts of a generation batch (at most 64), "
            "their tokens and which were kept, to output_dir/selection/, as soon as the whole batch was trained on. "
            "0: never."
        },
    )

    importance_sampling_level: str = field(
        default="token",
        metadata={
            "help": "What an importance ratio is taken over: a 'token', a 'sequence' (GSPO), or an 'entropy_group' of "
            "a sequence's tokens (ESPO), whose clip range is its own and replaces epsilon; for the losses grpo, bnpo, "
            "dr_grpo and dapo.",
            "choices": ["token", "sequence", "entropy_group"],
        },
    )
    espo_quantiles: list[float] = field(
        default_factory=lambda: [0.8],
        metadata={"help": "Where 'entropy_group' cuts a sequence's tokens into groups: 0.8 sets the top 20% apart."},
    )
    espo_alpha: float = field(
        default=0.02, metadata={"help": "The clip range of a group of the largest entropy there can be."}
    )
    espo_denominator: str = field(
        default="self",
        metadata={
            "help": "'self': a token's ratio is its group's. 'old': times the token's own, as ESPO prints it.",
            "choices": ["self", "old"],
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {field.name for field in fields(D3SConfig)} - {field.name for field in fields(GRPOConfig)}
        own.add("importance_sampling_level")  # TRL's option, with one more value here
        check_options({name: getattr(self, name) for name in sorted(own)})
        if self.importance_sampling_level == "entropy_group" and self.loss_type not in ESPO_LOSSES:
            raise ValueError(
                f"loss_type: got {self.loss_type!r} with importance_sampling_level 'entropy_group'; takes "
                f"{' or '.join(map(repr, ESPO_LOSSES))}"
            )
        if self.top_entropy_quantile < 1:
            raise ValueError(
                f"top_entropy_quantile: got {self.top_entropy_quantile}; D3S chooses tokens itself and takes 1.0 (its "
                "share is token_ratio_start to token_ratio_end)"
            )

    def schedule(self) -> DownSamplingSchedule:
        """The schedule of the budget of rollouts and tokens, for the trainer."""
        return schedule_of(self)
