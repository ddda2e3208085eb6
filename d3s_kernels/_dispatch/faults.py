"""Warns of invalid values on a GPU, such as a ratio of 0 or a label that is not in the vocabulary.

A check on the host would cause a host sync. So an op that meets an invalid value gives NaN or selects nothing, and the
next op warns. Compiled kernels note faults in host memory (``csrc/ops/faults.h``); this costs nothing while there is no
fault. Triton and plain PyTorch note no faults. For these two, ``D3S_KERNELS_CHECK=late`` checks the arguments on the
device, and copies the results of the checks to the host without a host sync.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The text of the warning for each kind of fault, in the order of the enum Fault of csrc/ops/faults.h.
FAULTS = {
    "ratio": "a ratio outside of (0, 1], and selected nothing",
    "keep": "a number to keep below 1, and selected nothing",
    "offsets": "offsets that start after 0, decrease, or do not end at the number of values; values that they leave "
    "out are not selected, or NaN",
    "groups": "a group of 16 or more, which gave NaN",
    "labels": "a label that is neither -100 nor a token that its row has, which gave NaN",
    "temperature": "a temperature outside of [1e-15, 1e15], which gave NaN",
    "supports": "a sampling mask whose offsets are no offsets or whose ids are no tokens, which gave NaN",
    "dense_rows": "more rows without a support than max_dense_rows, which made all rows NaN",
    "token_ids": "a token id that is neither -1 nor in the vocabulary, which made its row NaN",
}
PUBLIC_OPS = (  # in the order of PublicOp in csrc/ops/faults.h
    "entropy",
    "logprob_entropy",
    "linear_logprob_entropy",
    "token_logprobs",
    "topk_logprobs",
    "topk_mask",
    "select_tokens",
    "select_tokens_from_logits",
    "max_variance_select",
    "group_advantages",
    "importance_ratio",
    "entropy_groups",
    "adaptive_clip",
)
_ADVICE = (
    "D3S_KERNELS_CHECK=1 has values checked before each op, which names the place, and waits for the device; "
    "D3S_KERNELS_CHECK=error makes this warning an error"
)
_told: set[tuple[str, str]] = set()  # the pairs (op, key of FAULTS) of earlier warnings
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def tell() -> None:
    """Warns of the faults that ops have met, once for each op and kind of fault, without a host sync. Under
    ``D3S_KERNELS_CHECK=error``, raises RuntimeError instead.
    """
    met = [] if _noted is None else _noted.take()
    if not met and not _looks:
        return
    for each in [each for each in _looks if each.arrived is None or each.arrived.query()]:
        _looks.remove(each)
        answers = zip(each.faults, each.answers.tolist(), strict=True)
        met += [(each.op, fault) for fault, is_bad in answers if is_bad]
    for op, fault in met:
        message = f"d3s_kernels: {op} met, on a GPU, {FAULTS[fault]}. {_ADVICE}"
        if _setting() == "error":
            raise RuntimeError(message)
        if (op, fault) not in _told:
            _told.add((op, fault))
            frame, level = sys._getframe(), 1  # the level of the first frame outside of this package
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
                frame, level = frame.f_back, level + 1
            warnings.warn(message, RuntimeWarning, stacklevel=level)


def synchronize_checks() -> None:
    """Waits for the GPUs, and then warns of the bad values that ops have met so far.

    Bad values are, for example, a ratio outside of (0, 1], offsets that decrease, or a label that is not in the
    vocabulary. If bad values are in a tensor on a GPU, an op could refuse them only with a host sync. So the op selects
    nothing or gives NaN, and the next call of any op warns. Call this function at the end of a program, and in tests.
    On a CPU, ops refuse bad values themselves.

    Warns:
        RuntimeWarning: once for each op and kind of fault.

    Raises:
        RuntimeError: instead of the warning, under ``D3S_KERNELS_CHECK=error``.

    Example:
        >>> import d3s_kernels as d3s
        >>> d3s.synchronize_checks()
    """
    for devices in (torch.cuda, torch.xpu):
        if devices.is_initialized():
            for index in range(devices.device_count()):
                devices.synchronize(index)
    if not torch.compiler.is_compiling():
        tell()


def _setting() -> str | None:
    return os.environ.get("D3S_KERNELS_CHECK")


# ---- noted by compiled kernels --------------------------------------------------------------------------------------


class _Noted:
    """The memory in which the kernels of a library note faults: one byte for each pair of an op and a fault."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self.meanings = [(op, fault) for op in PUBLIC_OPS for fault in FAULTS]
        self.nothing = bytes(len(self.meanings))
        library.d3s_kernels_faults.restype = ctypes.POINTER(ctypes.c_void_p)
        # The address of a pointer to this memory. The pointer is null until an op has run on a GPU.
        self.address = library.d3s_kernels_faults()
        self.memory: ctypes.Array[ctypes.c_char] | None = None

    def take(self) -> list[tuple[str, str]]:
        """Returns the faults that were noted since the previous call, and erases them."""
        if self.memory is None:
            if self.address[0] is None:
                return []
            self.memory = (ctypes.c_char * len(self.nothing)).from_address(self.address[0])
        bytes_now = self.memory.raw
        if bytes_now == self.nothing:
            return []
        places = [i for i, byte in enumerate(bytes_now) if byte]
        for i in places:
            self.memory[i] = b"\0"
        return [self.meanings[i] for i in places]


_noted: _Noted | None = None


def watch(library: str) -> None:
    """Makes :func:`tell` read the faults that the kernels of this library note."""
    global _noted
    _noted = _Noted(library)


def watches() -> bool:
    """Returns whether :func:`watch` was called."""
    return _noted is not None


# ---- checked on the device, if the kernels note nothing -------------------------------------------------------------


@dataclass(eq=False)
class _Look:
    """The results of the checks for one call of an op: ``answers`` has a flag for each kind of fault in ``faults``."""

    op: str
    faults: tuple[str, ...]
    answers: Tensor
    arrived: torch.Event | None  # after this event, the answers are on the host; None if they already are


_looks: list[_Look] = []

# Maps each op whose arguments are checked to the public op that warnings name.
_LOOKED_AT = {op: op for op in PUBLIC_OPS} | dict.fromkeys(("topk_order_keys", "topk_choose_digit_"), "topk_mask")
_LOOKED_AT |= dict.fromkeys(("logprob_entropy_no_grad", "support_logprob_entropy"), "logprob_entropy")


def public_name(op: str, arguments: Mapping[str, Any]) -> str:
    name = _LOOKED_AT[op]
    return "entropy" if name == "logprob_entropy" and arguments.get("labels") is None else name


def look(op: str, arguments: Mapping[str, Any]) -> None:
    """With ``D3S_KERNELS_CHECK=late`` or ``error``, checks the values of an op's arguments on their device."""
    if op not in _LOOKED_AT or _setting() not in ("late", "error"):
        return
    bad = dict(_bad_values(arguments))
    if not bad:
        return
    op = public_name(op, arguments)
    flags = torch.stack([flag.reshape(()) for flag in bad.values()])
    if flags.is_cpu:
        _looks.append(_Look(op, tuple(bad), flags, None))
        return
    if flags.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # each replay of the graph would write new answers, and nothing would read them
    answers = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
    answers.copy_(flags, non_blocking=True)
    event = torch.Event(flags.device)
    event.record()
    _looks.append(_Look(op, tuple(bad), answers, event))


def _bad_values(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """For each argument that can have bad values, yields the key in FAULTS, and a bool tensor on the argument's device:
    whether any value of the argument is bad.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if (ratio := tensors.get("ratio_tensor")) is not None:
        yield "ratio", ~((ratio > 0) & (ratio <= 1))
    for name in ("k_tensor", "keep_tensor"):
        if name in tensors:
            yield "keep", tensors[name] < 1
    if (offsets := tensors.get("offsets")) is not None:
        values = next(iter(tensors.values()))
        yield "offsets", (offsets[0] != 0) | (offsets.diff() < 0).any() | (offsets[-1] != values.shape[0])
    if (groups := tensors.get("groups")) is not None:
        yield "groups", (groups >= 16).any()
    if (temperature := tensors.get("temperature_tensor")) is not None:
        yield "temperature", ~((temperature > 0.999e-15) & (temperature < 1.001e15)).all()
    # For a tile or a shard, the size of the vocabulary is unknown. An op that takes a group gets a shard only with one.
    if arguments.get("group_name" if "group_name" in arguments else "first_token") is not None:
        return
    if "weight" in arguments:
        vocabulary = arguments["weight"].shape[0]
    elif "logits" in arguments:
        vocabulary = arguments["logits"].shape[-1]
    else:
        return
    if (labels := tensors.get("labels")) is not None:
        yield "labels", ((labels != -100) & ((labels < 0) | (labels >= vocabulary))).any()
    if (token_ids := tensors.get("token_ids")) is not None:
        yield "token_ids", ((token_ids < -1) | (token_ids >= vocabulary)).any()
    if (ids := tensors.get("support_ids")) is not None:
        cuts = tensors["support_offsets"]
        bad_cuts = (cuts[0] != 0) | (cuts.diff() < 0).any() | (cuts[-1] > len(ids))
        yield "supports", bad_cuts | ((ids < 0) | (ids >= vocabulary)).any()
        if (most := arguments.get("max_dense_rows")) is not None:
            mask = tensors.get("mask")
            dense = cuts.diff() == 0 if mask is None else (cuts.diff() == 0) & mask.reshape(-1)
            yield "dense_rows", dense.sum() > most
