"""prime-rl: the algorithm "d3s", which is GRPO on the rollouts that D3S keeps of each group.

prime-rl takes an algorithm as a class in its code ("Authoring an Algorithm" in its docs/algorithms.md). Copy this file
to ``src/prime_rl/orchestrator/algo/d3s.py``, and add a configuration to ``prime_rl.configs.algorithm``::

    class D3SAlgoConfig(GRPOAlgoConfig):
        type: Literal["d3s"] = "d3s"
        selection: dict[str, Any] = {}  # options of d3s_kernels.Selection
        steps: int | None = None  # of the training; needed if the number of rollouts changes

Add this class to the union ``AlgoConfig`` there too, and ``"d3s": D3SAlgorithm`` to ``ALGORITHM_CLASSES`` in
``prime_rl.orchestrator.algo``. A run uses the algorithm with::

    [orchestrator.algo]
    type = "d3s"
    steps = 500  # max_steps

    [orchestrator.algo.selection]
    rollout_scope = "group"
    rollouts_start = 0.25
    rollouts_end = 1.0

Keep ``orchestrator.train.filter_zero_advantages`` on, which is prime-rl's default: dropped rollouts have the advantage
0, and the filter leaves them out before they are sent to the trainer. torch is imported where it is needed, since
prime-rl also imports algorithms in processes without it. The signatures were read at 559b447, 2026-08-21.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prime_rl.orchestrator.algo.base import iter_trainable_traces
from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
from prime_rl.orchestrator.algo.routing import assign_advantages
from prime_rl.orchestrator.utils import train_work

if TYPE_CHECKING:
    import d3s_kernels as d3s

SECTION = "algo.selection."
TAKEN = ("rollouts_start", "rollouts_end", "schedule_shape", "rollout_rule", "rollout_scope", "advantages_from")


def selection_of(config: Any) -> d3s.Selection:
    """The selection that a ``D3SAlgoConfig`` asks for.

    Raises:
        ValueError: a bad option, or one that prime-rl cannot follow; ends that differ without ``steps``. The message
            names it.
    """
    import d3s_kernels as d3s

    for name, value in config.selection.items():
        if name not in TAKEN:
            takes = ", ".join(SECTION + each for each in TAKEN)
            raise ValueError(f"{SECTION}{name}: got {value!r}, but only rollouts are chosen in prime-rl; takes {takes}")
    selection = d3s.Selection.from_mapping(config.selection, SECTION)
    options = selection.options
    if options.rollout_scope != "group":
        raise ValueError(
            f"{SECTION}rollout_scope: got {options.rollout_scope!r}; takes 'group', because prime-rl scores each group "
            "alone"
        )
    if config.steps is not None and config.steps < 1:
        raise ValueError(f"algo.steps: got {config.steps}; takes a number of steps, at least 1")
    if config.steps is None and options.rollouts_start != options.rollouts_end:
        raise ValueError(
            f"{SECTION}rollouts_end: got {options.rollouts_end} with rollouts_start {options.rollouts_start} and no "
            f"algo.steps; takes {options.rollouts_start}, or algo.steps, the number of training steps"
        )
    return selection


class D3SAlgorithm(GRPOAlgorithm):
    """GRPO that trains on the kept rollouts of each group. MaxRLAlgorithm, as the base, gives MaxRL likewise.

    Args:
        config: a ``D3SAlgoConfig``.
        policy_pool: as for every algorithm of prime-rl.

    Raises:
        ValueError: as :func:`selection_of`.
    """

    def __init__(self, config: Any, policy_pool: Any) -> None:
        super().__init__(config, policy_pool)
        self.selection, self.steps = selection_of(config), config.steps

    def progress(self, episodes: list[Any]) -> float:
        """The share of training that is done: from the policy's version with which this group was begun."""
        import d3s_kernels as d3s

        return d3s.progress_of(train_work(episodes[0]).policy.start, self.steps or 0)

    async def score_group(self, episodes: list[Any]) -> None:
        """Assigns GRPO's advantages, and then 0 to the rollouts that are not kept."""
        import torch

        await super().score_group(episodes)
        traces = [trace for _, trace in iter_trainable_traces(episodes)]
        of_tokens = [[value for node in trace.nodes for value in node.advantages or ()] for trace in traces]
        if any(len(set(values)) != 1 for values in of_tokens):
            raise ValueError("advantages: got different ones for the tokens of a rollout; takes one for each rollout")
        advantages = torch.tensor([[values[0] for values in of_tokens]])
        kept = self.selection.rollouts(advantages, self.progress(episodes))
        weights = self.selection.advantages(advantages, kept, scale="none").where(kept, 0.0)
        for trace, weight in zip(traces, weights[0].tolist(), strict=True):
            assign_advantages(trace, weight)
