"""Lets verl's FSDP engine compute log-probabilities and entropies over the sets that tokens were drawn from.

verl's engines have the logits in ``prepare_model_outputs``, which makes log-probability and entropy of them and knows
nothing of sets. Importing this module wraps that method of the engine for FSDP. The wrapper does the work where the
micro-batch has a note that names the field with the sets, and calls verl's method everywhere else.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from ...vocabulary import logprob_entropy
from .sampling_mask import NOTE, sampling_mask_of

_TAKES = ["self", "output", "output_args", "micro_batch", "logits_processor_func"]
_REFUSED = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


def _of_sets(engine: Any, output: Any, output_args: Any, data: Any, field: str) -> dict[str, Tensor]:
    """What verl's method returns: nested tensors over prompts and responses. Positions that no loss reads are 0."""
    _require(engine, data)
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


def _wrap() -> None:
    original = FSDPEngineWithLMHead.prepare_model_outputs
    parameters = list(inspect.signature(original).parameters)
    if parameters != _TAKES:
        raise RuntimeError(f"verl's prepare_model_outputs takes {parameters}; expected {_TAKES}, as in verl 0.9.1")

    @functools.wraps(original)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        field = tu.get_non_tensor_data(micro_batch, NOTE, None)
        if field is None:
            return original(self, output, output_args, micro_batch, logits_processor_func)
        return _of_sets(self, output, output_args, micro_batch, field)

    FSDPEngineWithLMHead.prepare_model_outputs = prepare_model_outputs


_wrap()
