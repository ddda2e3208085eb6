"""Ops that are made of other ops: the LM head without its logits, and the ops for a vocabulary that ranks share.

``problem`` has the arguments and checks them, ``tiles`` cuts rows x vocabulary, ``forward`` and ``backward`` loop over
the tiles. ``shard`` says which tokens a rank has and communicates with the other ranks. ``at_backward`` is for callers
who have the weight's gradient added to a tensor of theirs. The ops are registered here for all devices, since their
code is the same on each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._dispatch.backends import DEVICES
from .._dispatch.faults import look
from .._dispatch.libraries import by_name
from . import vocab_parallel
from .backward import backward_op
from .forward import forward_op


def _looked_at(**given: Any) -> tuple[Tensor, ...]:
    if not given["hidden"].is_cpu:  # on a CPU the arguments are checked
        look("linear_logprob_entropy", given)
    return forward_op(**given)


KERNELS: dict[str, Callable[..., Any]] = {
    "linear_logprob_entropy": _looked_at,
    "linear_logprob_entropy_backward": backward_op,
    "vocab_parallel_logprob_entropy": vocab_parallel.forward_op,
    "vocab_parallel_linear_logprob_entropy": forward_op,
    "vocab_parallel_linear_logprob_entropy_backward": backward_op,
}
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _name, _kernel in KERNELS.items():
    for _key in DEVICES.values():
        _library.impl(_name, by_name(_name, _kernel), _key)  # type: ignore[no-untyped-call]
