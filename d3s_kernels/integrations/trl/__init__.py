"""D3S in TRL: :class:`D3STrainer` replaces ``GRPOTrainer``, :class:`D3SConfig` replaces ``GRPOConfig``.

TRL computes the loss. Rollouts are chosen between TRL's generation and TRL's update. Tokens are chosen either before
the update, or in the update when TRL scores them. TRL still gets the log-probabilities of all tokens, so ratios,
clipping and KL do not change. But gradient flows only through the kept tokens, so the LM head's backward computes only
the rows of these tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import trl

from .._versions import untested

if (_wrong := untested("trl", trl.__version__, "1.15", "1.17", "tests/trainers")) is not None:
    raise ImportError(_wrong)

from ..._lm_head.own_logits import UnsupportedHead
from .config import D3SConfig
from .step import UnknownTRL
from .trainer import D3STrainer

if TYPE_CHECKING:
    from .async_config import D3SAsyncGRPOConfig
    from .async_trainer import D3SAsyncGRPOTrainer
    from .distillation import D3SAsyncDistillationTrainer, D3SServerDistillationTrainer

__all__ = [
    "D3SAsyncDistillationTrainer", "D3SAsyncGRPOConfig", "D3SAsyncGRPOTrainer", "D3SConfig",
    "D3SServerDistillationTrainer", "D3STrainer", "UnknownTRL", "UnsupportedHead",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports a trainer that is experimental in TRL only when it is first used: some versions of TRL do not have it."""
    modules = {
        "D3SAsyncGRPOConfig": "async_config", "D3SAsyncGRPOTrainer": "async_trainer",
        "D3SAsyncDistillationTrainer": "distillation", "D3SServerDistillationTrainer": "distillation",
    }  # fmt: skip
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (wrong := untested("trl", trl.__version__, "1.16", "1.17", "tests/trainers")) is not None:
        raise ImportError(wrong)
    return getattr(import_module(f".{modules[name]}", __name__), name)
