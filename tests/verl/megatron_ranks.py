"""verl's Megatron engine around Megatron's own small GPT model, on ranks of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import Ranks
from tensordict import TensorDict
from tiny_megatron import HIDDEN, arrange, full_gradients, reference_of, tiny_model, unwrapped
from torch import Tensor
from verl.models.mcore import model_forward_fused
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from d3s_kernels.integrations.verl.sampling_mask import response_lengths

VOCABULARY, PADDED = 30, 32  # the vocabulary of the rows, and of the model, which Megatron fills up


def bare_engine(model: Any, backend: str = "d3s", **options: Any) -> Any:
    """verl's engine around a model that is there; verl has patched it."""
    engine = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    engine.module, engine.tf_config, engine.is_value_model = [model], unwrapped(model).config, False
    engine.enable_routing_replay = False
    engine.engine_config = SimpleNamespace(
        use_fused_kernels=True, use_remove_padding=True, pad_to_length=False, dynamic_context_parallel=False,
        pad_bshd_to_minibatch_max=False, context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )  # fmt: skip
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], vocab_size=VOCABULARY),
        tokenizer=SimpleNamespace(pad_token_id=0),
        mtp=SimpleNamespace(enable=False),
        fused_kernel_options={"impl_backend": backend} | options,
    )
    engine._maybe_enable_fused_kernels()
    return engine


def weighed(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """A loss of log-probabilities and entropies of the responses."""
    values = [no_padding_2_padding(model_output[name], data) for name in ("log_probs", "entropy")]
    return (torch.stack(values, -1) * data["weights"]).sum(), {}


def one_stage(forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **options: Any) -> Any:
    """Megatron's schedule of a single pipeline stage, which keeps its number of tokens on a GPU."""
    found = []
    for _ in range(num_microbatches):
        output, loss_function = forward_step_func(data_iterator, model[0])
        loss, of_batch = loss_function(output)
        if not options["forward_only"]:
            (loss / num_microbatches).backward()
        found.append(of_batch)
    return found


@contextmanager
def counted(rows: list[int]) -> Iterator[None]:
    """Runs verl's engine on a CPU, and records the number of rows that our head computes."""
    from d3s_kernels.integrations.verl import megatron

    def count(*arguments: Any, mask: Tensor, **options: Any) -> Any:
        rows.append(int(mask.sum()))
        return original(*arguments, mask=mask, **options)

    original = megatron.shard_logprob_entropy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "shard_logprob_entropy", count)
        patch.setattr(transformer_impl, "get_forward_backward_func", lambda: one_stage)
        yield


def expected_of(reference: Any, data: TensorDict, supports: list[Any] | None) -> dict[str, Tensor]:
    """Of a whole model in float64, sequence by sequence: ``[B, T]``, for the tokens of the responses."""
    temperature, shape = data["temperature"], data["weights"].shape[:2]
    found = {name: torch.zeros(shape, dtype=torch.float64) for name in ("log_probs", "entropy")}
    for row, (ids, length) in enumerate(zip(data["input_ids"].unbind(), response_lengths(data).tolist(), strict=True)):
        logits = reference(ids[None], None, None)[0, -length - 1 : -1, :VOCABULARY] / temperature
        if supports is not None:
            for place, kept in enumerate(supports[row][:length]):
                if kept:
                    outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, torch.tensor(kept), False)
                    logits = logits.index_put(
                        (torch.tensor(place), outside.nonzero().flatten()), torch.tensor(-1e9).double()
                    )
        log_p = logits.log_softmax(-1)
        found["log_probs"][row, :length] = log_p.gather(-1, ids[-length:, None])[:, 0]
        found["entropy"][row, :length] = -(log_p.exp() * log_p).sum(-1)
    return found


def compare(
    ranks: Ranks, data: TensorDict, supports: list[Any] | None, tensor: int, context: int, options: dict[str, Any]
) -> list[int]:
    """An update and a pass without gradients through verl's engine. Returns the rows that our head has computed."""
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    arrange(tensor, context)
    model, rows = tiny_model(PADDED, seed=7, **options), list[int]()
    reference, engine = reference_of(model), bare_engine(model)
    mask, lengths = data["response_mask"].bool(), response_lengths(data)
    expected = expected_of(reference, data, supports)
    with counted(rows):
        found = engine.forward_backward_batch(data, weighed)["model_output"]
        with torch.no_grad():
            old = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
    outside = ~mask & (torch.arange(mask.shape[1]) < lengths[:, None])
    for name, values in expected.items():
        for of_pass in (found, old):
            padded = no_padding_2_padding(of_pass[name], data)
            torch.testing.assert_close(padded[mask].double(), values.detach()[mask], rtol=0, atol=2e-5)
    assert torch.equal(no_padding_2_padding(found["log_probs"], data)[outside], data["old_log_probs"][outside])
    if supports is None:  # a pass without gradients also computes tokens that an update drops
        real = outside & mask.any(1, keepdim=True)
        padded = no_padding_2_padding(old["log_probs"], data)[real]
        torch.testing.assert_close(padded.double(), expected["log_probs"].detach()[real], rtol=0, atol=2e-5)

    (torch.stack([*expected.values()], -1) * (data["weights"] * mask[..., None])).sum().backward()
    gradients = full_gradients(model)
    for name, parameter in reference.named_parameters():
        gradient = gradients[name].double()
        if context > 1:  # each context rank has the gradient of its own positions
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        error = (gradient - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-4, (name, error)
    return rows


def everything(ranks: Ranks, data: TensorDict) -> list[int]:
    """A loss that is no policy's. Returns the rows that our head has computed."""
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    arrange(2)
    model, rows = tiny_model(PADDED, seed=7), list[int]()
    engine, expected = bare_engine(model), expected_of(reference_of(model), data, None)
    with counted(rows):
        found = engine.forward_backward_batch(data, weighed)["model_output"]
    for name, values in expected.items():
        padded = no_padding_2_padding(found[name], data).double()
        torch.testing.assert_close(padded.where(values != 0, 0), values.detach(), rtol=0, atol=2e-5)
    return rows


def stages(ranks: Ranks, data: TensorDict) -> None:
    """A pipeline stage without a head gives hidden states, and one without an embedding gets such from the stage before
    it.
    """
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    arrange(2)

    def step(model: Any) -> Any:
        with counted([]), torch.no_grad():
            return bare_engine(model).forward_step(iter([data]), model, None, lambda *_, **__: None)[0]

    first, whole = tiny_model(PADDED, post_process=False), tiny_model(PADDED)
    assert step(first).shape[1:] == (1, HIDDEN)
    expected = step(whole)
    packed = model_forward_fused.preprocess_thd_engine(data["input_ids"])[0]
    embedded = whole.embedding(packed, None)
    whole.pre_process = whole.decoder.pre_process = False
    whole.set_input_tensor(embedded)
    found = step(whole)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(found[name].values(), expected[name].values())
    assert expected["log_probs"].values().any()


def verls_own(ranks: Ranks, data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
    """Without our name, verl's function gets what verl gives it: here one that returns the labels."""
    from d3s_kernels.integrations.verl import plugin

    given: dict[str, Any] = {}

    def theirs(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given.update(hidden=list(args[0].shape), temperature=args[3], reduction=args[4], group=args[5].size())
        return args[2].flatten().float(), args[2].flatten().float()

    arrange(2)
    plugin.uninstall()
    with counted([]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_forward_fused, "linear_cross_entropy", theirs)
        plugin.install()
        engine = bare_engine(tiny_model(PADDED, sequence_parallel=True), "triton")
        with torch.no_grad():
            found = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
        plugin.uninstall()
    plugin.install()
    return no_padding_2_padding(found["log_probs"], data), given


def refused(what: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        what()


def refusals(ranks: Ranks, data: TensorDict, distilled: TensorDict, noted: TensorDict) -> None:
    import d3s_kernels.integrations.verl.plugin  # noqa: F401

    arrange(2)
    made = r"impl_backend: got 'd3s'\. "
    model = tiny_model(PADDED)
    handle = model.output_layer.register_forward_hook(lambda *_: None)
    refused(lambda: bare_engine(model), f"{made}output_layer: got a ColumnParallelLinear with hooks")
    handle.remove()
    overlapping = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
    refused(lambda: bare_engine(tiny_model(PADDED, ddp=overlapping)), "overlap_param_gather=false in")
    model.output_layer.bias = torch.nn.Parameter(torch.zeros(PADDED // 2))
    refused(lambda: bare_engine(model), f"{made}output_layer: got a ColumnParallelLinear with a bias; takes one w")
    model.output_layer.bias = None
    model.output_layer.adapter = torch.nn.Linear(2, 2)
    refused(lambda: bare_engine(model), f"{made}LMHead: got an output layer ColumnParallelLinear whose adapter.weight")
    del model.output_layer.adapter
    model.output_layer.forward = lambda *args, **kwargs: None
    refused(lambda: bare_engine(model), f"{made}output_layer: got a ColumnParallelLinear in a GPTModel, with code of")
    del model.output_layer.forward
    engine = bare_engine(model)
    for option, value, message in (
        ("use_remove_padding", False, "verl has turned its fused kernels off; with strategy=megatron takes"),
        ("dynamic_context_parallel", True, r"megatron\.dynamic_context_parallel: got True; takes False with"),
    ):
        before = vars(engine.engine_config) | {"use_fused_kernels": True}
        engine.engine_config = SimpleNamespace(**before | {option: value})
        refused(engine._maybe_enable_fused_kernels, message)
        engine.engine_config = SimpleNamespace(**before)

    def run(engine: Any, data: TensorDict) -> None:
        with counted([]), torch.no_grad():
            engine.forward_backward_batch(data, None, forward_only=True)

    refused(lambda: run(engine, distilled), "distillation_use_topk: got True; takes False with strategy=megatron")
    own = bare_engine(model, "triton")
    refused(lambda: run(own, noted), "d3s_sampling_mask: got a micro-batch with it; takes .*=d3s")
    own = bare_engine(model, "triton", logits_dtype="auto")
    refused(lambda: run(own, data), r"logits_dtype: got 'auto'; takes .*use_fused_kernels=true and .*=d3s beside it")
    with pytest.MonkeyPatch.context() as patch:
        ours = model_forward_fused.linear_cross_entropy
        copied = lambda hidden, weight, labels, *more: ours(hidden, weight, labels.clone(), *more)  # noqa: E731
        patch.setattr(model_forward_fused, "linear_cross_entropy", copied)
        refused(lambda: run(engine, data), "labels: got shape .* in the model's head; takes the labels as verl packs")
    with pytest.MonkeyPatch.context() as patch:
        other = lambda config: lambda **inputs: {"log_probs": inputs["labels"]}  # noqa: E731
        patch.setattr("verl.models.mcore.get_mcore_forward_fused_model_engine_fn", other)
        refused(lambda: run(engine, data), "impl_backend: got 'd3s', but the model has not called this head")
