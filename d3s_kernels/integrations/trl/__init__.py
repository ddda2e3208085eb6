"""D3S in TRL: :class:`D3STrainer` replaces ``GRPOTrainer``, :class:`D3SConfig` replaces ``GRPOConfig``.

TRL computes the loss. Rollouts are chosen between TRL's generation and TRL's update. Tokens are chosen either before
the update, or in the update when TRL scores them. TRL still gets the log-probabilities of all tokens, so ratios,
clipping and KL do not change. But gradient flows only through the kept tokens, so the LM head's backward computes only
the rows of these tokens.
"""

import trl

from .._versions import untested

if (_wrong := untested("trl", trl.__version__, "1.15", "1.17", "tests/trainers")) is not None:
    raise ImportError(_wrong)

from ..._own_logits import UnsupportedHead
from .config import D3SConfig
from .scoring import UnknownTRL
from .trainer import D3STrainer

__all__ = ["D3SConfig", "D3STrainer", "UnknownTRL", "UnsupportedHead"]
