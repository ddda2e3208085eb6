"""verl's configuration, composed as by its command line from verl's files and overrides."""

from __future__ import annotations

import copy
from functools import cache

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf


@cache
def from_files(name: str) -> DictConfig:
    """The configuration without overrides. Hydra takes half a second to read verl's files."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name)


def composed(*overrides: str, file: str = "ppo_trainer") -> DictConfig:
    """The configuration with changed values: `key=value`, and `+key=value` for a new key. Overrides cannot select other
    files, so that the files are read once for all tests."""
    config = copy.deepcopy(from_files(file))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    return config
