"""slime: D3S's two selections, as functions that its options take by their dotted path. Nothing of slime is imported.

============================================== ===============================================================
option                                         path
============================================== ===============================================================
--rollout-sample-filter-path                   d3s_kernels.integrations.slime.keep_rollouts
--custom-reward-post-process-path              d3s_kernels.integrations.slime.post_process_rewards
--dynamic-sampling-filter-path                 d3s_kernels.integrations.slime.has_spread
--custom-loss-function-path                    d3s_kernels.integrations.slime.token_loss
--custom-megatron-before-train-step-hook-path  d3s_kernels.integrations.slime.start_step
============================================== ===============================================================

For miles the paths begin with ``d3s_kernels.integrations.miles``. ``docs/trainers.md`` has the lines and the options.
"""

from .hooks import Hooks
from .options import D3SOptions
from .trainers import TRAINERS

__all__ = ["D3SOptions", "has_spread", "keep_rollouts", "post_process_rewards", "start_step", "token_loss"]

_hooks = Hooks(TRAINERS["slime"])
keep_rollouts = _hooks.keep_rollouts
post_process_rewards = _hooks.post_process_rewards
has_spread = _hooks.has_spread
token_loss = _hooks.token_loss
start_step = _hooks.start_step
