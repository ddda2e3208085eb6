"""Refuses our trainer modes and their options where verl would ignore them."""

from __future__ import annotations

from typing import Any, get_args

from omegaconf import OmegaConf
from verl.utils import device

from .options import Mode
from .replaced import Replaced

# verl's older asynchronous trainers, which do not read ``trainer.v1``. Each is found by a section that only it has.
_OLDER = {"async_training": "fully_async_policy", "rollout": "one_step_off_policy"}


def refuse_ignored_modes(config: Any) -> None:
    """Raises a ValueError if verl's whole configuration has one of our modes or its options, but starts a trainer that
    ignores them.
    """
    chosen = OmegaConf.select(config, "trainer.v1.trainer_mode")
    older = next((f"verl.experimental.{name}" for section, name in _OLDER.items() if section in config), None)
    use_v1 = OmegaConf.select(config, "trainer.use_v1", default=True)
    started = older or (None if use_v1 else "trainer.use_v1=False")
    for mode in get_args(Mode):
        options = OmegaConf.select(config, f"trainer.v1.{mode}")
        if (options or mode == chosen) and (started or mode != chosen):
            key, value = (f"trainer.v1.{mode}", dict(options)) if options else ("trainer.v1.trainer_mode", mode)
            raise ValueError(
                f"{key}: got {value!r} with {started or f'trainer.v1.trainer_mode={chosen}'}, which ignores it; takes "
                f"verl.trainer.main_ppo with trainer.v1.trainer_mode={'d3s_separate_async' if older else mode}"
            )


def _auto_set_device(original: Any, config: Any) -> None:
    """verl's function of this name. Each of verl's main functions calls it first, before anything is started."""
    original(config)
    refuse_ignored_modes(config)


REPLACED = (Replaced(device, "auto_set_device", ["config"], _auto_set_device),)
