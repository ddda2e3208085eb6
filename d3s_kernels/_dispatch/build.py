"""The facts about this build, and the folder with the compiled libraries."""

from __future__ import annotations

import ctypes
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch  # noqa: F401  loads shared libraries that the CPU library needs


def _folder() -> Path:
    """Returns the folder with the compiled libraries. In an editable install, this Python file is in another folder."""
    library = find_spec("d3s_kernels._cpu")  # located like a module, but never imported
    if library is None or library.origin is None:
        raise ImportError(
            f"d3s_kernels: imported from {Path(__file__).parents[1]}, which has no compiled library. Start Python "
            "outside the source folder, or install the package with pip install --no-build-isolation -e ."
        )
    return Path(library.origin).parent


FOLDER = _folder()


def build_info() -> dict[str, Any]:
    """Returns the facts about this build: version, compiler, torch, SIMD levels and CUDA architectures.

    Returns:
        ``version``, ``compiler``, ``torch_target`` (the oldest torch that the build runs on), ``torch_built_against``,
        ``simd_levels`` (all compiled levels), ``simd`` (the level that is used on this machine), ``cuda`` (None in a
        build without CUDA) and ``cuda_architectures``.

    Example:
        >>> import d3s_kernels as d3s
        >>> d3s.build_info()["torch_target"]
        '2.11'
    """
    # In a wheel, only the file _build_info is compiled for one particular version of Python. On any other version of
    # Python, the build's facts come from the CPU library.
    try:
        text = import_module("d3s_kernels._build_info").build_facts()
    except ModuleNotFoundError:
        function = ctypes.CDLL(str(FOLDER / "_cpu.so")).d3s_kernels_build_facts
        function.restype = ctypes.c_char_p
        text = function()
    facts: dict[str, Any] = json.loads(text)
    return facts
