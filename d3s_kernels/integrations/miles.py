"""miles: the functions of :mod:`d3s_kernels.integrations.slime`, with what is assumed about miles."""

from .slime.hooks import Hooks
from .slime.trainers import TRAINERS

__all__ = ["has_spread", "keep_rollouts", "post_process_rewards", "start_step", "token_loss"]

_hooks = Hooks(TRAINERS["miles"])
keep_rollouts = _hooks.keep_rollouts
post_process_rewards = _hooks.post_process_rewards
has_spread = _hooks.has_spread
token_loss = _hooks.token_loss
start_step = _hooks.start_step
