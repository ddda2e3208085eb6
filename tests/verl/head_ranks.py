"""A small model with verl's fused head, and a step of it in the processes of FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.utils.fsdp_utils import apply_fsdp2
from verl.utils.torch_functional import entropy_from_logits
from verl.utils.ulysses import set_ulysses_sequence_parallel_group
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

VOCABULARY = 30


def make_model(backend: str | None, kind: Any = LlamaForCausalLM, **options: Any) -> Any:
    """A model of a class of its own: verl changes the class's forward."""
    config = kind.config_class(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, **options,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = type("Model", (kind,), {})(config)
    model.lm_head.weight.data.mul_(20)  # else all entropies are nearly alike
    patch_forward_with_backends(model, use_fused_kernels=backend is not None, fused_kernels_backend=backend)
    return model


def bare_engine(backend: str = "torch", **options: Any) -> Any:
    """verl's engine without a model; its packed rows are filled up to a multiple of 16."""
    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    engine.pad_to_length, engine.pad_to_length_bucket, engine.use_ulysses_sp = True, 16, False
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = entropy_from_logits
    engine.model_config = SimpleNamespace(fused_kernel_options={"impl_backend": backend} | options)
    return engine


def outputs_of(backend: str, model: Any, data: TensorDict, padded: bool = True, **options: Any) -> dict[str, Tensor]:
    """What the engine makes of the model's output; padded, for the tokens of the responses, ``[B, T]``."""
    engine = bare_engine(backend, **options)
    inputs, arguments = engine.prepare_model_inputs(data)
    found = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, data, None)
    return {name: no_padding_2_padding(values, data) if padded else values for name, values in found.items()}


def sharded_step(
    ranks: Ranks, batches: list[TensorDict], weights: list[Tensor], options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """With our head: log-probabilities of this rank's batch, and all gradients, in the modules that verl shards."""
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    mesh = init_device_mesh("cpu", (ranks.size,))
    model = make_model("d3s", **options)
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    found = outputs_of("d3s", model, batches[ranks.rank])["log_probs"]
    (found * weights[ranks.rank]).sum().backward()
    return found.detach(), {name: value.grad.full_tensor() for name, value in model.named_parameters()}


def distilled(model: Any, data: TensorDict, loss: Any, engine: Any = None) -> tuple[Tensor, dict[str, Any], Any]:
    """verl's loss and metrics for a model with our head or with logits, and what the loss reads."""
    engine = engine or bare_engine("d3s")
    engine.pad_to_length = False  # verl refuses it with a top-k loss
    inputs, arguments = engine.prepare_model_inputs(data)
    outputs = engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, data, loss)
    return *loss(model_output=outputs, data=data), outputs


def sharded_distillation(ranks: Ranks, batches: list[TensorDict], loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of this rank's batch, and all gradients, in the modules that verl shards."""
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    model = make_model("d3s")
    mesh = init_device_mesh("cpu", (ranks.size,))
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    found = distilled(model, batches[ranks.rank], loss)[0]
    found.backward()
    return found.detach(), {name: value.grad.full_tensor() for name, value in model.named_parameters()}


@contextmanager
def divided_engine(ranks: Ranks) -> Iterator[Any]:
    """An engine whose positions Ulysses divides among the ranks."""
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    engine = bare_engine("d3s")
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = True, ranks.size
    engine.module = SimpleNamespace(config=SimpleNamespace())
    set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        yield engine
    finally:
        set_ulysses_sequence_parallel_group(None)


def divided_distillation(ranks: Ranks, data: TensorDict, table: Tensor, loss: Any) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the gradient of a table that takes the place of a model: the mean of the ranks'
    gradients, as FSDP has it.
    """
    table = table.clone().requires_grad_()
    with divided_engine(ranks) as engine:
        found = distilled(TableModel(table), data, loss, engine)[0]
        found.backward()
    assert table.grad is not None
    dist.all_reduce(table.grad)
    return found.detach(), table.grad / ranks.size


def divided_supports(
    ranks: Ranks, data: TensorDict, table: Tensor, weights: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Log-probabilities and entropies of a batch with supports, and the gradient of the table."""
    table = table.clone().requires_grad_()
    with divided_engine(ranks) as engine:
        inputs, arguments = engine.prepare_model_inputs(data)
        outputs = engine.prepare_model_outputs(TableModel(table)(**inputs), arguments, data, None)
        found = {name: no_padding_2_padding(values, data) for name, values in outputs.items()}
        sum((values * weight).sum() for values, weight in zip(found.values(), weights, strict=True)).backward()
    assert table.grad is not None
    dist.all_reduce(table.grad)
    return {name: values.detach() for name, values in found.items()}, table.grad / ranks.size


class TableModel:
    """Multiplies rows of a table by a head of ones on the diagonal: logits depend on the token before alone."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, input_ids: Tensor, shift_labels: Tensor, temperature: float, **others: Any) -> Any:
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        head = FusedLinearForPPO(impl_backend="d3s")
        scores = head(self.table[input_ids], torch.eye(VOCABULARY), shift_labels, temperature)
        return SimpleNamespace(log_probs=scores[0], entropy=scores[1])
