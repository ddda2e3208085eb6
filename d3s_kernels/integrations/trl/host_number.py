"""A number that a device computes and the host reads later, when it waits for the device anyway."""

from __future__ import annotations

import torch
from torch import Tensor


class HostNumber:
    """Starts to copy a 0-d integer tensor to the host. ``value`` waits only if the copy is not done by then."""

    def __init__(self, number: Tensor) -> None:
        self._copy, self._done = number, None
        if number.is_cuda:
            pinned = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._copy, self._done = pinned.copy_(number, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(number.device))

    def value(self) -> int:
        if self._done is not None:
            self._done.synchronize()
        return int(self._copy)
