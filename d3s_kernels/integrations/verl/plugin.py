"""The plug-in that verl loads in each of its processes (entry point ``verl.plugins``).

:func:`install` registers our names and replaces functions of verl; no other function of this package does this. Each
module lists its replacements in ``REPLACED``. :func:`uninstall` restores verl's functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from typing import Any

from .._versions import untested
from .replaced import Replaced

_SETTINGS = {
    "loss": "actor.policy_loss.loss_mode=d3s or espo",
    "entropy": "actor.policy_loss.entropy_source",
    "head": "model.fused_kernel_options.impl_backend=d3s",
    "megatron": "model.fused_kernel_options.impl_backend=d3s with strategy=megatron",
    "trainer": "trainer.v1.trainer_mode=d3s_sync",
    "modes": "the refusal of trainer.v1.d3s_sync where verl ignores it",
}
# The packages without which verl cannot import what a module of ours adds to.
_NEEDS = {"trainer": "transfer_queue", "megatron": "megatron.core"}
_replaced: list[tuple[Replaced, Any, Any]] = []  # the replacements that were made, each with the original and ours
_installed: set[str] = set()


def install() -> None:
    """Registers our names, and replaces verl's functions. Warns about each setting that is not available."""
    if (wrong := untested("verl", importlib.metadata.version("verl"), "0.9.1", "0.9.2", "tests/verl")) is not None:
        warnings.warn(f"{wrong}. Nothing was registered", RuntimeWarning, stacklevel=2)
        return
    for module, setting in _SETTINGS.items():
        if module in _installed or not _is_there(_NEEDS.get(module)):
            continue
        before = len(_replaced)
        try:
            loaded = importlib.import_module(f"{__package__}.{module}")
            if getattr(loaded.__spec__, "_initializing", False) and module in ("entropy", "head", "megatron", "modes"):
                raise ImportError("it was imported before verl, which loads the plug-in; import verl first")
            for replaced in getattr(loaded, "REPLACED", ()):
                _replace(replaced)
        except Exception as error:  # only a warning, since verl would hide an error
            _undo(before)  # a module makes either all of its replacements, or none
            warnings.warn(
                f"d3s_kernels: {setting} is not available: {__package__}.{module} could not be used: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            _installed.add(module)


def _is_there(package: str | None) -> bool:
    try:
        return package is None or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False


def uninstall() -> None:
    """Restores verl's own functions. Our names stay registered, but settings that need a replacement no longer work."""
    _undo(0)
    _installed.clear()


def _undo(before: int) -> None:
    """Undoes the latest replacements, until only ``before`` of them are left."""
    while len(_replaced) > before:
        replaced, original, ours = _replaced.pop()
        _put(replaced, ours, original)


def _replace(replaced: Replaced) -> None:
    original = getattr(replaced.owner, replaced.name)
    parameters = list(inspect.signature(original).parameters)
    if parameters[: len(replaced.takes) if replaced.passes_the_rest_on else None] != replaced.takes:
        raise RuntimeError(f"verl's {replaced.name} takes {parameters}; expected {replaced.takes}, as in verl 0.9.1")
    ours = replaced.by
    if not isinstance(original, type):

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return replaced.by(original, *args, **kwargs)

    _put(replaced, original, ours)
    _replaced.append((replaced, original, ours))


def _put(replaced: Replaced, before: Any, after: Any) -> None:
    """Replaces ``before`` by ``after`` in the owner, and in each module of ``held_by`` that imported ``before``."""
    for owner in (replaced.owner, *(sys.modules[name] for name in replaced.held_by if name in sys.modules)):
        if getattr(owner, replaced.name, None) is before:
            setattr(owner, replaced.name, after)


install()
