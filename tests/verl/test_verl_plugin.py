"""verl finds the integration in a process that imports nothing else, and a message says where it is not available."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")


def run(code: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)


NAMES = """
import verl
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print(get_trainer_cls("d3s_sync").__module__, get_policy_loss_fn("d3s").__module__)
print(get_policy_loss_fn("espo").__module__)
"""
FIRST = "that this module, too, may be imported first"
MODULES = [f"d3s_kernels.integrations.verl.{name}" for name in ("trainer", "loss", "loss")]  # of the names printed


def test_importing_verl_registers_all_names(tmp_path: Path) -> None:
    found = run(NAMES, tmp_path)
    assert found.stdout.split() == MODULES
    assert "d3s_kernels:" not in found.stderr  # the plugin's messages begin so; a path may have the name too


@pytest.mark.slow("that nothing but the entry point registers the names")
def test_it_is_the_entry_point_that_does_it(tmp_path: Path) -> None:
    found = run(NAMES, tmp_path, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "Unknown trainer 'd3s_sync'" in found.stderr


@pytest.mark.slow("what there is without TransferQueue")
def test_without_transfer_queue_there_are_the_losses_alone(tmp_path: Path) -> None:
    """verl's V1 trainers cannot be imported then, and no message is shown."""
    found = run(
        """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "transfer_queue" else find(name, package)
import sys, verl
print("d3s_kernels.integrations.verl.trainer" in sys.modules, "verl.trainer.ppo.v1" in sys.modules)
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print(get_policy_loss_fn("d3s").__name__, get_policy_loss_fn("espo").__name__)
""",
        tmp_path,
    )
    assert found.stdout.split() == ["False", "False", "d3s_policy_loss", "espo_policy_loss"]
    assert "RuntimeWarning" not in found.stderr


@pytest.mark.slow("that it is said where verl lacks a package of its own; verl is imported anew")
def test_what_cannot_be_registered_is_said(tmp_path: Path) -> None:
    """verl itself logs the error only at debug level."""
    found = run("import sys; sys.modules['uvicorn'] = None; import verl; print('goes on')", tmp_path)
    assert found.stdout.split() == ["goes", "on"]
    assert "RuntimeWarning: d3s_kernels: trainer.v1.trainer_mode=d3s_sync is not available: d3s_kernels" in found.stderr
    assert "uvicorn" in found.stderr
    assert "loss_mode=d3s or espo is not available" not in found.stderr


@pytest.mark.slow(FIRST)
@pytest.mark.parametrize("first", ["verl.workers.engine_workers", "d3s_kernels.integrations.verl.loss"])
def test_workers_that_were_imported_before_have_the_entropies_too(tmp_path: Path, first: str) -> None:
    found = run(
        f"""
import {first}
import d3s_kernels.integrations.verl.plugin
from verl.workers import engine_workers
print(engine_workers.ppo_loss.__code__.co_filename)
""",
        tmp_path,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert found.stdout.endswith("integrations/verl/plugin.py\n")


@pytest.mark.slow("what is said where verl has changed")
def test_where_verl_has_another_ppo_loss_its_entropies_alone_are_missing(tmp_path: Path) -> None:
    found = run(
        """
from verl.workers.utils import losses
losses.ppo_loss = lambda batch: None
import d3s_kernels.integrations.verl.plugin
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
print("d3s" in POLICY_LOSS_REGISTRY, "espo" in POLICY_LOSS_REGISTRY)
""",
        tmp_path,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert found.stdout.split() == ["True", "True"]
    assert "actor.policy_loss.entropy_source is not available" in found.stderr
    assert "verl's ppo_loss takes ['batch']" in found.stderr


def test_what_is_replaced_is_put_back(tmp_path: Path) -> None:
    found = run(
        """
import inspect
import verl
from d3s_kernels.integrations.verl import entropy, head, modes, plugin
from verl.workers import engine_workers
rows = [row for module in (entropy, head, modes) for row in module.REPLACED]
def ours():
    held = [getattr(row.owner, row.name) for row in rows] + [engine_workers.ppo_loss]
    return ["integrations/verl" in inspect.getsourcefile(getattr(one, "__code__", one)) for one in held]
print(len(rows), all(ours()))
plugin.uninstall()
print(any(ours()))
plugin.install()
plugin.install()
print(all(ours()), len(plugin._replaced))
plugin.uninstall()
print(any(ours()))
""",
        tmp_path,
    )
    assert found.stdout.split() == ["9", "True", "False", "True", "9", "False"], found.stderr


@pytest.mark.slow("what is said to who imports a part of ours before verl")
def test_a_part_that_was_imported_before_verl_is_said(tmp_path: Path) -> None:
    found = run("from d3s_kernels.integrations.verl import head", tmp_path)
    assert "impl_backend=d3s is not available" in found.stderr
    assert "import verl first" in found.stderr


def test_another_verl_is_refused_unless_it_is_tried(tmp_path: Path) -> None:
    code = """
import importlib.metadata
importlib.metadata.version = lambda name, found=importlib.metadata.version: "0.10.0" if name == "verl" else found(name)
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
print("d3s" in POLICY_LOSS_REGISTRY)
"""
    refused, tried = run(code, tmp_path), run(code, tmp_path, D3S_VERL_UNTESTED="1")
    assert (refused.stdout.split(), tried.stdout.split()) == (["False"], ["True"])
    assert "D3S_VERL_UNTESTED=1. Nothing was registered" in refused.stderr
    assert "set D3S_VERL_UNTESTED=1" in refused.stderr
    assert "found verl 0.10.0; takes verl>=0.9.1,<0.9.2, which the tests cover" in tried.stderr
