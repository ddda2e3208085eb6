"""Tells our LM head what verl's FSDP engine will read, and computes over the sets that tokens were drawn from.

The plug-in wraps three methods of the engine. After ``prepare_model_inputs`` our head (:mod:`.head`) learns
what is read of the micro-batch, and after ``prepare_model_outputs`` it adds the old log-probabilities of tokens that it
has not computed. Where verl has logits and the micro-batch has a note that names the field with the sets, the wrapper
of ``prepare_model_outputs`` computes in verl's place. ``_build_lora_module`` may not adapt the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ..._own_logits import UnsupportedHead
from ...heads import read_head
from ...vocabulary import logprob_entropy
from .head import BACKEND, asked_for, forget, read_positions, serves, with_old_log_probs
from .head import OPTION as HEAD
from .replaced import Replaced
from .sampling_mask import NOTE, sampling_mask_of

_REFUSED = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


def _of_sets(output: Any, output_args: Any, data: Any, field: str) -> dict[str, Tensor]:
    """What verl's method returns: nested tensors over prompts and responses. Positions that no loss reads are 0."""
    if tu.get_non_tensor_data(data, "use_fused_kernels", False):
        raise ValueError(f"use_fused_kernels: got True in a micro-batch with {NOTE}; takes False, or {HEAD}=d3s")
    logits = output.logits
    if isinstance(logits, DTensor):  # as in verl: tensor parallelism divides the vocabulary
        logits = logits.full_tensor()
    labels, offsets = output_args["input_ids_rmpad_rolled"], data["input_ids"].offsets()
    tokens = len(data["input_ids"].values())
    if tu.get_non_tensor_data(data, "use_remove_padding", True):
        kept, mask = sampling_mask_of(data, field)
        logprob, entropy = logprob_entropy(
            logits.squeeze(0)[:tokens], labels[:tokens], temperature=output_args["temperature_rmpad"][:tokens],
            mask=mask, sampling_mask=kept,
        )  # fmt: skip
    else:
        width = logits.shape[1]
        kept, mask = sampling_mask_of(data, field, width=width)
        inside = torch.arange(width, device=logits.device) < offsets.diff().unsqueeze(1)
        padded = torch.zeros_like(inside, dtype=labels.dtype).masked_scatter(inside, labels)
        values = logprob_entropy(
            logits, padded, temperature=output_args["temperature"].unsqueeze(1), mask=mask.view_as(inside),
            sampling_mask=kept,
        )  # fmt: skip
        logprob, entropy = (value[inside] for value in values)
    found = {"log_probs": torch.nested.nested_tensor_from_jagged(logprob, offsets)}
    if tu.get_non_tensor_data(data, "calculate_entropy", False):
        found["entropy"] = torch.nested.nested_tensor_from_jagged(entropy, offsets)
    return found


def _require(engine: Any, data: Any) -> None:
    for key in _REFUSED:
        if tu.get_non_tensor_data(data, key, False):
            raise ValueError(f"{key}: got True in a micro-batch with {NOTE}; takes False")
    if engine.use_ulysses_sp:
        raise ValueError(f"ulysses_sequence_parallel_size: got more than 1 with {NOTE}; takes 1")


def _with_read_positions(original: Any) -> Any:
    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        forget()
        inputs, output_args = original(self, micro_batch)
        if serves(self, micro_batch):
            if tu.get_non_tensor_data(micro_batch, NOTE, None) is not None:
                _require(self, micro_batch)
            read_positions(self, micro_batch, output_args["input_ids_rmpad_rolled"])
        return inputs, output_args

    return prepare_model_inputs


def _with_our_outputs(original: Any) -> Any:
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        try:
            ours, field = serves(self, micro_batch), tu.get_non_tensor_data(micro_batch, NOTE, None)
            if field is not None and not ours:
                _require(self, micro_batch)
                return _of_sets(output, output_args, micro_batch, field)
            found = original(self, output, output_args, micro_batch, logits_processor_func)
            return with_old_log_probs(found, micro_batch) if ours else found
        finally:
            forget()

    return prepare_model_outputs


def _with_a_plain_head(original: Any) -> Any:
    def build_lora_module(self: Any, module: Any) -> Any:
        adapted = original(self, module)
        if asked_for(self):
            try:
                read_head(adapted)
            except UnsupportedHead as error:
                raise ValueError(f"{HEAD}: got {BACKEND!r}. {error}") from error
        return adapted

    return build_lora_module


REPLACED = (
    Replaced(FSDPEngineWithLMHead, "prepare_model_inputs", ["self", "micro_batch"], _with_read_positions),
    Replaced(
        FSDPEngineWithLMHead, "prepare_model_outputs",
        ["self", "output", "output_args", "micro_batch", "logits_processor_func"], _with_our_outputs,
    ),
    Replaced(FSDPEngineWithLMHead, "_build_lora_module", ["self", "module"], _with_a_plain_head),
)  # fmt: skip
