"""NeMo-RL: exact entropies and a choice of tokens in its loss, and rollouts that its update leaves out."""

from .loss import D3SLoss
from .rollouts import keep_rollouts

__all__ = ["D3SLoss", "keep_rollouts"]
