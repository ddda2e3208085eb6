#!/usr/bin/env python3
"""Everything that needs an NVIDIA GPU, in one call of less than nine minutes; `make gpu` calls it.

    python3 tools/gpu.py                     build, load, tests, cuda, triton, torch, sanitizer, bench
    STAGE=build,bench python3 tools/gpu.py   some of them
    python3 tools/gpu.py --again             also stages that are done for these sources

It uses the installed Python, torch, nvcc, CMake and ninja, and downloads nothing. Wheels in .whl/, or in the folder
that GPU_WHEELS names, are unpacked for the benchmarks (TRL, their main peer). Each stage writes its result when it
ends, to build/gpu/ and to the folder that OUT names. A finished stage is skipped until a source changes. D3S_COMMIT
names the commit if there is no git.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
BUILT = WORK / "built"  # the libraries
SITE = WORK / "site"  # libraries and Python files; everything runs here, as the checkout's package has no libraries
OUT = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
BUILD_SOURCES = ("csrc", "CMakeLists.txt")
SOURCES = (*BUILD_SOURCES, "d3s_kernels", "tests", "benchmarks", "tools", "pyproject.toml")

BUDGET = 530.0  # seconds for all stages together; each stage has its own limit too
LOG_KEPT = 300_000  # bytes of each stage's log that are copied to OUT
TAIL = 40  # last lines of a command's output that are kept
SUITES = "tests/cuda/test_suites.py"
SANITIZER_FOUND = 9  # exit status if the sanitizer found something; any other is the program's


@dataclass
class Done:
    """How a command ended; `code` is None if it ran out of time."""

    code: int | None
    seconds: float
    tail: list[str]

    @property
    def outcome(self) -> str:
        return "timed out" if self.code is None else "ok" if self.code == 0 else f"failed ({self.code})"


@dataclass
class Result:
    stage: str
    status: str  # ok, failed or skipped
    seconds: float
    sources: str
    details: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """A stage failed: the reason, and details for the result."""

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = {"problem": message} | (details or {})


class Skipped(Failed):
    """Something that the stage needs does not exist here."""


class Stage:
    """A running stage, with its time limit and its log."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.deadline = time.monotonic() + seconds
        self.log_path = WORK / "logs" / f"{name}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.log_path.open("w")

    @property
    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self.log, flush=True)

    def run(self, *command: object, seconds: float | None = None, cwd: Path = ROOT, **environment: str) -> Done:
        """Runs a command and streams its output. At the time limit it is killed with all processes it started."""
        words = [str(word) for word in command]
        limit = min(self.left, seconds or self.left)
        self.say(f"+ {' '.join(words)}")
        start, lines = time.monotonic(), []
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def pump() -> None:
            for line in process.stdout or ():
                self.say(line.rstrip("\n"))
                lines.append(line.rstrip("\n"))
                del lines[:-TAIL]

        reader = threading.Thread(target=pump, daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            self.say(f"! out of time after {limit:.0f} s")
            code = None
        finally:
            kill_all_of(process)
        reader.join(5)
        return Done(code, time.monotonic() - start, list(lines))

    def must(self, what: str, *command: object, **options: Any) -> Done:
        done = self.run(*command, **options)
        if done.code != 0:
            raise Failed(f"{what}: {done.outcome}", {"tail": done.tail})
        return done


def kill_all_of(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    process.wait()


# The machine and the sources ------------------------------------------------------------------------------------------


def output(*command: object) -> str:
    """The output of a short command; empty if the command is missing or fails."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def tool(name: str, *, needed: bool = True) -> str:
    """The path of a program: on PATH, in the CUDA toolkit, or beside this Python."""
    toolkit = [Path(os.environ[key]) / "bin" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    folders = [*toolkit, Path(sys.executable).parent, "/usr/local/cuda/bin"]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))
    if not found and needed:
        raise Failed(f"{name} is not found")
    return found or ""


def gpu_facts() -> dict[str, str]:
    asked = ("name", "driver_version", "compute_cap", "memory.total")
    first = output("nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader").splitlines()
    return dict(zip(asked, map(str.strip, first[0].split(",")), strict=False)) if first else {}


def facts() -> dict[str, Any]:
    nvcc = tool("nvcc", needed=False)
    torch = output(sys.executable, "-c", "import torch; print(torch.__version__, torch.version.cuda)")
    return {
        "gpu": gpu_facts(),
        "python": platform.python_version(),
        "torch": torch,
        "nvcc": output(nvcc, "--version").splitlines()[-1:] if nvcc else [],
        "cmake": output(tool("cmake", needed=False) or "cmake", "--version").splitlines()[:1],
        "commit": output("git", "rev-parse", "HEAD") or os.environ.get("D3S_COMMIT"),
    }


def files(sources: tuple[str, ...]) -> Iterator[Path]:
    for source in sources:
        path = ROOT / source
        yield from sorted(path.rglob("*")) if path.is_dir() else [path]


def hash_of_sources(stage: str) -> str:
    """A hash of the current sources, committed or not: a stage that succeeded for it is not run again."""
    digest = hashlib.sha256()
    for path in files(BUILD_SOURCES if stage == "build" else SOURCES):
        parts = path.relative_to(ROOT).parts
        if (
            path.is_file()
            and "__pycache__" not in parts
            and "results" not in parts
            and path.suffix not in (".so", ".md")
        ):
            digest.update(f"{'/'.join(parts)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def assemble() -> None:
    """Copies the current Python files and the built libraries into SITE."""
    before = read_result("build")
    if not before or before.status != "ok" or before.sources != hash_of_sources("build"):
        raise Failed("the library is not built for these sources")
    for name in ("d3s_kernels", "tests", "benchmarks"):
        shutil.rmtree(SITE / name, ignore_errors=True)
        shutil.copytree(ROOT / name, SITE / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "results"))
    shutil.copy2(ROOT / "pyproject.toml", SITE)
    for library in BUILT.glob("d3s_kernels/*.so"):
        shutil.copy2(library, SITE / "d3s_kernels")


# The stages -----------------------------------------------------------------------------------------------------------


def build(stage: Stage) -> dict[str, Any]:
    """Builds the library, only for this machine's GPU. Ninja rebuilds only what has changed."""
    found = facts()
    architecture = found["gpu"].get("compute_cap", "").replace(".", "")
    if not architecture:
        raise Failed("nvidia-smi names no GPU", found)
    for line in (f"{name}: {value}" for name, value in found.items()):
        stage.say(line)
    cmake = tool("cmake")
    stage.must(
        "configuring",
        *(cmake, "-S", ROOT, "-B", WORK / "cmake", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DCMAKE_CUDA_COMPILER={tool('nvcc')}",
        f"-DCMAKE_CUDA_ARCHITECTURES={architecture}-real",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={output(sys.executable, '-m', 'pybind11', '--cmakedir')}",
    )
    stage.must("building", cmake, "--build", WORK / "cmake")
    stage.must("installing", cmake, "--install", WORK / "cmake", "--prefix", BUILT)
    libraries = {path.name: path.stat().st_size for path in sorted(BUILT.glob("d3s_kernels/*.so"))}
    if not any(name.startswith("_cuda") for name in libraries):
        raise Failed("CMake built no CUDA library", {"libraries": libraries} | found)
    return {"libraries": libraries} | found


def load(stage: Stage) -> dict[str, Any]:
    """Imports the package and checks every op against the reference."""
    assemble()
    which = stage.must("import", sys.executable, "-c", "import d3s_kernels; print(d3s_kernels.__file__)", cwd=SITE).tail
    if not which[-1].startswith(str(SITE)):
        raise Failed(f"this Python has an editable install, which comes first: {which[-1]}")
    return {"tail": stage.must("python -m d3s_kernels", sys.executable, "-m", "d3s_kernels", cwd=SITE).tail}


def tests(stage: Stage) -> dict[str, Any]:
    """The tests that need a GPU, on every back-end. Few workers, since some of these tests use gigabytes."""
    return tested(stage, "tests/cuda", f"--ignore={SUITES}", workers=4)


def suites_on(backend: str, examples: int) -> Callable[[Stage], dict[str, Any]]:
    """A stage with all tests of the ops on one back-end, with this number of examples for each property."""

    def suites(stage: Stage) -> dict[str, Any]:
        chosen = {"D3S_KERNELS_BACKEND": backend, "D3S_TEST_EXAMPLES": str(examples)}
        return tested(stage, SUITES, workers=8, **chosen)

    return suites


def tested(stage: Stage, what: str, *options: str, workers: int, **environment: str) -> dict[str, Any]:
    assemble()
    if not (SITE / what).exists():
        raise Skipped(f"there is no {what}")
    junit = junit_path(stage.name)
    junit.unlink(missing_ok=True)
    # The workers share one GPU, but most of a test's time is spent on the CPU.
    parallel = ["-n", min(workers, os.cpu_count() or 1)] if find_spec("xdist") else []
    done = stage.run(
        *(sys.executable, "-m", "pytest", what, "-o", "addopts=", "-v", "-rf", "--tb=short", "--no-header"),
        *("-p", "no:cacheprovider", f"--junitxml={junit}", *parallel, *options),
        cwd=SITE,
        **{"D3S_TEST_ALL": "1"} | environment,  # all tests, since a GPU is rarely available
    )
    details = counted(junit) | {"outcome": done.outcome}
    if done.code != 0:
        raise Failed(f"{what}: {done.outcome}", details | {"tail": done.tail})
    if not details.get("passed"):
        raise Failed(f"not one test of {what} ran", details)
    return details


def junit_path(stage: str) -> Path:
    return WORK / f"{stage}.xml"


def counted(junit: Path) -> dict[str, Any]:
    if not junit.exists():
        return {}
    suite = next(ElementTree.parse(junit).getroot().iter("testsuite")).attrib
    total, skipped = int(suite["tests"]), int(suite["skipped"])
    wrong = int(suite["failures"]) + int(suite["errors"])
    return {"passed": total - skipped - wrong, "failed": wrong, "skipped": skipped, "seconds": float(suite["time"])}


def sanitizer(stage: Stage) -> dict[str, Any]:
    """Runs each op once on small inputs. Without torch's caching allocator, every tensor has its own bounds."""
    assemble()
    script = SITE / "tests" / "cuda" / "sanitized.py"
    if not script.exists():
        raise Skipped("there is no tests/cuda/sanitized.py")
    program = tool("compute-sanitizer", needed=False)
    if not program:
        raise Skipped("compute-sanitizer is not found")
    # Only our kernels are checked: checking torch's own would take much time.
    ours = ["--kernel-name", "kns=d3s"] if "--kernel-name" in output(program, "--help") else []
    found: dict[str, Any] = {}
    for name, needed in (("memcheck", True), ("racecheck", True), ("initcheck", False), ("synccheck", False)):
        if not needed and stage.left < 10:
            found[name] = {"outcome": "no time left"}
            continue
        share = stage.left / 2 if name == "memcheck" else stage.left
        done = check_with(stage, program, name, ours, script, share)
        if ours and done.code not in (0, SANITIZER_FOUND, None):
            ours = []  # another version may have another syntax for the filter
            done = check_with(stage, program, name, ours, script, stage.left)
        found[name] = {"outcome": done.outcome, "seconds": round(done.seconds, 1), "tail": done.tail[-8:]}
        found[name]["bad"] = done.code != 0 and (needed or done.code is not None)
    bad = [f"{name}: {result['outcome']}" for name, result in found.items() if result.get("bad")]
    if bad:
        raise Failed("; ".join(bad), found)
    return found


def check_with(stage: Stage, program: str, name: str, ours: list[str], script: Path, seconds: float) -> Done:
    return stage.run(
        *(program, "--tool", name, "--error-exitcode", SANITIZER_FOUND, "--target-processes", "all", *ours),
        *(sys.executable, script),
        seconds=seconds,
        cwd=SITE,
        PYTHONPATH=str(SITE),
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )


def bench(stage: Stage) -> dict[str, Any]:
    assemble()
    folder = WORK / "results"
    shutil.rmtree(folder, ignore_errors=True)
    path = os.pathsep.join(filter(None, [unpacked_wheels(stage), os.environ.get("PYTHONPATH", "")]))
    done = stage.run(
        *(sys.executable, "-m", "benchmarks", "--device", "cuda", "--out", folder),
        f"--seconds={max(10.0, stage.left - 40):.0f}",  # leaves time to finish a benchmark and to write the results
        cwd=SITE,
        PYTHONPATH=path,
    )
    written = sorted(folder.glob("*")) if folder.exists() else []
    kept = ROOT / "benchmarks" / "results"
    kept.mkdir(exist_ok=True)
    for file in written:
        shutil.copy2(file, kept)
        copy_out(file)
    details: dict[str, Any] = {"written": [f"benchmarks/results/{file.name}" for file in written]}
    for file in written:
        if file.suffix == ".json":
            details["outcomes"] = outcomes(json.loads(file.read_text())["targets"])
    if done.code != 0 or not written:
        raise Failed(f"python -m benchmarks: {done.outcome}", details | {"tail": done.tail})
    return details


def outcomes(targets: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The targets by outcome. A missed target or a missing peer is not a failure, but is listed."""
    told: dict[str, list[str]] = {}
    for target in targets:
        if target["bound"] or target["outcome"] == "not measured":
            line = f"{target['what']}: {target['value'] or target['against']}, target {target['bound']}"
            told.setdefault(target["outcome"], []).append(line)
    return told


def unpacked_wheels(stage: Stage) -> str:
    """A folder for PYTHONPATH, or "". The benchmarks also run without the wheels, and report the missing peers."""
    wheels = sorted((ROOT / os.environ.get("GPU_WHEELS", ".whl")).glob("*.whl"))
    if not wheels:
        return ""
    target = WORK / "wheels"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade")
    done = stage.run(*pip, "--target", target, *wheels, seconds=30)
    return str(target) if done.code == 0 else ""


# The most important stages come first. Triton takes about a second to compile a kernel for each new kind of arguments,
# and plain PyTorch launches hundreds of kernels where CUDA launches one. So both get as few examples as in
# tests/test_portable.py. The sanitizer comes late, because the CUDA source also runs under AddressSanitizer on CPUs.
STAGES: dict[str, tuple[Callable[[Stage], dict[str, Any]], float]] = {
    "build": (build, 180),
    "load": (load, 60),
    "tests": (tests, 120),
    "cuda": (suites_on("cuda", examples=60), 110),
    "triton": (suites_on("triton", examples=10), 120),
    "torch": (suites_on("torch", examples=10), 60),
    "sanitizer": (sanitizer, 100),
    "bench": (bench, BUDGET),  # the remaining time
}
LEFT_FOR_BENCH = 150.0  # seconds; the earlier stages stop in time to leave them


# Running the stages in order ------------------------------------------------------------------------------------------


def main() -> int:
    options = arguments()
    chosen = [name for name in os.environ.get("STAGE", "").replace(" ", "").split(",") if name] or list(STAGES)
    unknown = set(chosen) - STAGES.keys()
    if unknown:
        print(f"STAGE: got {', '.join(sorted(unknown))}; takes {', '.join(STAGES)}", file=sys.stderr)
        return 2
    WORK.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + BUDGET
    results = []
    for name in (name for name in STAGES if name in chosen):
        sources = hash_of_sources(name)
        before = read_result(name)
        if before and before.status == "ok" and before.sources == sources and not options.again:
            print(f"== {name}: done before, for these sources")
            results.append(before)
            for written in before.details.get("written", []):
                copy_out(ROOT / written)
        else:
            reserved = LEFT_FOR_BENCH if "bench" in chosen and name != "bench" else 0
            results.append(run_stage(name, sources, deadline - time.monotonic() - reserved))
        write_summary()
    print_summary(results)
    return int(any(result.status == "failed" for result in results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="STAGE=name[,name] runs some stages.")
    parser.add_argument("--again", action="store_true", help="run stages that are done for these sources too")
    return parser.parse_args()


def run_stage(name: str, sources: str, left: float) -> Result:
    function, limit = STAGES[name]
    start = time.monotonic()
    print(f"== {name}", flush=True)
    stage = Stage(name, max(0.0, min(limit, left)))
    try:
        if stage.left < 1:
            raise Failed("no time is left for it: run it again")
        status, details = "ok", function(stage)
    except Skipped as reason:
        status, details = "skipped", reason.details
    except Failed as problem:
        status, details = "failed", problem.details
    except Exception as problem:  # a fault of this script; the other stages still run
        status, details = "failed", {"problem": repr(problem), "tail": traceback.format_exc().splitlines()}
    if details.get("problem"):
        stage.say(f"{name} {status}: {details['problem']}")
    stage.log.close()
    result = Result(name, status, round(time.monotonic() - start, 1), sources, details)
    result_path(name).write_text(json.dumps(asdict(result), indent=1) + "\n")
    return result


def result_path(name: str) -> Path:
    return WORK / f"{name}.json"


def read_result(name: str) -> Result | None:
    try:
        return Result(**json.loads(result_path(name).read_text()))
    except (OSError, TypeError, ValueError):
        return None


def write_summary() -> None:
    """Writes all results so far, including those of earlier calls, into a few files."""
    known = [result for result in map(read_result, STAGES) if result]
    path = WORK / "summary.json"
    path.write_text(json.dumps({"stages": [asdict(result) for result in known]}, indent=1) + "\n")
    logs = [WORK / "logs" / f"{name}.log" for name in STAGES]
    tails = [f"== {log.stem}\n".encode() + log.read_bytes()[-LOG_KEPT:] for log in logs if log.exists()]
    (WORK / "gpu.log").write_bytes(b"\n".join(tails))
    for file in (path, WORK / "gpu.log", *map(junit_path, STAGES)):
        copy_out(file)


def copy_out(file: Path) -> None:
    if OUT and file.exists():
        OUT.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, OUT / file.name)


def print_summary(results: list[Result]) -> None:
    for result in results:
        for outcome, lines in result.details.get("outcomes", {}).items():
            print(f"\n{outcome}:", *lines, sep="\n  ")
        if result.status == "failed":
            print(f"\n{result.stage} failed: {result.details.get('problem')}")
            print(*result.details.get("tail", [])[-15:], sep="\n")
    print(f"\n{'stage':12}{'status':10}{'seconds':>8}")
    for result in results:
        numbers = {key: result.details[key] for key in ("passed", "failed", "skipped") if key in result.details}
        why = result.details.get("problem") or ", ".join(f"{count} {word}" for word, count in numbers.items())
        print(f"{result.stage:12}{result.status:10}{result.seconds:8.1f}  {why}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
