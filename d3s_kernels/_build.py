"""What this build holds and what runs here, and the folder in which its libraries lie.

A wheel has a compiled module, ``_build_info``, for each version of Python that its builder had. On another version the
same facts come from the CPU library: no other file depends on the version.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch  # noqa: F401  the CPU library needs its libraries


def _located() -> tuple[Path, Callable[[], str]]:
    """The folder of the libraries, and the function that has the facts."""
    try:
        module = import_module(f"{__package__}._build_info")
    except ModuleNotFoundError:
        return Path(__file__).parent, _of_library
    # In an editable install, the compiled files lie in another folder than this one.
    return Path(str(module.__file__)).parent, module.build_facts


def _of_library() -> str:
    library = Path(__file__).parent / "_cpu.so"
    if not library.exists():
        raise ImportError(
            f"d3s_kernels: imported from {library.parent}, which has no compiled library. Start Python outside the "
            "source folder, or install the package with pip install --no-build-isolation -e ."
        )
    facts = ctypes.CDLL(str(library)).d3s_kernels_build_facts
    facts.restype = ctypes.c_char_p
    text: bytes = facts()
    return text.decode()


FOLDER, _facts = _located()


def build_info() -> dict[str, Any]:
    """What this build holds and what runs here: version, compiler, torch, SIMD levels, CUDA and its architectures.

    Returns:
        ``version``, ``compiler``, ``torch_target`` (the oldest torch that it runs on), ``torch_built_against``,
        ``simd_levels`` (compiled) and ``simd`` (which runs here), ``cuda`` (None without) and ``cuda_architectures``.

    Example:
        >>> import d3s_kernels as d3s
        >>> d3s.build_info()["torch_target"]
        '2.11'
    """
    facts: dict[str, Any] = json.loads(_facts())
    return facts
