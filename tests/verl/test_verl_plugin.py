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


def test_importing_verl_registers_all_names_which_are_replaced_and_put_back(tmp_path: Path) -> None:
    found = run(
        """
import inspect
import verl
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.core_algos import get_policy_loss_fn
registered = get_trainer_cls("d3s_sync"), get_policy_loss_fn("d3s"), get_policy_loss_fn("espo")
print(*(one.__module__.split(".")[-1] for one in registered))
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
    assert found.stdout.split() == ["trainer", "loss", "loss", "9", "True", "False", "True", "9", "False"], found.stderr
    assert "d3s_kernels:" not in found.stderr  # the plugin's messages begin so; a path may have the name too


LOSSES = """
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
print("d3s" in POLICY_LOSS_REGISTRY, "espo" in POLICY_LOSS_REGISTRY)
"""
BY_HAND = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
WITHOUT_QUEUE = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "transfer_queue" else find(name, package)
import sys, verl
print("d3s_kernels.integrations.verl.trainer" in sys.modules, "verl.trainer.ppo.v1" in sys.modules)
"""
WORKERS = """
import d3s_kernels.integrations.verl.plugin
from verl.workers import engine_workers
print("integrations/verl/plugin.py" in engine_workers.ppo_loss.__code__.co_filename)
"""
# Code, its environment, what it prints, and what is said.
CASES: dict[str, tuple[str, dict[str, str], str, list[str]]] = {
    "without the entry point": (f"import verl\n{LOSSES}", BY_HAND, "False False", []),
    "without TransferQueue": (WITHOUT_QUEUE + LOSSES, {}, "False False True True", []),
    "a package of verl's is missing": (
        f"import sys; sys.modules['uvicorn'] = None; import verl\n{LOSSES}", {}, "True True",
        ["RuntimeWarning: d3s_kernels: trainer.v1.trainer_mode=d3s_sync is not available: d3s_kernels", "uvicorn"],
    ),
    "verl's workers were imported before": (f"import verl.workers.engine_workers\n{WORKERS}", BY_HAND, "True", []),
    "our losses were imported before": (
        f"import d3s_kernels.integrations.verl.loss\n{WORKERS}", BY_HAND, "True", [],
    ),
    "verl has another ppo_loss": (
        "from verl.workers.utils import losses\nlosses.ppo_loss = lambda batch: None\n"
        f"import d3s_kernels.integrations.verl.plugin\n{LOSSES}", BY_HAND, "True True",
        ["actor.policy_loss.entropy_source is not available", "verl's ppo_loss takes ['batch']"],
    ),
    "a part of ours was imported before": (
        "from d3s_kernels.integrations.verl import head", {}, "",
        ["impl_backend=d3s is not available", "import verl first"],
    ),
}  # fmt: skip


@pytest.mark.slow("what is registered, and said, where something of verl is missing, other, or imported before")
@pytest.mark.parametrize("case", CASES)
def test_where_not_all_can_be_registered_the_rest_is(case: str, tmp_path: Path) -> None:
    code, environment, printed, said = CASES[case]
    found = run(code, tmp_path, **environment)
    assert found.stdout.split() == printed.split(), found.stderr
    assert all(part in found.stderr for part in said), found.stderr
    assert ("RuntimeWarning: d3s_kernels:" in found.stderr) == bool(said)


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
