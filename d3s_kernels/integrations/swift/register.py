"""Puts D3S's trainer and options in the place of those that ms-swift has for GRPO."""

from __future__ import annotations

import sys
import warnings

import swift
from packaging.version import Version
from swift.trainers import TrainerFactory

_OLDEST, _NEWEST = "4.6", "4.6"
_HERE = __name__.rpartition(".")[0]


def register() -> None:
    """Registers the trainer for ``--rlhf_type grpo``; other types are left as they are.

    Raises:
        ImportError: another ms-swift than the tested ones, Megatron-SWIFT, or another plug-in with a trainer for GRPO.
    """
    found = Version(swift.__version__)
    if found < Version(_OLDEST):
        raise ImportError(f"d3s_kernels.integrations.swift: found ms-swift {found}; takes {_OLDEST} or newer")
    if found.release[:2] > Version(_NEWEST).release:
        warnings.warn(f"d3s_kernels.integrations.swift: found ms-swift {found}; tested with {_NEWEST}", stacklevel=2)
    if any(name.startswith("swift.megatron") for name in sys.modules):
        raise ImportError(
            "d3s_kernels.integrations.swift: got Megatron-SWIFT, which has another trainer; takes `swift rlhf`"
        )
    ours = {"TRAINER_MAPPING": f"{_HERE}.trainer.D3STrainer", "TRAINING_ARGS_MAPPING": f"{_HERE}.config.D3SConfig"}
    for name, path in ours.items():
        mapping = getattr(TrainerFactory, name)
        if not mapping["grpo"].startswith("swift."):
            raise ImportError(f"d3s_kernels.integrations.swift: {mapping['grpo']} already replaces ms-swift's GRPO")
        mapping["grpo"] = path
