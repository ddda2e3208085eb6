"""How the tests run: in two layers, on fresh random inputs, in groups that two workers share.

``make test`` shows within minutes that the library works. ``make test-all`` (D3S_TEST_ALL=1) runs every test at full
strength: with more examples, and with the tests marked ``slow`` (the mark says what only that test can show). A suite
in a child process runs in its parent's layer, which it reads from the environment.
"""

import atexit
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Threads sleep while they wait, so that two workers do not take each other's cores. Torch reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
from helpers import EVERYTHING, require_inductor
from hypothesis import HealthCheck, register_random, settings

# Whether the ops run on the emulated CUDA kernels or on plain PyTorch.
ELSEWHERE = "D3S_EMULATED_LIBRARY" in os.environ or os.environ.get("D3S_KERNELS_BACKEND") == "torch"

# Caches of compilers and trainers: one folder for a run, its workers and its child processes. So a run depends neither
# on an earlier one, nor on a home directory, nor on who runs it.
if "D3S_TEST_CACHES" not in os.environ:
    os.environ["D3S_TEST_CACHES"] = tempfile.mkdtemp(prefix="d3s-tests-")
    atexit.register(shutil.rmtree, os.environ["D3S_TEST_CACHES"], ignore_errors=True)
for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "MPLCONFIGDIR"):
    os.environ[variable] = str(Path(os.environ["D3S_TEST_CACHES"], variable.lower()))

# Two threads wherever the tests run, so that the parallel paths are taken and results compare between machines.
torch.set_num_threads(2)


# Without a GPU, torch.manual_seed keeps a formatted stack for each kind of device that might still come.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


class TorchRandom:
    """Torch's generator for hypothesis, which can then draw the same inputs again when it shrinks a failure."""

    seed = staticmethod(seed_torch)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # kept here because hypothesis keeps no reference
register_random(TORCH_RANDOM)
for name, examples in (("quick", 10), ("all", 60)):
    settings.register_profile(
        name,
        max_examples=int(os.environ.get("D3S_TEST_EXAMPLES", examples)),
        deadline=None,
        print_blob=True,
        database=None,  # no run depends on an earlier one; a failure is drawn again from its seed
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("all" if EVERYTHING else "quick")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simd: run again for each SIMD level by test_simd_levels.py")
    config.addinivalue_line("markers", "slow(shows): runs in `make test-all` alone; says what only this test can show")
    config.addinivalue_line("markers", "slow_elsewhere(shows): likewise, but for the kernels of the CPU and of a GPU")
    if not hasattr(config, "workerinput"):  # of pytest-xdist
        config.pluginmanager.register(Layers(config))


# ---- the two layers --------------------------------------------------------------------------------------------------

LEFT = pytest.StashKey[int]()  # the number of tests that this run leaves out


# ---- two workers -----------------------------------------------------------------------------------------------------

# The files that take longest come first, so that no worker still runs one of them at the end.
FIRST = (
    "verl/test_verl_entropy.py",
    "verl/test_verl_trainer.py",
    "verl/test_verl_plugin.py",
    "test_cuda_emulated.py",
    "test_portable.py",
    "trainers/test_trl_processes.py",
    "test_vocab_parallel.py",
    "test_compiled_losses.py",
    "test_registration.py",
    "test_no_hangs.py",
    "test_across_ranks.py",
    "test_export.py",
)
# Files whose tests share no expensive set-up: a free worker takes the next test.
SHARED_OUT = {
    "test_cuda_emulated.py",
    "test_large.py",
    "test_head.py",
    "test_portable.py",
    "test_registration.py",
    "test_simd_levels.py",
    "test_vocab_parallel.py",
    "verl/test_verl_plugin.py",
}
# Files whose tests share the set-up of a parameter.
BY_PARAMETER = {"trainers/test_trl_processes.py"}
# Files that share a set-up that is slow to start: Ray, and the imports of TRL.
_OF_RAY = ("async", "entropy", "prefixes", "sampling_masks", "trainer", "trust")
TOGETHER = {f"verl/test_verl_{name}.py": "Ray" for name in _OF_RAY}
TOGETHER |= {"test_savings.py": "trainers/test_trl_update.py"}
TOGETHER |= {"verl/test_verl_distillation.py": "verl/test_verl_head.py"}  # processes that have imported verl


# Where workers are many and the time is short, as on a GPU: a free worker takes the next test of any file.
SPREAD = os.environ.get("D3S_TEST_SPREAD") == "1"


def group_of(nodeid: str) -> str:
    """The group of a test. Tests of a group run on one worker, one after the other."""
    name = nodeid.partition("::")[0].removeprefix("tests/")
    if name in SHARED_OUT:
        return nodeid
    return f"{name} {nodeid.partition('[')[2]}" if name in BY_PARAMETER else TOGETHER.get(name, name)


@pytest.hookimpl(optionalhook=True)  # where there is pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScheduling, LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        _split_scope = staticmethod(group_of)

    config.option.loadscopereorder = False  # the order set below
    if SPREAD:  # in that order, one by one; and Groups fails where two workers are replaced at the same time
        config.option.maxschedchunk = 1
        return LoadScheduling(config, log)
    return Groups(config, log)


def place(item: pytest.Item) -> int:
    name = item.nodeid.partition("::")[0].removeprefix("tests/")
    return FIRST.index(name) if name in FIRST else len(FIRST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = {item for item in items if is_left(item)}
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    config.stash[LEFT] = len(left)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items.sort(key=place)
        config.workeroutput["left"] = len(left)


def is_left(item: pytest.Item) -> bool:
    """Whether a test is left to `make test-all`."""
    for name, slow_here in (("slow", True), ("slow_elsewhere", ELSEWHERE)):
        if marker := item.get_closest_marker(name):
            if len(marker.args) != 1:
                raise pytest.UsageError(f"{item.nodeid}: {name} takes what only this test can show")
            if slow_here and not EVERYTHING:
                return True
    return False


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if output := getattr(node, "workeroutput", None):  # not of a worker that crashed
        node.config.stash[LEFT] = output.get("left", 0)  # every worker collects all


class Layers:
    """Says when a suite in a child process has passed, since it is one dot here and takes as long as hundreds."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if SPREAD and report.failed and terminal:  # at once: the run may be killed before its end
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid}")
            terminal.write_line(report.longreprtext)
        for name, passed in report.user_properties if report.when == "call" and terminal else ():
            if name == "layer":
                terminal.ensure_newline()
                terminal.write_line(str(passed))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(f"{left:,} more tests are left to `make test-all`.")


@pytest.fixture(autouse=True)
def inductor_where_it_can_compile(request: pytest.FixtureRequest) -> None:
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == "inductor":
        require_inductor()


@pytest.fixture(autouse=True)
def fresh_randomness() -> None:
    seed = int(os.environ.get("D3S_TEST_SEED", secrets.randbits(32)))
    seed_torch(seed)
    print(f"D3S_TEST_SEED={seed} draws the same inputs again")  # pytest shows it where a test fails
