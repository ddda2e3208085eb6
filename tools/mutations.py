#!/usr/bin/env python3
"""Checks that the tests detect faults: puts the faults of tools/mutants.txt into a copy of the library, one at a time.

    .venv/bin/python tools/mutations.py                  all faults; continues after an interruption
    .venv/bin/python tools/mutations.py --fresh          all faults, from the beginning
    .venv/bin/python tools/mutations.py WORD ...         runs again the faults whose name or file has one of these words
    .venv/bin/python tools/mutations.py --layer test     only at the strength of `make test`; or: --layer test-all

Every fault is tried at the strength of `make test`; a fault that survives is tried again at the strength of
`make test-all`. The report is also written to build/mutations/report.md. Exit status 1: a fault survives both and is
not explained, or `make test` detects fewer faults than required. Exit status 2: the table is wrong, for example the old
text is gone, the changed code does not compile, or the tests fail without the fault. A result stays valid until the
entry, its file or its tests change.

The checkout is not touched: everything happens in build/mutations/tree, a copy of all tracked and new files.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutations"
TREE, PRISTINE, SITE = WORK / "tree", WORK / "pristine", WORK / "site"
LIBRARIES, EMULATED = TREE / "build" / "libraries", TREE / "build" / f"emulated-torch-{metadata.version('torch')}"
LAYERS = ("test", "test-all")
LEAST = 132  # `make test` must detect at least this many faults
RUN_OTHERS = ("tests/test_cuda_emulated.py", "tests/test_portable.py")  # tests that run other test files
LIMIT, PATIENCE = 120.0, 6.0  # a run may take 120 s, or 6 times as long as without the fault if that is longer

# An editable install has its own finder, which comes before PYTHONPATH. This removes it, so that the copy is imported.
SITECUSTOMIZE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "skbc" not in type(finder).__module__]
"""
PLACES = "import d3s_kernels, d3s_kernels._build_info as b; print(d3s_kernels.__file__); print(b.__file__)"


class Wrong(Exception):
    """An error in the table or in the environment."""


class Mutant(NamedTuple):
    name: str
    file: str
    tests: str
    old: str = ""
    new: str = ""
    more: str = ""  # what replaces the tests at the strength of `make test-all`
    explained: str = ""  # why no test can detect it


def mutants_in(table: str) -> list[Mutant]:
    """The faults of a table; tools/mutants.txt says how it is written."""
    found: list[Mutant] = []
    fields = {"-": "old", "+": "new", "all:": "more", "why:": "explained"}
    for line in table.splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "==":
            file, _, tests = rest.partition(": ")
        elif mark in fields:
            found[-1] = found[-1]._replace(**{fields[mark]: f"{getattr(found[-1], fields[mark])}{rest}\n"})
        elif line and mark != "#":
            found.append(Mutant(line, file, tests))
    return [Mutant(*(text.removesuffix("\n") for text in mutant)) for mutant in found]


MUTANTS = mutants_in(Path(__file__).with_name("mutants.txt").read_text(encoding="utf-8"))


def problem_of(mutant: Mutant) -> str | None:
    """Why a fault does not fit the checkout, or None."""
    file = ROOT / mutant.file
    found = file.read_text(encoding="utf-8").count(mutant.old) if file.exists() else 0
    if found != 1:
        return f"{mutant.file}: has the old text {found} times; takes once"
    missing = [path for path in test_files(f"{mutant.tests} {mutant.more}") if not (ROOT / path).exists()]
    return f"tests: there is no {', '.join(missing)}" if missing else None


def test_files(tests: str) -> list[str]:
    return [word.partition("::")[0] for word in shlex.split(tests) if word.startswith("tests/")]


# ---- the copy --------------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Makes and builds a copy of the current checkout; an earlier build is reused."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    wanted = {name for name in names if name and (ROOT / name).is_file()}
    if PRISTINE.exists():  # reuse the last build: only changes are compiled
        restore()
        for old in TREE.rglob("*"):
            inside = old.relative_to(TREE)
            if old.is_file() and inside.parts[0] != "build" and old.suffix != ".so" and str(inside) not in wanted:
                old.unlink()
    for name in wanted:
        here, there = ROOT / name, TREE / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if not there.exists() or here.read_bytes() != there.read_bytes():
            shutil.copy(here, there)
    SITE.mkdir(parents=True, exist_ok=True)
    (SITE / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    torch_root = Path(str(util.find_spec("torch").origin)).parent  # type: ignore[union-attr]
    pybind11 = subprocess.run([sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True)
    common = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    configure = [
        ["-S", str(TREE), "-B", str(LIBRARIES), "-DD3S_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}",
         f"-Dpybind11_DIR={pybind11.stdout.strip()}", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={TREE / 'd3s_kernels'}"],
        ["-S", str(TREE / "tests" / "cuda_shim"), "-B", str(EMULATED), f"-DTORCH_ROOT={torch_root}"],
    ]  # fmt: skip
    for arguments in configure:
        run_tool("cmake", *arguments, *common)
    build(LIBRARIES)
    build(EMULATED)
    copied = WORK / "copied"
    for folder in (copied, PRISTINE):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TREE, copied)
    copied.rename(PRISTINE)  # a rename is atomic: PRISTINE is complete or missing


def restore() -> None:
    """Restores the copy to its state before a fault, with its builds, so that nothing has to be built again."""
    shutil.rmtree(TREE, ignore_errors=True)
    shutil.copytree(PRISTINE, TREE)


def tool(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise Wrong(f"needs {name}; `make setup` brings it")
    return found


def run_tool(name: str, *arguments: str) -> None:
    done = subprocess.run([tool(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Wrong(f"does not build:\n{(done.stdout + done.stderr)[-3000:]}")


def build(folder: Path) -> None:
    run_tool("cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1))


# ---- the tests -------------------------------------------------------------------------------------------------------


def environment(layer: str) -> dict[str, str]:
    changed = {key: value for key, value in os.environ.items() if key not in ("D3S_TEST_ALL", "D3S_KERNELS_BACKEND")}
    changed |= {"PYTHONPATH": os.pathsep.join([str(SITE), str(TREE)]), "PYTHONDONTWRITEBYTECODE": "1"}
    changed["PYTEST_ADDOPTS"] = "-x -p no:cacheprovider"  # also for tests that start pytest themselves
    return changed | ({"D3S_TEST_ALL": "1"} if layer == "test-all" else {})


def python_of(tests: str) -> str:
    if not tests.startswith("tests/verl/"):
        return sys.executable
    found = next(Path(sys.prefix).glob("verl-*/bin/python"), None)
    if found is None:
        raise Wrong("needs verl in an environment of its own, which `make setup` makes where it can")
    return str(found)


def require_copy(python: str) -> None:
    """Raises unless this Python imports the package from the copy."""
    done = subprocess.run(
        [python, "-c", PLACES], cwd=TREE, env=environment("test"), capture_output=True, text=True, check=False
    )
    if [str(Path(line).parent) for line in done.stdout.split()] != [str(TREE / "d3s_kernels")] * 2:
        raise Wrong(f"{python} does not import the copy:\n{done.stdout}{done.stderr[-2000:]}")


def run_tests(tests: str, layer: str, limit: float) -> tuple[str, str, float]:
    """Runs tests in the copy. Returns the outcome, what failed, and the seconds it took."""
    command = [python_of(tests), "-m", "pytest", *shlex.split(tests)]
    began = time.monotonic()
    run = subprocess.Popen(
        command, cwd=TREE, env=environment(layer), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = run.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(run.pid, signal.SIGTERM)  # pytest and its workers, which then stop their own children
        with suppress(subprocess.TimeoutExpired):
            run.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            return "caught", "it hangs", time.monotonic() - began
        raise
    seconds = time.monotonic() - began
    (WORK / "last.log").write_text(output, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if run.returncode in (0, 5):
        return "survived", "" if re.search(r"\d passed", output) else "this layer runs none of these tests", seconds
    if run.returncode == 1 and failed:
        return "caught", failed[1].removeprefix("../").removeprefix("tests/").replace("|", "/"), seconds
    if run.returncode < 0:
        return "caught", f"it ends by signal {-run.returncode}", seconds
    raise Wrong(f"pytest {tests}: exit status {run.returncode}\n{output[-3000:]}")


# ---- the report ------------------------------------------------------------------------------------------------------


class Results:
    """The results of a layer, stored by a hash of everything they depend on, and written after each result."""

    def __init__(self, layer: str, fresh: bool) -> None:
        self.layer, self.file = layer, WORK / f"{layer}.json"
        self.known: dict[str, Any] = {}
        if self.file.exists() and not fresh:
            self.known = json.loads(self.file.read_text(encoding="utf-8"))

    def key(self, what: tuple[str, ...], tests: str, *files: str) -> str:
        state = hashlib.sha256(repr((self.layer, tests, *what)).encode())
        paths = {ROOT / name for name in [*files, *test_files(tests), "tests/conftest.py", "tests/helpers.py"]}
        paths |= set((ROOT / "tests" / "cases").glob("*.py"))
        if any(name in tests for name in RUN_OTHERS):
            paths |= {path for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cpp", ".h")}
        for path in sorted(paths):
            state.update(path.read_bytes())
        return state.hexdigest()

    def add(self, key: str, **result: Any) -> dict[str, Any]:
        self.known[key] = result
        self.file.write_text(json.dumps(self.known, indent=1), encoding="utf-8")
        return result

    def of(self, mutant: Mutant, again: bool) -> dict[str, Any]:
        tests = mutant.more if self.layer == "test-all" and mutant.more else mutant.tests
        key = self.key(mutant[:-1], tests, mutant.file)
        if key in self.known and not again and self.known[key]["outcome"] != "wrong":
            return dict(self.known[key])
        began = time.monotonic()
        try:
            without = self._without_fault(tests)
            began = time.monotonic()
            path = TREE / mutant.file
            path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
            if mutant.file.startswith("csrc/"):
                build(EMULATED if mutant.file.startswith("csrc/cuda/") else LIBRARIES)
            built = time.monotonic()
            outcome, by, seconds = run_tests(tests, self.layer, max(LIMIT, PATIENCE * without))
        except Wrong as error:
            return self.add(key, mutant=mutant.name, outcome="wrong", by=str(error), seconds=time.monotonic() - began)
        finally:
            restore()
        return self.add(key, mutant=mutant.name, outcome=outcome, by=by, seconds=seconds + built - began)

    def _without_fault(self, tests: str) -> float:
        """The seconds that these tests take without a fault; raises if they fail."""
        key = self.key(("no fault",), tests)
        if key not in self.known:
            require_copy(python_of(tests))
            outcome, by, seconds = run_tests(tests, self.layer, 1800)
            if outcome != "survived":
                raise Wrong(f"{tests}: fails without a fault: {by}")
            self.add(key, tests=tests, outcome="passed", by=by, seconds=seconds)
        return float(self.known[key]["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--layer", choices=LAYERS)
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in f"{m.name} {m.file}" for word in given.words)]
    problems = [f"{mutant.name}: {problem}" for mutant in MUTANTS if (problem := problem_of(mutant))]
    if problems or not chosen:
        print("\n".join(problems or ["no mutant has these words"]))
        return 2
    WORK.mkdir(parents=True, exist_ok=True)
    lock = (WORK / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits for the first
    began = time.monotonic()
    try:
        prepare()
    except Wrong as error:
        print(error)
        return 2
    lines, outcomes = ["| fault | make | outcome | by | s |", "|:--|:--|:--|:--|--:|"], []
    print(*lines, sep="\n", flush=True)
    results = {layer: Results(layer, given.fresh) for layer in LAYERS}
    for mutant in chosen:
        for layer in [given.layer] if given.layer else LAYERS:
            found = results[layer].of(mutant, bool(given.words))
            by = found["by"].partition("\n")[0] or mutant.explained
            lines.append(f"| {mutant.name} | {layer} | {found['outcome']} | {by} | {found['seconds']:.0f} |")
            print(lines[-1], flush=True)
            if found["outcome"] != "survived":
                break
        outcomes.append((mutant, layer, found))
    quick = sum(layer == LAYERS[0] and result["outcome"] == "caught" for _, layer, result in outcomes)
    survivors = [m for m, _, result in outcomes if result["outcome"] == "survived" and not m.explained]
    wrong = [f"\n{mutant.name}: {result['by']}" for mutant, _, result in outcomes if result["outcome"] == "wrong"]
    took = (time.monotonic() - began) / 60
    lines.append(f"\n`make test` sees {quick} of {len(chosen)}; {len(survivors)} survive. It took {took:.0f} minutes.")
    print(lines[-1], *wrong, sep="\n")
    if len(chosen) == len(MUTANTS):
        (WORK / "report.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    if wrong:
        return 2
    return 1 if survivors or (len(chosen) == len(MUTANTS) and quick < LEAST) else 0


if __name__ == "__main__":
    sys.exit(main())
