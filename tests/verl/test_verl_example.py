"""examples/verl_d3s.sh: verl accepts its options, and D3S accepts the resulting configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

from composed import composed
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

from d3s_kernels import Budget

SCRIPT = Path(__file__).parents[2] / "examples" / "verl_d3s.sh"


def test_the_command_line(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"  # replaces the python that would start verl, and prints its arguments
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "/data"}
    command = [SCRIPT, "trainer.total_epochs=7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    module, name, *options = done.stdout.splitlines()
    assert (module, name) == ("-m", "verl.trainer.main_ppo")

    config = composed(*options)
    OmegaConf.resolve(config)
    assert config.data.train_files == "/data/train.parquet"
    assert config.trainer.total_epochs == 7
    validate_config(config, use_reference_policy=False, use_critic=False)
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.global_steps, trainer.total_training_steps = 1, 100
    assert trainer._budget == Budget(8, 0.05)
