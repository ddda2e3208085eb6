"""D3S in TRL: :class:`D3STrainer` in the place of ``GRPOTrainer``, :class:`D3SConfig` in that of ``GRPOConfig``.

No loss is copied. Rollouts are chosen between TRL's generation and its update. Tokens are chosen as TRL scores them:
the log-probabilities that it gets are those of all tokens, so ratios, clipping and KL are what they were; but gradient
flows through the kept tokens alone, and so the LM head's backward costs only those.
"""

import warnings

import trl
from packaging.version import Version

_OLDEST, _NEWEST = "1.15", "1.16"


def _check_version(found: str) -> None:
    """The hooks are methods that TRL keeps to itself: other versions may have others."""
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

from .config import D3SConfig  # noqa: E402  not before the check, which has the clearer message
from .trainer import D3STrainer  # noqa: E402

__all__ = ["D3SConfig", "D3STrainer"]
