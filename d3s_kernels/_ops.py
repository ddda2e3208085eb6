"""Loads the compiled libraries, names the ops, and decides what computes each of them on each kind of device.

    tensors on a CPU    the compiled CPU library
    tensors on a GPU    the compiled CUDA library; without it Triton kernels (``_triton/``), where there is one for the
                        op and the size, and plain PyTorch (``_plain/``) for the rest

``D3S_KERNELS_BACKEND=cuda|triton|torch`` forces one: "torch" on CPUs too, "triton" there only in Triton's interpreter
(``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from . import _build_info

_Kernel = Callable[..., Any]

# The libraries lie beside the compiled module, which is not beside this file in an editable install.
_HERE = Path(str(_build_info.__file__)).parent

torch.ops.load_library(str(_HERE / "_cpu.so"))  # type: ignore[no-untyped-call]
torch.ops.load_library(str(_HERE / "_checks.so"))  # type: ignore[no-untyped-call]

from . import _linear, _plain, _registration, _vocab_parallel  # noqa: E402, F401  # after the schemas

_op = torch.ops.d3s_kernels

# ---- the ops --------------------------------------------------------------------------------------------------------

# How a compiled kernel names an argument that it does not take.
_REFUSAL = re.compile(r"[a-z_]+: .*\b(takes|must|call)\b", re.DOTALL)


def _refusal_as_value_error(op: _Kernel) -> _Kernel:
    @wraps(op)
    def call(*arguments: Any) -> Any:
        try:
            return op(*arguments)
        except RuntimeError as error:
            if type(error) is RuntimeError and _REFUSAL.match(str(error)):
                raise ValueError(str(error)) from None
            raise

    return call


def _refuses_by_value_error() -> bool:
    """Up to torch 2.14 a kernel's std::invalid_argument reaches Python as ValueError, then as RuntimeError."""
    try:
        _op.compact.default(torch.empty(0, dtype=torch.bool), -1)
    except ValueError:
        return True
    except RuntimeError:
        return False
    raise AssertionError("compact takes a capacity of -1")


_public: Callable[[_Kernel], _Kernel] = (lambda op: op) if _refuses_by_value_error() else _refusal_as_value_error

logprob_entropy = _public(_op.logprob_entropy.default)
linear_logprob_entropy = _public(_op.linear_logprob_entropy.default)
vocab_parallel_logprob_entropy = _public(_op.vocab_parallel_logprob_entropy.default)
vocab_parallel_linear_logprob_entropy = _public(_op.vocab_parallel_linear_logprob_entropy.default)
topk_mask = _public(_op.topk_mask.default)
select_tokens = _public(_op.select_tokens.default)
select_tokens_from_logits = _public(_op.select_tokens_from_logits.default)
topk_order_keys = _public(_op.topk_order_keys.default)
topk_count_digit = _public(_op.topk_count_digit.default)
topk_choose_digit_ = _public(_op.topk_choose_digit_.default)
topk_mask_from_key = _public(_op.topk_mask_from_key.default)
compact = _public(_op.compact.default)
group_advantages = _public(_op.group_advantages.default)
max_variance_select = _public(_op.max_variance_select.default)
importance_ratio = _public(_op.importance_ratio.default)
entropy_groups = _public(_op.entropy_groups.default)
adaptive_clip = _public(_op.adaptive_clip.default)


def refuse(op: str, *arguments: Any) -> None:
    """Raises what the op would raise of its arguments, and computes nothing. In a graph the op does it when it runs."""
    if not torch.compiler.is_compiling():
        _public(getattr(torch.ops.d3s_checks, op).default)(*arguments)


# ---- what there is --------------------------------------------------------------------------------------------------

BACKENDS = ("cuda", "triton", "torch")
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU"}  # devices, and what torch's dispatcher calls them
_OLDEST_TRITON = (3, 6)


@cache
def why_not(backend: str) -> str | None:
    """Why this back-end does not run here; None where it does, as far as that shows without a GPU at work."""
    return {"cuda": _why_not_cuda, "triton": _why_not_triton}[backend]() if backend != "torch" else None


def _why_not_cuda() -> str | None:
    library = _HERE / "_cuda.so"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not library.exists():
        return "this build has no CUDA library: there was no nvcc"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the CUDA library does not load: {error}"
    return None


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
    """Whether Triton runs its kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1" and why_not("triton") is None


def _kernels(backend: str) -> Mapping[str, _Kernel]:
    """What a back-end that is written in Python has."""
    if backend == "triton":
        kernels: Mapping[str, _Kernel] = importlib.import_module("d3s_kernels._triton").KERNELS
        return kernels
    return _plain.KERNELS


# ---- who serves what ------------------------------------------------------------------------------------------------

_serving: dict[str, dict[str, str]] = {}  # device -> op -> back-end


def _choice(device: str, forced: str | None) -> tuple[str, ...]:
    """The back-ends that serve a kind of device: one that is compiled has all ops, and Triton leaves some to torch."""
    if device == "cpu":
        if forced == "triton" and _interprets():
            return "triton", "torch"
        return ("torch",) if forced == "torch" else ("cpu",)
    if device == "cuda" and forced in (None, "cuda") and why_not("cuda") is None:
        return ("cuda",)
    return ("triton", "torch") if forced != "torch" and why_not("triton") is None else ("torch",)


def _is_built(device: str) -> bool:
    """Whether this torch knows the device at all: else there is nothing to decide, and Triton is not imported."""
    if device == "cuda":
        return torch.version.cuda is not None or torch.version.hip is not None
    return device == "cpu" or torch.xpu._is_compiled()


def _serve(library: torch.library.Library, forced: str | None) -> None:
    for device, key in DEVICES.items():
        if not _is_built(device):
            continue
        choice = _choice(device, forced)
        _linear.SLICES[device] = _linear.CPU_SLICE if choice[0] == "cpu" else _linear.PORTABLE_SLICE
        if choice[0] in ("cpu", "cuda"):  # registered when its library was loaded
            _serving[device] = dict.fromkeys(_plain.KERNELS, choice[0])
            continue
        _serving[device] = {op: next(name for name in choice if op in _kernels(name)) for op in _plain.KERNELS}
        with warnings.catch_warnings():  # torch's, that a kernel takes the place of a compiled one
            warnings.filterwarnings("ignore", ".*other operators may also be overridden")
            for op, backend in _serving[device].items():
                run = _python_kernel(op, backend, device, forced)
                library.impl(op, run, key, allow_override=True)  # type: ignore[no-untyped-call]


def _python_kernel(op: str, backend: str, device: str, forced: str | None) -> _Kernel:
    check, kernel = getattr(torch.ops.d3s_checks, op).default, _kernels(backend)[op]

    def run(*arguments: Any, **options: Any) -> Any:
        if forced is None:
            _say_once(device)
        with torch.no_grad():
            check(*arguments, **options)
            return kernel(*arguments, **options)

    return run


@cache
def _say_once(device: str) -> None:
    warnings.warn(f"d3s_kernels: {device} tensors are {explain(device)}; python -m d3s_kernels says more", stacklevel=4)


def _forced_by_environment() -> str | None:
    name = os.environ.get("D3S_KERNELS_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"D3S_KERNELS_BACKEND: got {name!r}; takes one of {', '.join(map(repr, BACKENDS))}")
    if name is not None and (reason := why_not(name)):
        raise RuntimeError(f"D3S_KERNELS_BACKEND: got {name!r}, which does not run here: {reason}")
    return name


forced_backend = _forced_by_environment()
why_not("cuda")  # loads its library, which would take the place of whatever had been registered before
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
_serve(_library, forced_backend)

# Made of the ops above: the LM head, a loop over them and torch's matrix products, and what ranks do together. The same
# on every device.
_COMPOSED = {
    "linear_logprob_entropy": _linear.forward,
    "linear_logprob_entropy_backward": _linear.backward,
    "vocab_parallel_logprob_entropy": _vocab_parallel.forward,
    "vocab_parallel_linear_logprob_entropy": _vocab_parallel.linear_forward,
    "vocab_parallel_linear_logprob_entropy_backward": _vocab_parallel.linear_backward,
}
for _key in DEVICES.values():
    for _name, _kernel in _COMPOSED.items():
        _library.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """What D3S_KERNELS_BACKEND does, for a while; "cpu" as well, which changes nothing."""
    before = dict(_serving), dict(_linear.SLICES)
    library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
    _serve(library, backend)
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]  # what was registered before is at work again
        _serving.update(before[0])
        _linear.SLICES.update(before[1])


# ---- what is said of it ---------------------------------------------------------------------------------------------


_STEPS = ("topk_order_keys", "topk_count_digit", "topk_mask_from_key")  # of topk_mask, across ranks


def backends() -> dict[str, dict[str, str]]:
    """What computes each op, for tensors on each kind of device that this torch knows.

    The back-ends are ``"cpu"`` and ``"cuda"``, the compiled libraries; ``"triton"``, for GPUs without a compiled one;
    and ``"torch"``, plain PyTorch, for what Triton has no kernel for. An op that has a Triton kernel hands segments
    that are too long for it to plain PyTorch too. ``python -m d3s_kernels`` gives the reasons, and checks them all.

    Returns:
        ``{op: {device: back-end}}``, with "cpu", "cuda" and "xpu" as devices.

    Example:
        >>> import d3s_kernels as d3s
        >>> d3s.backends()["topk_mask"]["cpu"]
        'cpu'
    """
    ops = {op: op for op in _plain.KERNELS if not op.endswith(("_", "_backward", "_finish")) and op not in _STEPS}
    ops["linear_logprob_entropy"] = "softmax_state_"  # the op that it is a loop over, beside torch's products
    return {op: {device: served[by] for device, served in _serving.items()} for op, by in sorted(ops.items())}


def serving(device: str) -> set[str]:
    return set(_serving[device].values())


def runnable(device: str) -> tuple[str, ...]:
    """The back-ends that can compute there; the one that is forced, if one is."""
    if forced_backend is not None:
        return (_choice(device, forced_backend)[0],)
    if device == "cpu":
        return "cpu", *(["triton"] if _interprets() else []), "torch"
    return tuple(name for name in _possible(device) if why_not(name) is None)


def explain(device: str) -> str:
    """By what tensors there are computed, and why."""
    names = {"cpu": "the compiled CPU library", "cuda": "the compiled CUDA library", "triton": "Triton"}
    served = " and ".join(names.get(name, "plain PyTorch") for name in dict.fromkeys(_choice(device, forced_backend)))
    if forced_backend is not None:
        return f"computed by {served}: D3S_KERNELS_BACKEND={forced_backend}"
    possible = _possible(device)
    better = possible[: possible.index(_choice(device, None)[0])] if possible else ()
    return f"computed by {served}" + "".join(f"; {why_not(name)}" for name in better)


def _possible(device: str) -> tuple[str, ...]:
    """For a GPU, the best first."""
    return () if device == "cpu" else tuple(name for name in BACKENDS if name != "cuda" or device == "cuda")
