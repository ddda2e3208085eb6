"""D3S in TRL: :class:`D3STrainer` replaces ``GRPOTrainer``, :class:`D3SConfig` replaces ``GRPOConfig``.

TRL computes its own loss; no loss is copied here. Rollouts are chosen between TRL's generation and its update. Tokens
are chosen when TRL scores them. TRL still gets the log-probabilities of all tokens, so ratios, clipping and KL do not
change. But gradient flows only through the kept tokens, so the LM head's backward computes only those.
"""

import warnings

import trl
from packaging.version import Version

_OLDEST, _NEWEST = "1.15", "1.16"


def _check_version(found: str) -> None:
    """Refuses older versions and warns about newer ones: the trainer overrides private methods of TRL."""
    if Version(found) < Version(_OLDEST):
        raise ImportError(
            f"d3s_kernels.integrations.trl: found TRL {found}; takes {_OLDEST} to {_NEWEST} (before {_OLDEST} its "
            "trainer scored tokens in another way)"
        )
    if Version(found).release[:2] > Version(_NEWEST).release:
        warnings.warn(
            f"d3s_kernels.integrations.trl: found TRL {found}; tested with {_OLDEST} to {_NEWEST}", stacklevel=3
        )


_check_version(trl.__version__)

from ..._own_logits import UnsupportedHead  # noqa: E402
from .config import D3SConfig  # noqa: E402  after the check, whose message is clearer
from .surface import UnknownTRL  # noqa: E402
from .trainer import D3STrainer  # noqa: E402

__all__ = ["D3SConfig", "D3STrainer", "UnknownTRL", "UnsupportedHead"]
