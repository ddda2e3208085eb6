"""TRL's ``AsyncGRPOConfig`` with the options of D3S."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.async_grpo import AsyncGRPOConfig

from ...selection.options import FLAG, SelectionOptions, Takes, check_options, option, rollouts_of, whole
from .._head_options import HeadOptions
from .._transformers import check_token_options, imply, imply_keep_all

_GROUPS = Takes(lambda value: value is None or whole(1).fits(value), f"{whole(1).words}, or None")


@dataclass
class D3SAsyncGRPOConfig(SelectionOptions, HeadOptions, AsyncGRPOConfig):  # type: ignore[misc]  # TRL has no types
    """``AsyncGRPOConfig`` with the options of D3S (arXiv 2509.22115). ``docs/async.md`` explains them.

    Raises:
        ValueError: an option has a bad value; the rule "entropy_quantile" is used with several processes; with
            ``token_budget`` 0, a window is so large that its last rollouts would be older than ``max_staleness`` when
            they are trained on.

    Example:
        >>> from d3s_kernels.integrations.trl import D3SAsyncGRPOConfig
        >>> config = D3SAsyncGRPOConfig("out", per_device_train_batch_size=32, use_cpu=True, bf16=False)
        >>> config.groups_of_window(kept=2), config.groups_of_window(kept=8)  # at the start and at the end
        (16, 4)
    """

    keep_all: bool = option(
        False, "Train on all rollouts and all tokens, as AsyncGRPOTrainer does, with our LM head.", FLAG
    )
    window_groups: int | None = option(
        None,
        "From how many groups the rollouts are chosen at a time. None: as many as make an optimizer step: its samples, "
        "per_device_train_batch_size x gradient_accumulation_steps x processes, / the rollouts that each group keeps.",
        _GROUPS,
    )

    def __post_init__(self) -> None:
        imply_keep_all(self)
        if self.keep_all is True:
            imply(self, "keep_all", {"window_groups": None})
        super().__post_init__()
        check_options(self)
        check_token_options(self)
        kept = max(rollouts_of(end, self.num_generations) for end in (self.rollouts_start, self.rollouts_end))
        most = self.samples_of_step() * (self.max_staleness + 1) * self.weight_sync_steps // kept
        fixed_number = self.token_budget is not None and self.token_budget <= 0  # of a micro-batch's samples
        if fixed_number and self.window_groups is not None and self.window_groups > max(1, most):
            raise ValueError(
                f"window_groups: got {self.window_groups}; takes at most {max(1, most)}: up to {kept} rollouts of a "
                f"group are kept, and a step trains on {self.samples_of_step()}, so that later ones would be older "
                f"than max_staleness, {self.max_staleness}"
            )

    def samples_of_step(self) -> int:
        """Returns the number of samples of an optimizer step, as TRL counts them."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size)

    def groups_of_window(self, kept: int) -> int:
        """Returns the number of groups of a window if each group keeps ``kept`` rollouts."""
        return self.window_groups or -(-self.samples_of_step() // kept)
