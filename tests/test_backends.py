"""Which back-end computes an op: how it is chosen, how one is forced, and what is reported."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_identical
from torch import Tensor

import d3s_kernels as d3s
from d3s_kernels import __main__ as report
from d3s_kernels import _torch
from d3s_kernels._dispatch import backends, libraries
from d3s_kernels.check import doctor
from d3s_kernels.check.tolerances import written_arguments

here = pytest.mark.skipif(backends.forced_backend is not None, reason="a back-end is forced")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """The back-ends as the test sets them: name -> why it does not run, or None."""
    reasons: dict[str, str | None] = {"cuda": None, "triton": None, "torch": None}
    monkeypatch.setattr(backends, "why_not", reasons.__getitem__)
    return reasons


@here
def test_the_compiled_library_serves_the_cpu() -> None:
    table = d3s.backends()
    assert set(table) == {name for name in d3s.__all__ if hasattr(torch.ops.d3s_kernels, name)}
    assert {devices["cpu"] for devices in table.values()} == {"cpu"}


def test_the_best_that_there_is(there: dict[str, str | None]) -> None:
    found = [backends._choice(device, None) for device in ("cuda", "xpu", "cpu")]
    assert found == [("cuda",), ("triton", "torch"), ("cpu",)]
    assert (backends.runnable("cuda"), backends.runnable("xpu")) == (("cuda", "triton", "torch"), ("triton", "torch"))
    there["cuda"] = "no library"
    assert backends._choice("cuda", None) == ("triton", "torch")
    there["triton"] = "not installed"
    assert backends._choice("cuda", None) == ("torch",)
    assert backends._choice("xpu", None) == ("torch",)


def test_the_one_that_is_forced(there: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends._choice("cuda", "cuda") == ("cuda",)
    assert backends._choice("cuda", "triton") == ("triton", "torch")  # torch serves where Triton has no kernel
    assert backends._choice("cuda", "torch") == ("torch",)
    assert backends._choice("xpu", "cuda") == ("triton", "torch")  # cuda cannot be forced on xpu
    assert backends._choice("cpu", "cuda") == ("cpu",)
    assert backends._choice("cpu", "torch") == ("torch",)
    monkeypatch.setattr(backends, "_interprets", lambda: False)
    assert backends._choice("cpu", "triton") == ("cpu",)
    monkeypatch.setattr(backends, "_interprets", lambda: True)
    assert backends._choice("cpu", "triton") == ("triton", "torch")


@here
def test_forced_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forced back-end computes inside the block, and only there."""
    calls: list[str] = []

    def kernel(scores: Tensor, *_: object) -> Tensor:
        calls.append("plain")
        return torch.zeros_like(scores, dtype=torch.bool)

    scores, before = torch.randn(3, 9), d3s.backends()
    expected = d3s.topk_mask(scores, k=2)
    monkeypatch.setitem(_torch.KERNELS, "topk_mask", kernel)
    with backends.forced("torch"):
        assert d3s.backends()["topk_mask"]["cpu"] == "torch"
        assert not d3s.topk_mask(scores, k=2).any()
    assert calls == ["plain"]
    assert d3s.backends() == before
    assert_identical(d3s.topk_mask(scores, k=2), expected)


@here
def test_arguments_are_checked_in_the_same_words() -> None:
    """Every back-end refuses a bad argument with the same message, also for an op that is written in Python."""
    wrong = {
        "ratio: got 2": lambda: d3s.topk_mask(torch.randn(3), 2.0),
        "labels: got 9 at row 1": lambda: d3s.logprob_entropy(torch.randn(2, 5), torch.tensor([0, 9])),
        "offsets: ends at 2": lambda: d3s.max_variance_select(torch.randn(3), 1, offsets=torch.tensor([0, 2])),
    }
    for message, call in wrong.items():
        for backend in ("cpu", "torch"):
            with backends.forced(backend), pytest.raises(ValueError, match=message):
                call()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("rocm", ValueError, "got 'rocm'; takes one of 'cuda', 'triton', 'torch'"),
        ("cuda", RuntimeError, "got 'cuda', which does not run here: this torch is built without CUDA"),
    ],
)
def test_what_cannot_be_forced(
    value: str, error: type[Exception], message: str, there: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    there["cuda"] = "this torch is built without CUDA"
    monkeypatch.setenv("D3S_KERNELS_BACKEND", value)
    with pytest.raises(error, match=f"^D3S_KERNELS_BACKEND: {message}$"):
        backends._forced_by_environment()


def test_forced_from_outside() -> None:
    code = "import sys, d3s_kernels as d3s; print({d['cpu'] for d in d3s.backends().values()}, *sys.modules)"
    environment = {**os.environ, "D3S_KERNELS_BACKEND": "torch"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr == ""  # no warning from torch about replaced kernels
    backend, *modules = done.stdout.split()
    assert backend == "{'torch'}"
    assert not {"transformers", "datasets", "trl"} & set(modules)  # what only integrations need


def test_an_old_triton_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert backends._why_not_triton() == "Triton is 3.5.1; takes at least 3.6"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert (backends._why_not_triton() or "").startswith("Triton does not import: ")


def test_a_gpu_without_its_library_says_so_once(there: dict[str, str | None], recwarn: pytest.WarningsRecorder) -> None:
    there.update(cuda="this build has no CUDA library: there was no nvcc", triton="Triton does not import")
    backends._say_once.cache_clear()
    kernel = backends._python_kernel("topk_mask", "torch", "cuda", None)
    for _ in range(2):
        kernel(torch.randn(5), None, None, 2)
    (warning,) = recwarn
    assert str(warning.message) == (
        "d3s_kernels: cuda tensors are computed by plain PyTorch; this build has no CUDA library: there was no nvcc; "
        "Triton does not import; python -m d3s_kernels says more"
    )


def test_the_line_that_brings_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, machine, wheel in (("12.6", "x86_64", "128"), ("13.2", "x86_64", "130"), ("13.0", "aarch64", "130")):
        monkeypatch.setattr(libraries.platform, "machine", lambda machine=machine: machine)
        line = libraries.how_to_get_cuda(cuda).removeprefix("this brings it: ")
        *command, site, wanted = shlex.split(line)
        assert command == ["pip", "install", "--no-deps", "--index-url"]
        assert site.endswith("/simple")
        assert wanted == f"d3s_kernels=={d3s.__version__.partition('+')[0]}+cu{wheel}", (cuda, machine)


def test_where_no_wheel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, machine in (("11.8", "x86_64"), ("14.0", "x86_64"), ("12.8", "aarch64"), ("13.0", "arm64")):
        monkeypatch.setattr(libraries.platform, "machine", lambda machine=machine: machine)
        assert libraries.how_to_get_cuda(cuda).startswith(f"no wheel has one for CUDA {cuda} on this platform"), machine


# ---- GPUs that the CUDA library has no code for ----------------------------------------------------------------------

WHEEL = "80-real 86-real 89-real 90-real 100-real 120"


def test_gpus_for_which_there_is_code_and_none() -> None:
    for architectures, code, none in (
        (WHEEL, "8.0 8.7 8.9 9.0 10.0 10.3 12.0 12.1 13.0", "7.5 11.0"),  # 13.0 by PTX
        ("86-real", "8.6 8.9", "8.0 9.0 12.0"),
        ("86-virtual", "8.6 9.0 12.0", "8.0 7.5"),
        ("90a-real", "9.0", "8.9 10.0"),
        ("100a", "10.0", "10.3 12.0"),
        ("100f", "10.0 10.3", "9.0 11.0"),
        ("native", "7.5 9.0", ""),
    ):
        for capabilities, expected in ((code, True), (none, False)):
            for capability in capabilities.split():
                major, minor = map(int, capability.split("."))
                assert libraries.has_code(architectures, (major, minor)) is expected, (architectures, capability)


def test_the_line_that_compiles_code() -> None:
    for architectures, capability, helps in (
        (WHEEL, (7, 5), "set D3S_KERNELS_BACKEND=torch"),
        (WHEEL, (11, 0), f"CMAKE_CUDA_ARCHITECTURES='{WHEEL.replace(' ', ';')};110-real' ."),
        ("90-virtual", (8, 9), "CMAKE_CUDA_ARCHITECTURES='90-virtual;89-real' ."),
    ):
        assert libraries.how_to_get_code(architectures, capability).endswith(helps)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """A CUDA library with the code of a wheel, and GPUs of the compute capabilities that the test adds."""
    capabilities: list[tuple[int, int]] = []

    def properties(index: int) -> SimpleNamespace:
        major, minor = capabilities[index]
        return SimpleNamespace(name="NVIDIA Thor", major=major, minor=minor)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(libraries, "build_info", lambda: {"cuda_architectures": WHEEL})
    monkeypatch.setattr(libraries, "_why_it_does_not_load", lambda: None)
    monkeypatch.setattr(libraries, "_without_code", None)
    monkeypatch.setattr(backends, "is_built", lambda device: True)
    monkeypatch.setattr(backends, "_serving", {"cuda": dict.fromkeys(_torch.KERNELS, "cuda")})
    library = torch.library.Library("d3s_kernels", "IMPL")
    monkeypatch.setattr(backends, "_library", library)
    yield capabilities
    library._destroy()


@here
def test_gpus_with_code(gpus: list[tuple[int, int]]) -> None:
    gpus += [(9, 0), (12, 1)]
    backends._when_gpus_are_known()
    assert backends.serving("cuda") == {"cuda"}
    assert backends.explain("cuda") == "computed by the compiled CUDA library"


@here
def test_one_gpu_without_code(gpus: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and plain PyTorch serve all GPUs then; where "cuda" is forced, CUDA does not even initialise."""
    gpus += [(9, 0), (11, 0)]
    reason = f"the CUDA library has no code for cuda:1, NVIDIA Thor of compute capability 11.0, only for {WHEEL}; "
    monkeypatch.setattr(backends, "forced_backend", "cuda")
    with pytest.raises(RuntimeError, match=f"^D3S_KERNELS_BACKEND: got 'cuda', which does not run here: {reason}"):
        backends._when_gpus_are_known()
    assert backends.serving("cuda") == {"cuda"}
    monkeypatch.setattr(backends, "forced_backend", None)
    backends._when_gpus_are_known()
    assert backends.serving("cuda") <= {"triton", "torch"}
    said = backends.explain("cuda").partition("; ")[2]
    assert said.startswith(reason)
    assert "110-real' .; CUDA_VISIBLE_DEVICES can hide a GPU from this process" in said
    kernel = torch._C._dispatch_dump("d3s_kernels::topk_mask")
    assert re.search(r"^CUDA: .*backends\.py", kernel, re.MULTILINE)


# ---- python -m d3s_kernels -------------------------------------------------------------------------------------------


@here
def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The report is meant for bug reports: it says what is available and what each back-end computes."""
    assert report.main() == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    assert "D3S_KERNELS_BACKEND: not set" in text
    assert "computed by the compiled CPU library" in text
    head = next(line for line in text.splitlines() if "* serves" in line and line.split()[-1] == "torch")
    assert head.split()[-3:] == ["cpu", "*", "torch"]
    assert "WRONG" not in text


@here
@pytest.mark.parametrize("wrong", [lambda found: found + 1e-5, lambda found: found[..., 1:]], ids=["value", "shape"])
def test_the_report_of_what_is_wrong(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a back-end that serves nothing: it runs, so the report must not say that it does not."""
    right = _torch.KERNELS["group_advantages"]
    monkeypatch.setitem(_torch.KERNELS, "group_advantages", lambda *values, **more: wrong(right(*values, **more)))
    assert report.main() == 1
    text = capsys.readouterr().out
    said, cell = [line for line in text.splitlines() if "WRONG" in line]
    assert " ".join(said.split()).startswith("torch group_advantages: advantages")
    assert cell.split()[0] == "group_advantages"
    assert "does not run here" not in text


@here
@pytest.mark.parametrize("op", _torch.KERNELS)
def test_the_checks_see_a_wrong_kernel(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is compared with plain PyTorch, and all others with the reference."""
    right, written = _torch.KERNELS[op], written_arguments(op)

    def wrong(**arguments: object) -> object:
        results = right(**arguments)
        listed = [results] if isinstance(results, Tensor) else results or [arguments[name] for name in written]
        for result in listed:
            result.logical_not_() if result.dtype == torch.bool else result.add_(1)
        return results

    monkeypatch.setitem(_torch.KERNELS, op, libraries.by_name(op, wrong))
    found = []
    for backend in ("cpu", "torch"):
        with backends.forced(backend):
            found.append(doctor.worst_of(op, torch.device("cpu"), backend))
    assert not all(worst.agrees for worst in found)


@here
def test_the_report_of_what_does_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A back-end that does not run is an error only where it serves; elsewhere the report only mentions it."""

    def broken(*_: object, **__: object) -> None:
        raise OSError("no C compiler")

    monkeypatch.setitem(_torch.KERNELS, "compact", broken)
    assert report.main() == 0
    assert "torch: compact does not run here: OSError at length 8: no C compiler" in capsys.readouterr().out
    monkeypatch.setattr(backends, "serving", lambda device: {"cpu", "torch"})
    assert report.main() == 1


def test_after_a_fault_of_the_device_the_report_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No op is called after the one that failed, and all before it are in the report."""

    def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setitem(_torch.KERNELS, "group_advantages", faulty)
    monkeypatch.setattr(doctor, "_works", lambda device: False)
    monkeypatch.setattr(backends, "runnable", lambda device: ("torch",) if device == "cpu" else ())
    monkeypatch.setattr(backends, "serving", lambda device: {"torch"})
    assert report.main() == 1
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert lines["topk_mask"] == "equal"
    said = "raised RuntimeError at length 8: CUDA error: an illegal memory access was encountered"
    assert lines["group_advantages"] == said
    assert lines["max_variance_select"] == "not run: the device failed at group_advantages"
