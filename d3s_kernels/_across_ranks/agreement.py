"""Checks before the first collective: each rank's own arguments, and that all ranks make the same call.

A rank that refuses its arguments raises before it takes part in a collective; the others then wait for it until the
group's timeout. Under ``D3S_KERNELS_CHECK=1`` the ranks first exchange their arguments, and if one refuses its own, all
raise the same error at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._arguments import checks_everything
from .._groups import Ranks

_Checked = TypeVar("_Checked")
# The errors that all ranks raise as they are, by the name that is sent; the others become a RuntimeError.
_TOLD = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError)}


def asks() -> bool:
    """Whether the ranks exchange their arguments. Under torch.compile they do not: each rank traces by itself."""
    return checks_everything() and not torch.compiler.is_compiling()


def agree(
    ranks: Ranks, op: str, check: Callable[[], _Checked], alike: Callable[[_Checked], dict[str, Any]]
) -> _Checked:
    """Returns what ``check`` returns, or raises what it raises. If the ranks exchange arguments, all of them raise if
    one does, or if a value of ``alike`` differs between ranks. What they exchange is JSON.
    """
    if not asks():
        return check()
    refusal: Exception | None = None
    try:
        checked = check()
        own = {"call": op} | {name: _sendable(value) for name, value in alike(checked).items()}
        message = json.dumps({"given": own}, default=repr)
    except Exception as error:  # any error: the other ranks are waiting for this rank's answer
        refusal = error
        message = json.dumps({"refused": [type(error).__name__, str(error)]})
    everyones: list[dict[str, Any]] = [json.loads(text) for text in ranks.gather_text(message)]
    for rank, said in enumerate(everyones):
        if "refused" in said:
            kind, text = said["refused"]
            raise _TOLD.get(kind, RuntimeError)(f"{text} (on rank {rank} of {ranks.size})") from refusal
    require_alike([said["given"] for said in everyones])
    return checked


def require_alike(everyones: list[dict[str, Any]]) -> None:
    """Raises if a value differs between ranks."""
    first = everyones[0]
    for rank, given in enumerate(everyones):
        for name in first:  # "call" is compared first: other ops have other arguments
            if given[name] != first[name]:
                raise ValueError(
                    f"{name}: got {_shortened(first[name])} on rank 0 and {_shortened(given[name])} on rank {rank}; "
                    "takes the same on all ranks of the process group"
                )


def _sendable(value: Any) -> Any:
    """The value in a form that JSON has and that can be compared."""
    return ["tensor", str(value.dtype), value.tolist()] if isinstance(value, Tensor) else value


def _shortened(value: Any) -> str:
    text = repr(value[2] if isinstance(value, list) and value[:1] == ["tensor"] else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
