"""Replaces the trainer and the options of ms-swift's GRPO by D3S's trainer and options."""

from __future__ import annotations

import sys

import swift
from swift.trainers import TrainerFactory

from .._versions import untested

_HERE = __name__.rpartition(".")[0]


def register() -> None:
    """Registers D3S's trainer and options for ``--rlhf_type grpo``. Other types do not change.

    Raises:
        ImportError: the version of ms-swift is untested, Megatron-SWIFT is in use, or another plug-in has already
            replaced GRPO's trainer or options.
    """
    if (wrong := untested("ms-swift", swift.__version__, "4.6", "4.7", "tests/swift")) is not None:
        raise ImportError(wrong)
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
