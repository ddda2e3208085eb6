"""D3S in TRL: :class:`D3STrainer` replaces ``GRPOTrainer``, :class:`D3SConfig` replaces ``GRPOConfig``.

TRL computes its own loss; no loss is copied here. Rollouts are chosen between TRL's generation and its update. Tokens
are chosen when TRL scores them. TRL still gets the log-probabilities of all tokens, so ratios, clipping and KL do not
change. But gradient flows only through the kept tokens, so the LM head's backward computes only those.
"""

import os
import warnings

import trl
from packaging.version import Version

_OLDEST, _BEFORE = "1.15", "1.17"


def _check_version(found: str) -> None:
    """Refuses versions that the tests do not cover: the trainer overrides private methods of TRL."""
    if Version(_OLDEST) <= Version(found) and Version(found).release[:2] < Version(_BEFORE).release:
        return
    message = f"d3s_kernels.integrations.trl: found TRL {found}; takes trl>={_OLDEST},<{_BEFORE}, which the tests cover"
    if os.environ.get("D3S_TRL_UNTESTED") != "1":
        raise ImportError(
            f"{message}. To try it nevertheless, run tests/trainers of a clone with it, then set D3S_TRL_UNTESTED=1"
        )
    warnings.warn(message, stacklevel=3)


_check_version(trl.__version__)

from ..._own_logits import UnsupportedHead  # noqa: E402
from .config import D3SConfig  # noqa: E402  after the check, whose message is clearer
from .surface import UnknownTRL  # noqa: E402
from .trainer import D3STrainer  # noqa: E402

__all__ = ["D3SConfig", "D3STrainer", "UnknownTRL", "UnsupportedHead"]
