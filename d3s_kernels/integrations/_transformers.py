"""Code for all trainers that are built on transformers' ``Trainer``. It checks options, sums rewards, and finds the
processes and the budget of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..rollouts.select_rollouts import groups_without_spread
from ..selection.options import check_token_rule
from ..selection.schedule import Budget, progress_of
from ..selection.selection import Selection

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def imply(options: Any, option: str, implied: dict[str, Any]) -> None:
    """Sets the options that ``option`` implies. Raises a ValueError if one of them was set to another value."""
    for name, takes in implied.items():
        value = getattr(options, name)
        if value not in (getattr(type(options), name), takes):
            raise ValueError(
                f"{name}: got {value!r} beside {option}, which takes {takes!r}; for another choice leave out "
                f"{option.split()[0]}"
            )
        setattr(options, name, takes)


def imply_keep_all(options: Any) -> None:
    """Sets the options that ``keep_all`` implies. Call it before the options get their defaults.

    Raises:
        ValueError: one of them was set to another value.
    """
    if options.keep_all is True:
        everything = dict.fromkeys(("rollouts_start", "rollouts_end", "token_ratio_start", "token_ratio_end"), 1.0)
        others = {
            "drop_zeros": False, "off_policy_rule": "none", "token_rule": "advantage_entropy",
            "advantages_from": "all", "group_variance_mass": None, "drop_shared_tokens": False,
        }  # fmt: skip
        imply(options, "keep_all", everything | others)


def imply_from_quantile(options: Any) -> None:
    """Sets the options that ``top_entropy_quantile`` implies. Call it before the options get their defaults.

    Raises:
        ValueError: ``top_entropy_quantile`` is not above 0; or an option that it implies was set to another value.
    """
    share = options.top_entropy_quantile
    if share < 1:
        if not share > 0:
            raise ValueError(f"top_entropy_quantile: got {share}; takes a number above 0")
        implied = {
            "token_rule": "entropy", "token_ratio_start": share, "token_ratio_end": share, "token_scope": "batch",
            "drop_zeros": False, "loss_denominator": "all",
        }  # fmt: skip
        imply(options, f"top_entropy_quantile {share}", implied)


def check_token_options(options: Any, section: str = "") -> None:
    """Checks the options that choose tokens.

    Raises:
        ValueError: a token rule is used with an option that it does not support; or the rule "entropy_quantile" is used
            with several processes, each of which would use its own quantile.
    """
    check_token_rule(options, section)
    if options.token_rule == "entropy_quantile" and options.world_size > 1:
        raise ValueError(
            f"{section}token_rule: got 'entropy_quantile' with {options.world_size} processes; takes 'entropy', which "
            "keeps an exact share of the tokens of all processes"
        )


def total_rewards(by_function: Tensor, weights: Tensor) -> Tensor:
    """Returns each rollout's total reward: the weighted sum of the rewards ``by_function``, ``[rollouts, functions]``.
    NaN means that a function gave no reward; the sum skips NaN. If no function gave a reward, the total is NaN.
    """
    total = (by_function * weights.to(by_function.device)).nansum(dim=1)
    return total.masked_fill(by_function.isnan().all(dim=1), torch.nan)


def without_spread(by_function: Tensor, weights: Tensor, n: int, separately: bool) -> Tensor:
    """Marks the groups of ``n`` rollouts whose rewards are all equal. Returns bool ``[groups]``. ``separately`` means
    that each reward function has its own advantages. Then the rewards of every function must be equal; it is not enough
    that their sums are equal.
    """
    if separately:
        return groups_without_spread(by_function.view(-1, n, by_function.shape[1]).transpose(1, 2)).all(dim=1)
    return groups_without_spread(total_rewards(by_function, weights).view(-1, n))


class RunWithBudget:
    """A mixin that gives a trainer the processes and the budget of its run. In the list of base classes, the mixin must
    precede the trainer.
    """

    accelerator: Any
    args: Any
    state: Any
    num_generations: int
    _selection: Selection
    _draws: tuple[int, torch.Generator] | None = None  # the step, and the step's generator for the rule "random"

    @property
    def _process_group(self) -> ProcessGroup | None:
        """The process group of all processes. None for a single process, which does not use torch.distributed."""
        return torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None

    @property
    def _multiple(self) -> int:
        """The number of kept rows is a multiple of this number, so that micro-batches have the same size on all
        processes.
        """
        return int(self.accelerator.num_processes * self.args.steps_per_generation)

    @property
    def _progress(self) -> float:
        return progress_of(self.state.global_step, self.state.max_steps)

    def _budget(self) -> Budget:
        return self._selection.budget(self._progress, self.num_generations)

    def _draws_of_rollouts(self, own: Tensor) -> Tensor:
        """Returns a random number for each of this process's rollouts in ``own``. Each number depends on the run's
        seed, the step, and the place of the rollout among the rollouts of all processes. Every process has the same
        number of rollouts.
        """
        # This seed differs from the seed of _draws_of_step. Otherwise the number that decides whether a rollout is kept
        # could also decide where the rollout is cut.
        generator = torch.Generator().manual_seed(self.args.seed + 1_000_003 * self.state.global_step + 499_979)
        draws = torch.rand(self.accelerator.num_processes, len(own), dtype=torch.float64, generator=generator)
        return draws[self.accelerator.process_index].to(own.device)

    def _draws_of_step(self, device: torch.device) -> torch.Generator | None:
        """Returns the generator for the rule "random", or None for another rule. Its seed depends on the run's seed and
        the step. So the generator draws the same values on all processes, and draws the same values again after a
        resume.
        """
        step = self.state.global_step
        if self.args.rollout_rule != "random":
            return None
        if self._draws is None or self._draws[0] != step:
            self._draws = step, torch.Generator(device).manual_seed(self.args.seed + 1_000_003 * step)
        return self._draws[1]
