"""Megatron's own GPT model, small enough for a CPU, on ranks that talk by gloo.

A task calls :func:`arrange` first, then :func:`tiny_model`, and compares with :func:`reference_of`: the same model in
float64, whole on each rank. What stands in for a GPU is :func:`stand_ins`, and, brought by the layer's specification,
:class:`Norm` (torch's norm in Megatron refuses sequence parallelism) and :class:`Attention` (Megatron's local one
refuses packed rows and context parallelism, which it leaves to Transformer Engine).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():  # each import says that neither Apex nor Transformer Engine is installed
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, HEADS, LAYERS, LONGEST = 32, 4, 2, 64


# ---- the ranks -------------------------------------------------------------------------------------------------------


@contextmanager
def _no_fork(self: CudaRNGStatesTracker, name: str = "") -> Iterator[None]:
    yield


def stand_ins() -> None:
    """What Megatron asks of CUDA, in this process: the current device is the CPU, and dropout, of which there is none
    here, has no random state of its own.
    """
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = _no_fork


def arrange(tensor: int = 1, context: int = 1, pipeline: int = 1) -> None:
    """Divides the ranks of this world as Megatron does: tensor ranks are neighbours, then context, then data ranks."""
    stand_ins()
    if parallel_state.is_initialized():
        found = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if found == (tensor, context, pipeline):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)


@cache
def _alone() -> ProcessGroupCollection:
    """The groups of a model that is whole on each rank. All ranks make it together."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    names = ("tp", "pp", "cp", "tp_cp", "dp", "dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp", "embd", "pos_embd", "mp")
    return ProcessGroupCollection(**dict.fromkeys(names, mine))


# ---- the model -------------------------------------------------------------------------------------------------------


class Norm(torch.nn.LayerNorm):
    """With the mark by which Megatron sums its gradients over the tensor ranks, whose rows differ."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Attention(torch.nn.Module):
    """Causal attention of ``[s, b]`` rows or of packed ones, whose sequences may be divided over context ranks."""

    def __init__(self, config: TransformerConfig, *unused: Any, pg_collection: Any = None, **others: Any) -> None:
        super().__init__()
        self.context = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *unused: Any,
        packed_seq_params: PackedSeqParams | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        form = query.shape
        size, rank = (self.context.size(), self.context.rank()) if self.context is not None else (1, 0)
        if packed_seq_params is None:
            lengths = [len(query) * size]
        else:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        rows = zigzag(lengths, size)
        if self.context is not None:
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(x, group=self.context) for x in (key, value)
            )
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mine, all_rows = rows[rank], torch.cat(rows)
        # Rows of a sequence follow each other, so that the order of rows is that of its positions.
        seen = (sequence[mine, None] == sequence[all_rows]) & (mine[:, None] >= all_rows)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).reshape(*form[:-2], -1)


def _layer() -> ModuleSpec:
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = Attention
    return layer


def _gpt(
    config: TransformerConfig, vocab_size: int, groups: ProcessGroupCollection | None = None, **options: Any
) -> GPTModel:
    layers = TransformerBlockSubmodules([_layer()] * config.num_layers, Norm)
    return GPTModel(config, layers, vocab_size, LONGEST, pg_collection=groups, **options)


def tiny_model(
    vocab_size: int = 96, *, tied: bool = False, sequence_parallel: bool = False, dtype: torch.dtype = torch.float32,
    ddp: dict[str, Any] | None = None, seed: int = 0, std: float = 0.3, pre_process: bool = True,
    post_process: bool = True, positions: str = "rope", **config: Any,
) -> Any:  # fmt: skip
    """Two layers of ``HIDDEN``, with the same weights however the ranks are arranged. In bfloat16 the model is in
    Megatron's ``Float16Module``. ``ddp``: options of ``DistributedDataParallelConfig``; the model is then in Megatron's
    ``DistributedDataParallel``, which keeps gradients in ``main_grad``. ``positions``: "learned_absolute" runs where
    "rope" asks for pinned memory, for rows that are not packed on context ranks. ``config``: more of
    ``TransformerConfig``.
    """
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "sequence_parallel": sequence_parallel,
        "bf16": dtype == torch.bfloat16,
    }
    settings["pipeline_dtype"] = dtype
    made = _config(dtype, std, **settings | config)
    torch.manual_seed(seed)
    options = {"share_embeddings_and_output_weights": tied, "position_embedding_type": positions}
    model: Any = _gpt(made, vocab_size, pre_process=pre_process, post_process=post_process, **options)
    # Norms and biases begin as ones and zeros, with which a fault could hide.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += _part(0.1 * torch.randn(_full_shape(parameter)), parameter).to(dtype)
            assert getattr(parameter, "partition_dim", -1) <= 1, name
    if dtype == torch.bfloat16:
        model = Float16Module(made, model)
    if ddp is not None:
        model = DistributedDataParallel(made, DistributedDataParallelConfig(**ddp), model)
    return model


def _config(dtype: torch.dtype, std: float, **settings: Any) -> TransformerConfig:
    return TransformerConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        params_dtype=dtype,
        init_method_std=std,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Without these, torch.compile would build C++ for a minute.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **settings,
    )


def unwrapped(model: Any) -> GPTModel:
    while not isinstance(model, GPTModel):
        model = model.module
    return model


def reference_of(model: Any, dtype: torch.dtype = torch.float64) -> GPTModel:
    """The model with the same weights, whole on this rank and without parallelism, in float64. All ranks call it."""
    inner = unwrapped(model)
    names = "share_embeddings_and_output_weights", "position_embedding_type"
    config = _config(dtype, inner.config.init_method_std, num_layers=inner.config.num_layers)
    reference = _gpt(config, inner.vocab_size, _alone(), **{name: getattr(inner, name) for name in names})
    values = full({name: parameter.data for name, parameter in inner.named_parameters()}, inner)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name])
    return reference


# ---- from the parts to the whole -------------------------------------------------------------------------------------


def _is_divided(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _full_shape(parameter: Tensor) -> list[int]:
    shape = list(parameter.shape)
    if _is_divided(parameter):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    if not _is_divided(parameter):
        return whole
    group = parallel_state.get_tensor_model_parallel_group()
    return whole.chunk(group.size(), parameter.partition_dim)[group.rank()]


def gathered(part: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The parts of the tensor ranks, or of another group, behind each other. Without a gradient."""
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def full(parts: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Values that belong to the parameters of these names, with the parts of the tensor ranks put together."""
    parameters = dict(unwrapped(model).named_parameters())
    return {
        name: gathered(part, parameters[name].partition_dim) if _is_divided(parameters[name]) else part.detach().clone()
        for name, part in parts.items()
    }


def full_gradients(model: Any) -> dict[str, Tensor]:
    """After a backward pass: the gradients of all parameters, complete and whole, as the optimizer gets them. In
    Megatron's ``DistributedDataParallel`` they are the mean over the data and context ranks, else this rank's own.
    """
    inner = unwrapped(model)
    if isinstance(model, DistributedDataParallel):
        finalize_model_grads([model])
        if model.ddp_config.use_distributed_optimizer:  # each data rank has the sums of its own part alone
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            for bucket in (bucket for buffer in model.buffers for bucket in buffer.buckets):
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    elif inner.config.sequence_parallel:  # what finalize_model_grads does
        for parameter in inner.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
    in_ddp = isinstance(model, DistributedDataParallel)
    grads = {name: p.main_grad if in_ddp else p.grad for name, p in inner.named_parameters()}
    return full(grads, inner)


# ---- rows ------------------------------------------------------------------------------------------------------------


def packed(lengths: Sequence[int]) -> PackedSeqParams:
    """Sequences of these lengths, one behind the other in a row: Megatron's form "thd"."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams("thd", ends, ends, None, None, longest, longest)


def zigzag(lengths: Sequence[int], context: int) -> list[Tensor]:
    """The rows that each context rank has of packed sequences: of 2 * context pieces of each sequence, one from the
    front and its mirror from the back. A length is a multiple of 2 * context.
    """
    if context == 1:
        return [torch.arange(sum(lengths))]
    rows: list[list[Tensor]] = [[] for _ in range(context)]
    for all_of_one in torch.arange(sum(lengths)).split(list(lengths)):
        pieces = all_of_one.chunk(2 * context)
        assert len({len(piece) for piece in pieces}) == 1
        for rank in range(context):
            rows[rank] += [pieces[rank], pieces[-1 - rank]]
    return [torch.cat(part) for part in rows]


def my_rows(whole: Tensor, lengths: Sequence[int]) -> Tensor:
    """This context rank's rows of ``[b, T]``."""
    context = parallel_state.get_context_parallel_world_size()
    return whole[:, zigzag(lengths, context)[parallel_state.get_context_parallel_rank()]]


def logprobs_of(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy by torch, from logits of the whole vocabulary."""
    all_of_them = (logits / temperature).log_softmax(-1)
    chosen = all_of_them.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen, -(all_of_them.exp() * all_of_them).sum(-1)
