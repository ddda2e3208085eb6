"""Ops that are made of other ops: the LM head without its logits, and the ops for a vocabulary that ranks share.

``problem`` checks the arguments, ``tiles`` cuts rows x vocabulary, ``forward`` and ``backward`` loop over the tiles.
``shard`` says which tokens a rank has and communicates with the other ranks. The ops are registered here for all
devices, since their code is the same on each.
"""

from functools import partial

import torch

from .._dispatch.backends import DEVICES
from . import vocab_parallel
from .backward import backward_of_shard
from .forward import forward_of_shard
from .shard import WHOLE

KERNELS = {
    "linear_logprob_entropy": partial(forward_of_shard, WHOLE),
    "linear_logprob_entropy_backward": partial(backward_of_shard, WHOLE),
    "vocab_parallel_logprob_entropy": vocab_parallel.forward,
    "vocab_parallel_linear_logprob_entropy": vocab_parallel.linear_forward,
    "vocab_parallel_linear_logprob_entropy_backward": vocab_parallel.linear_backward,
}
_library = torch.library.Library("d3s_kernels", "IMPL")  # type: ignore[no-untyped-call]
for _key in DEVICES.values():
    for _name, _kernel in KERNELS.items():
        _library.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]
