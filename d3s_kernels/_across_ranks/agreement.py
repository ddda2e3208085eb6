"""Checks before the first collective: each rank's own arguments, and that all ranks make the same call.

A rank that refuses its arguments raises before it takes part in a collective; the others then wait for it until the
group's timeout. Under ``D3S_KERNELS_CHECK=1`` the ranks first exchange their arguments, and if one refuses its own, all
raise the same error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import checks_everything
from .._groups import Ranks

_Checked = TypeVar("_Checked")
_TOLD = (TypeError, ValueError, NotImplementedError)  # raised on all ranks as they are; others as RuntimeError


def asks() -> bool:
    """Whether the ranks exchange their arguments. Under torch.compile they do not: each rank traces by itself."""
    return checks_everything() and not torch.compiler.is_compiling()


def agree(
    ranks: Ranks, op: str, check: Callable[[], _Checked], alike: Callable[[_Checked], dict[str, Any]]
) -> _Checked:
    """Returns what ``check`` returns, or raises what it raises. If the ranks exchange arguments, all of them raise if
    one does, or if a value of ``alike`` differs between ranks.
    """
    if not asks():
        return check()
    refusal: Exception | None = None
    own: dict[str, Any] = {"call": op}
    try:
        checked = check()
        own |= {name: _sendable(value) for name, value in alike(checked).items()}
    except Exception as error:  # any error: the other ranks are waiting for this rank's answer
        refusal = error
    everyones: list[Any] = [None] * ranks.size
    told = refusal and (type(refusal) if type(refusal) in _TOLD else RuntimeError, str(refusal))
    dist.all_gather_object(everyones, (None if told else own, told), group=ranks.group)
    for rank, (_, refused) in enumerate(everyones):
        if refused is not None:
            raise refused[0](f"{refused[1]} (on rank {rank} of {ranks.size})") from refusal
    first = everyones[0][0]
    for rank, (given, _) in enumerate(everyones):
        for name in first:  # "call" is compared first: other ops have other arguments
            if given[name] != first[name]:
                raise ValueError(
                    f"{name}: got {_shortened(first[name])} on rank 0 and {_shortened(given[name])} on rank {rank}; "
                    "takes the same on all ranks of the process group"
                )
    return checked


def _sendable(value: Any) -> Any:
    """The value in a form that can be sent and compared."""
    return ("tensor", str(value.dtype), value.tolist()) if isinstance(value, Tensor) else value


def _shortened(value: Any) -> str:
    text = repr(value[2] if isinstance(value, tuple) and value[:1] == ("tensor",) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
