"""The wheel works in a clean environment. Its libraries contain and require what the name of the wheel promises.

`make test` packs what set-up has built as a wheel. `make test-all` builds a wheel, for CUDA if there is an nvcc.
D3S_TEST_WHEEL names another wheel. If that wheel is for another processor, only its files are read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from disassembly import cuobjdump
from helpers import EVERYTHING
from test_build import allowed_shims

import d3s_kernels

if not sys.platform.startswith("linux"):
    pytest.skip("wheels are built on Linux", allow_module_level=True)
pytest.importorskip("auditwheel")
pytest.importorskip("elftools")
pytest.importorskip("packaging")

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from links import SITE, is_external, links  # noqa: E402

TOOL = ROOT / "tools" / "wheel.py"
GIVEN = os.environ.get("D3S_TEST_WHEEL")
OF_THE_TAG = re.search(r"manylinux_\d+_\d+_(\w+)\.whl$", GIVEN or "")
MACHINE = OF_THE_TAG[1] if OF_THE_TAG else platform.machine()
RUNS_HERE = platform.machine() == MACHINE
MACHINE_CODE = {90, 100, 120} | ({80, 86, 89} if MACHINE == "x86_64" else set())
PTX = {120}
PACKED = not EVERYTHING and GIVEN is None  # whether the wheel is packed from what set-up has built
# Libraries that every system with this tag has (PEP 600), and libraries that torch brings.
OF_GLIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
OF_THE_SYSTEM = OF_GLIBC | {"libgcc_s.so.1", "libstdc++.so.6"}
OF_TORCH = {"libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so"}


def toolkit() -> str:
    """The version of the nvcc that the tool would use; "none" if there is no nvcc, or if the nvcc is too old."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None:
        return "none"
    said = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    assert release
    return f"{release[1]}.{release[2]}" if (int(release[1]), int(release[2])) >= (12, 8) else "none"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GIVEN:
        return Path(GIVEN).resolve()
    needed = [name for name in ("pip", "scikit_build_core", "pybind11") if importlib.util.find_spec(name) is None]
    if needed or not os.access(ROOT, os.W_OK):
        pytest.skip(f"needs {', '.join(needed) or 'to write to build/'} to build a wheel")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, TOOL, "set-up" if PACKED else toolkit(), "--out", out]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def local_version(wheel: Path) -> str:
    """cpu or cu130, as the wheel's name promises or set-up has found. The tests below compare the wheel with this."""
    if PACKED:
        assert parse_wheel_filename(wheel.name)[1].local is None
        cuda = d3s_kernels.build_info()["cuda"]
        return "cu" + "".join(cuda.split(".")[:2]) if cuda else "cpu"
    # A wheel for a public index has no such part in its version, and no CUDA.
    return parse_wheel_filename(wheel.name)[1].local or "cpu"


@pytest.fixture(scope="session")
def needs_cuda(local_version: str) -> None:
    if local_version == "cpu":
        pytest.skip("a wheel without CUDA")


def with_dependencies(
    name: str, seen: dict[str, importlib.metadata.Distribution], extras: frozenset[str] = frozenset()
) -> None:
    """Collects the dependencies of a package and its extras. (CUDA builds of torch require extras of
    `cuda-toolkit`.)"""
    known = name in seen
    seen[name] = seen[name] if known else importlib.metadata.distribution(name)
    for requirement in map(Requirement, seen[name].requires or ()):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        by_extra = marker is not None and any(marker.evaluate({"extra": extra}) for extra in extras)
        if (always and not known) or (by_extra and not always):
            with_dependencies(requirement.name, seen, frozenset(requirement.extras))


@dataclass
class Environment:
    python: Path
    packages: Path

    def run(self, *arguments: str | Path) -> str:
        # With -I, neither this folder nor PYTHONPATH is searched. Because of the working directory, the sources are not
        # found either.
        command = [self.python, "-I", *arguments]
        done = subprocess.run(command, cwd=self.packages, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new environment with torch, torch's dependencies and the wheel, and nothing else.

    Links replace another download of torch, which would take minutes. pip installs the wheel without an index, so its
    declared dependencies must be there.
    """
    if not RUNS_HERE:
        pytest.skip(f"a wheel for {MACHINE}, which does not run here")
    folder = tmp_path_factory.mktemp("clean")
    links = folder / "links"
    links.mkdir()
    wanted: dict[str, importlib.metadata.Distribution] = {}
    with_dependencies("torch", wanted)
    for distribution in wanted.values():
        files = distribution.files
        if files is None:
            pytest.skip(f"{distribution.name} does not say which files it has")
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (links / top).exists():
                (links / top).symlink_to(Path(str(distribution.locate_file(top))))

    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (packages / "torch.pth").write_text(f"{links}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    installed = subprocess.run([*pip, "install", "--quiet", "--no-index", wheel], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return Environment(python, packages)


class Binary:
    """The parts of a library that the loader would read."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.needed: set[str] = set()
        self.search_paths: set[str] = set()
        self.undefined: set[str] = set()
        self.sizes: dict[str, int] = {}  # of the sections, in bytes
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.machine = elf["e_machine"]
            for section in elf.iter_sections():
                self.sizes[section.name] = section.data_size
                if isinstance(section, DynamicSection):
                    tags = list(section.iter_tags())
                    self.needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
                    self.search_paths = {str(tag) for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")}
                elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                    names = (symbol.name for symbol in section.iter_symbols() if symbol.entry.st_shndx == "SHN_UNDEF")
                    self.undefined = set(filter(None, names))


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder / "d3s_kernels"


@pytest.fixture(scope="session")
def binaries(unpacked: Path) -> dict[str, Binary]:
    return {path.name.partition(".")[0]: Binary(path) for path in unpacked.glob("*.so")}


def test_the_name(wheel: Path, local_version: str) -> None:
    name, version, _, tags = parse_wheel_filename(wheel.name)
    in_lists = re.search(r"^project\(d3s_kernels VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert in_lists
    assert str(name) == "d3s-kernels"
    assert version.base_version == in_lists[1]
    assert re.fullmatch(r"cpu|cu\d{3}", local_version)
    if GIVEN is None:
        assert local_version == ("cpu" if toolkit() == "none" else "cu" + toolkit().replace(".", ""))
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")}
    assert all(re.fullmatch(r"manylinux_2_\d+_\w+|manylinux(1|2010|2014)_\w+", tag.platform) for tag in tags)


def test_what_is_in_it(wheel: Path, local_version: str) -> None:
    """The wheel has the package, its metadata and, if promised, the CUDA library. It has no library of torch."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"d3s_kernels"}
    libraries = {Path(name).name.partition(".")[0] for name in names if ".so" in name}
    assert libraries - {"_build_info"} == {"_cpu"} | ({"_cuda"} if local_version != "cpu" else set())
    assert "_build_info" in libraries or not RUNS_HERE  # a cross-compiled wheel has none
    assert "d3s_kernels/py.typed" in names


def test_links_of_the_description_lead_somewhere(wheel: Path) -> None:
    """A package index shows the description on its own site, so relative links would not work."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        headers, _, description = file.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    found = list(links(description))
    assert [target for target in found if "/raw/v" in target]
    assert not [target for target in found if not is_external(target) and not target.startswith("#")]
    assert SITE not in description


def test_it_runs_in_a_clean_environment(clean: Environment) -> None:
    assert "WRONG" not in clean.run("-m", "d3s_kernels")


def test_a_python_without_a_module_of_its_own_has_the_same_facts(clean: Environment) -> None:
    """Hides a module file. This is as with a Python version that the builder did not have."""
    say = "import json, d3s_kernels; print(json.dumps(d3s_kernels.build_info()))"
    with_module = clean.run("-c", say)
    (module,) = (clean.packages / "d3s_kernels").glob(f"_build_info.cpython-3{sys.version_info[1]}-*.so")
    hidden = module.rename(module.with_suffix(".hidden"))
    try:
        assert clean.run("-c", say) == with_module
    finally:
        hidden.rename(module)


def test_it_says_what_it_is(clean: Environment, wheel: Path, local_version: str) -> None:
    script = """
import importlib.metadata, json, d3s_kernels
print(json.dumps([d3s_kernels.__file__, d3s_kernels.__version__, importlib.metadata.version("d3s_kernels"),
                  d3s_kernels.build_info()]))
"""
    path, version, of_metadata, info = json.loads(clean.run("-c", script))
    assert Path(path).is_relative_to(clean.packages)
    assert version == of_metadata == info["version"] == str(parse_wheel_filename(wheel.name)[1])
    if local_version == "cpu":
        assert info["cuda"] is None
    else:
        major, minor = info["cuda"].split(".")[:2]
        assert f"cu{major}{minor}" == local_version
        found = {int(name.partition("-")[0]) for name in info["cuda_architectures"].split()}
        assert found == MACHINE_CODE or (PACKED and found <= MACHINE_CODE)


def test_what_its_libraries_need(binaries: dict[str, Binary], local_version: str) -> None:
    """`import torch` does not make libtorch_cuda.so available; libtorch.so brings it on every torch with CUDA."""
    wanted = {name for binary in binaries.values() for name in binary.undefined if re.search("torch|aoti|c10", name)}
    assert set() < wanted <= set(allowed_shims())  # test_build.py compares the table with the target
    assert "libtorch_cpu.so" in binaries["_cpu"].needed
    assert {binary.machine for binary in binaries.values()} == {f"EM_{MACHINE.upper()}"}
    for binary in binaries.values():
        needed = {name for name in binary.needed if not name.startswith("ld-linux")}
        assert needed <= OF_THE_SYSTEM | OF_TORCH, binary.name  # so cudart is inside
        assert not binary.search_paths, binary.name
    if local_version != "cpu":
        assert not [name for name in binaries["_cuda"].undefined if re.match(r"(__)?cuda[A-Z]", name)]
        assert "libtorch.so" in binaries["_cuda"].needed


@pytest.fixture
def costs(wheel: Path) -> dict[str, int]:
    """The size of the code for each architecture, as tools/wheel.py reports it."""
    found: dict[str, int] = runpy.run_path(str(TOOL))["architectures"](wheel)
    return found


@pytest.mark.usefixtures("needs_cuda")
def test_the_costs_of_the_architectures_are_those_of_the_fat_binaries(
    costs: dict[str, int], binaries: dict[str, Binary]
) -> None:
    machine_code = {name for name in costs if name.startswith("sm_")}
    promised = d3s_kernels.build_info()["cuda_architectures"].split() if PACKED else map(str, MACHINE_CODE)
    assert machine_code == {f"sm_{name.partition('-')[0]}" for name in promised}
    # Besides the entries, there are a header of 16 bytes for each source, and padding.
    section = binaries["_cuda"].sizes[".nv_fatbin"]
    assert section - 100 * 16 <= sum(costs.values()) < section


@pytest.mark.skipif(PACKED, reason="make test-all: all architectures are compiled for a wheel alone")
def test_it_is_below_five_megabytes(wheel: Path, local_version: str) -> None:
    if local_version != "cpu" and int(local_version.removeprefix("cu")) < 130:
        pytest.skip("before CUDA 13 code is compressed less, for old drivers")
    assert wheel.stat().st_size < 5e6


@pytest.mark.skipif(PACKED, reason="make test-all: all architectures are compiled for a wheel alone")
@pytest.mark.usefixtures("needs_cuda")
def test_it_holds_all_architectures(unpacked: Path) -> None:
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump")
    library = unpacked / "_cuda.so"
    files: dict[str, list[int]] = {}
    for kind in ("elf", "ptx"):
        said = subprocess.run([tool, f"--list-{kind}", library], check=True, capture_output=True, text=True).stdout
        files[kind] = [int(number) for number in re.findall(r"\.sm_(\d+)\.", said)]
    assert set(files["elf"]) == MACHINE_CODE
    assert set(files["ptx"]) == PTX
    # Every source is compiled for each architecture, so all architectures have the same number of files.
    assert len({files["elf"].count(number) for number in MACHINE_CODE} | {files["ptx"].count(*PTX)}) == 1


def test_the_tag_is_what_auditwheel_computes(wheel: Path) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert said["sym_tag"] in {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}
    assert set(said["external_libs"]) <= OF_TORCH  # only torch's libraries keep the whole wheel from this tag
    assert not said["unsupported_isa"]


@pytest.fixture
def fake_toolkit(tmp_path: Path) -> Path:
    """A toolkit that claims to be CUDA 13.0 and compiles nothing."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    return nvcc.parents[1]


def refused(cuda: str, **environment: str) -> str:
    """The tool's message when it refuses to build. By default, PATH has no nvcc, and no variable names an nvcc."""
    rest = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDACXX")}
    rest["PATH"] = "/nonexistent"
    done = subprocess.run([sys.executable, TOOL, cuda], env=rest | environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("named", ["CUDA_HOME", "CUDACXX", "PATH"])
def test_another_toolkit_is_refused(fake_toolkit: Path, named: str) -> None:
    folder = fake_toolkit / "bin"
    value = {"CUDA_HOME": fake_toolkit, "CUDACXX": folder / "nvcc", "PATH": f"{folder}:/usr/bin:/bin"}[named]
    said = refused("13.1", **{named: str(value)})
    assert f"CUDA=13.1, but {folder / 'nvcc'} is of CUDA 13.0" in said
    assert "set CUDA_HOME to a 13.1 toolkit, or say CUDA=13.0" in said


def test_what_is_no_toolkit_is_named(fake_toolkit: Path, tmp_path: Path) -> None:
    said = "CUDA=13.0, but there is no nvcc in PATH: set CUDA_HOME to a 13.0 toolkit, or say CUDA=none"
    assert said in refused("13.0")
    assert f"no nvcc in {tmp_path}/bin (CUDA_HOME)" in refused("13.0", CUDA_HOME=str(tmp_path))
    for cuda in ("", "13", "cu130", "12.6"):
        assert f"CUDA={cuda}: takes" in refused(cuda, CUDA_HOME=str(fake_toolkit))
    (fake_toolkit / "bin" / "nvcc").write_text("#!/bin/sh\necho 'no licence' >&2\nexit 1\n")
    assert "does not say a release: 'no licence'" in refused("13.0", CUDA_HOME=str(fake_toolkit))
