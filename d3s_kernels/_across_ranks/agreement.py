"""What is checked before the first collective: each rank's own arguments, and that they belong to one call.

What a rank refuses by itself it refuses before it takes part in anything; the others then wait for it until the group's
timeout. Under ``D3S_KERNELS_CHECK=1`` the ranks first tell each other what they were given: what one refuses all refuse
at once, in the same words.
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
_TOLD = (TypeError, ValueError, NotImplementedError)  # as they are; others as RuntimeError


def asks() -> bool:
    """Whether ranks tell each other what they were given. A graph is made on each rank by itself, and asks nothing."""
    return checks_everything() and not torch.compiler.is_compiling()


def agree(
    ranks: Ranks, op: str, check: Callable[[], _Checked], alike: Callable[[_Checked], dict[str, Any]]
) -> _Checked:
    """What ``check`` returns, or raises; and where all are asked, raises that ``alike`` is not alike on all ranks."""
    if not asks():
        return check()
    refusal: Exception | None = None
    own: dict[str, Any] = {"call": op}
    try:
        checked = check()
        own |= {name: _sendable(value) for name, value in alike(checked).items()}
    except Exception as error:  # whatever it is: the other ranks are waiting to hear of it
        refusal = error
    everyones: list[Any] = [None] * ranks.size
    told = refusal and (type(refusal) if type(refusal) in _TOLD else RuntimeError, str(refusal))
    dist.all_gather_object(everyones, (None if told else own, told), group=ranks.group)
    for rank, (_, refused) in enumerate(everyones):
        if refused is not None:
            raise refused[0](f"{refused[1]} (on rank {rank} of {ranks.size})") from refusal
    first = everyones[0][0]
    for rank, (given, _) in enumerate(everyones):
        for name in first:  # "call" comes first: other calls have other arguments
            if given[name] != first[name]:
                raise ValueError(
                    f"{name}: got {_shortened(first[name])} on rank 0 and {_shortened(given[name])} on rank {rank}; "
                    "takes the same on all ranks of the process group"
                )
    return checked


def _sendable(value: Any) -> Any:
    """What can be sent and compared."""
    return ("tensor", str(value.dtype), value.tolist()) if isinstance(value, Tensor) else value


def _shortened(value: Any) -> str:
    text = repr(value[2] if isinstance(value, tuple) and value[:1] == ("tensor",) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
