"""Records what the Triton back-end would launch, without a GPU, and compiles it ahead of time for any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from d3s_kernels._triton import launch

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "bool": "i1"}
TYPES |= {"int8": "i8", "int32": "i32", "int64": "i64"}


class Launch(NamedTuple):
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """Compiles as Triton does at the first launch. Multiples of 16 and the number 1 are specialised."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(place,)] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = "*" + TYPES[str(value.dtype).removeprefix("torch.")]
                if value.data_ptr() % 16 == 0:
                    attributes[(place,)] = [["tt.divisibility", 16]]
            elif value == 1 and not parameter.do_not_specialize:
                signature[parameter.name], constants[(place,)] = "constexpr", 1
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self.options)


@contextmanager
def recorded(warp_size: int = 32) -> Iterator[list[Launch]]:
    launches: list[Launch] = []

    def run(self: JITFunction, *arguments: Any, grid: object, warmup: bool, **options: Any) -> None:
        names = [parameter.name for parameter in self.params]
        named = {**dict(zip(names, arguments, strict=False)), **options}
        own = {name: named.pop(name) for name in names}
        launches.append(Launch(self, own, named))

    with patch.object(JITFunction, "run", run), patch.object(launch, "warp_size", lambda: warp_size):
        yield launches
