"""Decides which back-end computes each op on each kind of device, and lets the user force a back-end.

    tensors on a CPU    the compiled CPU library
    tensors on a GPU    the compiled CUDA library; without this library, or if it has no code for a GPU that is here,
                        Triton (``_triton/``) for the ops and sizes that have a Triton kernel, and plain PyTorch
                        (``_torch/``) for the rest

``D3S_KERNELS_BACKEND=cuda|triton|torch`` forces a back-end. If "torch" is forced, it also serves CPUs. If "triton" is
forced, it serves CPUs only in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from .. import _torch, reference
from .build import build_info
from .faults import look
from .libraries import argument_names, look_for_code, why_not_cuda

_Kernel = Callable[..., Any]

# ---- the back-ends --------------------------------------------------------------------------------------------------

BACKENDS = ("cuda", "triton", "torch")
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}  # kinds of devices, and their dispatch keys in torch
_OLDEST_TRITON = (3, 6)


def why_not(backend: str) -> str | None:
    """Returns why this back-end does not run here, or None if it should run. The check launches nothing on a GPU."""
    if backend == "cuda":
        return why_not_cuda()
    return _why_not_triton() if backend == "triton" else None


def _why_not_triton() -> str | None:
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        return f"Triton does not import: {error}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _OLDEST_TRITON:
        return f"Triton is {triton.__version__}; takes at least {'.'.join(map(str, _OLDEST_TRITON))}"
    return None


@cache
def _interprets() -> bool:
    """Returns whether Triton runs its kernels on CPU tensors, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1" and why_not("triton") is None


def _kernels(backend: str) -> Mapping[str, _Kernel]:
    """Returns the kernels of a back-end that is written in Python, by the names of their ops."""
    if backend == "triton":
        kernels: Mapping[str, _Kernel] = importlib.import_module("d3s_kernels._triton").KERNELS
        return kernels
    return _torch.KERNELS


# ---- half-precision products on a CPU -------------------------------------------------------------------------------


@cache
def half_products() -> tuple[torch.dtype, ...]:
    """Returns the half-precision dtypes for which torch uses a dot-product instruction of this CPU."""
    if build_info()["simd"] != "avx512_bf16":
        return ()
    return torch.bfloat16, *((torch.float16,) if torch.ops.mkldnn._is_mkldnn_fp16_supported() else ())


# ---- which back-end serves an op ------------------------------------------------------------------------------------

_serving: dict[str, dict[str, str]] = {}  # device -> op -> back-end

# A back-end reduces each slice of a row to one softmax state. SLICES has the slice length in columns for each kind of
# device. CPU_SLICE is kSlice of the compiled CPU library (csrc/cpu/softmax_rows.h). GPU_SLICE is for all other
# back-ends: kSlice in csrc/cuda/ and SLICE in _triton/. Both are multiples of the slice length in _torch/.
CPU_SLICE, GPU_SLICE = 8192, 32768
SLICES = {"cpu": CPU_SLICE, "cuda": GPU_SLICE, "xpu": GPU_SLICE}


def _choice(device: str, forced: str | None) -> tuple[str, ...]:
    """Returns the back-ends for a kind of device. The first back-end that has a kernel for an op computes the op."""
    if device == "cpu":
        if forced == "triton" and _interprets():
            return "triton", "torch"
        return ("torch",) if forced == "torch" else ("cpu",)
    if device == "cuda" and forced in (None, "cuda") and why_not("cuda") is None:
        return ("cuda",)
    return ("triton", "torch") if forced != "torch" and why_not("triton") is None else ("torch",)


def is_built(device: str) -> bool:
    """Returns whether this torch supports this kind of device. For any other kind, no kernels are registered, so Triton
    is not needed.
    """
    if device == "cuda":
        return torch.version.cuda is not None or torch.version.hip is not None
    return device == "cpu" or torch.xpu._is_compiled()


def _serve(library: torch.library.Library, forced: str | None, devices: Iterable[str] = DEVICES) -> None:
    for device in filter(is_built, devices):
        choice = _choice(device, forced)
        SLICES[device] = CPU_SLICE if choice[0] == "cpu" else GPU_SLICE
        if choice[0] in ("cpu", "cuda"):  # loading the library has registered its kernels
            _serving[device] = dict.fromkeys(_torch.KERNELS, choice[0])
            continue
        _serving[device] = {op: next(name for name in choice if op in _kernels(name)) for op in _torch.KERNELS}
        with warnings.catch_warnings():  # torch warns that a compiled kernel is overridden
            warnings.filterwarnings("ignore", ".*other operators may also be overridden")
            for op, backend in _serving[device].items():
                run = _python_kernel(op, backend, device, forced)
                library.impl(op, run, DEVICES[device], allow_override=True)  # type: ignore[no-untyped-call]


def reads_masked_rows(device: str) -> bool:
    """Returns whether the ops over logits read the rows that their mask excludes: only plain PyTorch does."""
    return _serving.get(device, {}).get("logprob_entropy") == "torch"


def _python_kernel(op: str, backend: str, device: str, forced: str | None) -> _Kernel:
    """Wraps a kernel of ``_triton`` or ``_torch``, so that its arguments are checked first. If a Triton kernel returns
    NotImplemented, plain PyTorch computes the op.
    """
    check, kernel, in_torch = getattr(torch.ops.d3s_checks, op).default, _kernels(backend)[op], _torch.KERNELS[op]
    names = argument_names(op)

    def run(*arguments: Any, **options: Any) -> Any:
        if forced is None:
            _say_once(device)
        with torch.no_grad():
            check(*arguments, **options)
            look(op, dict(zip(names, arguments, strict=False)) | options)
            result = kernel(*arguments, **options)
            return in_torch(*arguments, **options) if result is NotImplemented else result

    return run


@cache
def _say_once(device: str) -> None:
    warnings.warn(f"d3s_kernels: {device} tensors are {explain(device)}; python -m d3s_kernels says more", stacklevel=4)


def _forced_by_environment() -> str | None:
    name = os.environ.get("D3S_KERNELS_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"D3S_KERNELS_BACKEND: got {name!r}; takes one of {', '.join(map(repr, BACKENDS))}")
    _require_forced(name)
    return name


def _require_forced(name: str | None) -> None:
    if name is not None and (reason := why_not(name)):
        raise RuntimeError(f"D3S_KERNELS_BACKEND: got {name!r}, which does not run here: {reason}")


forced_backend = _forced_by_environment()
why_not("cuda")  # loads the CUDA library now: if loaded later, it would replace the kernels registered below
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
_serve(_library, forced_backend)


def _when_gpus_are_known() -> None:
    """If the CUDA library has no code for a GPU of this process, Triton and plain PyTorch serve GPUs from now on; under
    ``D3S_KERNELS_BACKEND=cuda``, raises RuntimeError instead.
    """
    look_for_code()
    if why_not("cuda") is not None:
        _require_forced(forced_backend)
        _serve(_library, forced_backend, ["cuda"])


# Torch calls this function when it initialises CUDA, before there is a tensor on a GPU, or now if CUDA is initialised.
# To ask for the GPUs at import would initialise CUDA, and then a process that is forked later could not use it. NVML
# would not, but it does not know every GPU (Jetson), and counts GPUs in another order than CUDA.
if why_not("cuda") is None:
    torch.cuda._lazy_call(_when_gpus_are_known)  # type: ignore[no-untyped-call]


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Forces a back-end within a ``with`` block, as D3S_KERNELS_BACKEND does for the whole process. The name "cpu"
    means the compiled CPU library.
    """
    before = dict(_serving), dict(SLICES)
    library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
    _serve(library, backend)
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]  # restores the kernels that were registered before
        _serving.update(before[0])
        SLICES.update(before[1])


# ---- reports --------------------------------------------------------------------------------------------------------


def backends() -> dict[str, dict[str, str]]:
    """Returns the back-end of each op on each kind of device that this torch supports, for users and bug reports.

    ``"cpu"`` and ``"cuda"`` are the compiled libraries. ``"triton"`` serves GPUs on which no compiled library runs.
    ``"torch"`` is plain PyTorch, for ops without a Triton kernel and for segments that are too long for Triton.
    ``python -m d3s_kernels`` says why each back-end was chosen, and checks all back-ends. Whether the CUDA library has
    code for the GPUs that are here is known from the moment when torch initialises CUDA.

    Returns:
        ``{op: {device: back-end}}``, with "cpu", "cuda" and "xpu" as devices.

    Example:
        >>> import d3s_kernels as d3s
        >>> d3s.backends()["topk_mask"]["cpu"]
        'cpu'
    """
    ops = {op: op for op in _torch.KERNELS if hasattr(reference, op)}  # the others are only steps of these ops
    # The LM head calls one of these ops and torch's matrix products in a loop.
    ops["linear_logprob_entropy"] = "softmax_state_"
    ops |= dict.fromkeys(("token_logprobs", "linear_token_logprobs"), "token_softmax_state_")
    ops |= dict.fromkeys(("topk_logprobs", "linear_topk_logprobs"), "topk_softmax_state_")
    return {op: {device: served[by] for device, served in _serving.items()} for op, by in sorted(ops.items())}


def serving(device: str) -> set[str]:
    return set(_serving[device].values())


def runnable(device: str) -> tuple[str, ...]:
    """Returns the back-ends that can run on this kind of device. If D3S_KERNELS_BACKEND forces a back-end, returns only
    the back-end that then serves this kind of device.
    """
    if forced_backend is not None:
        return (_choice(device, forced_backend)[0],)
    if device == "cpu":
        return "cpu", *(["triton"] if _interprets() else []), "torch"
    return tuple(name for name in _possible(device) if why_not(name) is None)


def explain(device: str) -> str:
    """Says which back-ends compute the ops for tensors on this kind of device, and why."""
    names = {"cpu": "the compiled CPU library", "cuda": "the compiled CUDA library", "triton": "Triton"}
    served = " and ".join(names.get(name, "plain PyTorch") for name in dict.fromkeys(_choice(device, forced_backend)))
    if forced_backend is not None:
        return f"computed by {served}: D3S_KERNELS_BACKEND={forced_backend}"
    possible = _possible(device)
    better = possible[: possible.index(_choice(device, None)[0])] if possible else ()
    return f"computed by {served}" + "".join(f"; {why_not(name)}" for name in better)


def _possible(device: str) -> tuple[str, ...]:
    """Returns the back-ends that may serve a kind of GPU, in order of preference. For a CPU, returns an empty tuple."""
    return () if device == "cpu" else tuple(name for name in BACKENDS if name != "cuda" or device == "cuda")
