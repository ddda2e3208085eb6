"""The head in place of a model's logits, on tensor-, context- and data-parallel ranks, against one process in float64:
log-probabilities, entropies, and the gradients of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
from helpers import assert_same_bits
from ranks import Ranks, on_ranks, world
from tiny_megatron import (
    GPTModel,
    arrange,
    full_gradients,
    gathered,
    logprobs_of,
    my_rows,
    packed,
    parallel_state,
    reference_of,
    tensor_parallel,
    tiny_model,
    unwrapped,
)
from torch import Tensor

from d3s_kernels import SamplingMask, UnsupportedHead
from d3s_kernels.integrations.megatron import LMHead, shard
from d3s_kernels.reference import logprob_entropy as exact_logprob_entropy

VOCABULARY, TRUE = 96, 90  # with padding, and without
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 2_000}


def logprob_entropy(
    model: Any, ids: Tensor, labels: Tensor, *, vocab_size: int | None = None, logit_softcap: float | None = None,
    call: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    with LMHead(model, vocab_size=vocab_size, logit_softcap=logit_softcap) as head:
        output = model(ids, None, None, **(call or {}))
    return output if head.layer is None else head.logprob_entropy(labels, **options)


# ---- any rows, masks and options -------------------------------------------------------------------------------------


def compare(ranks: Ranks, seed: int, tensor: int, context: int, model_options: dict[str, Any]) -> None:
    arrange(tensor, context)
    torch.manual_seed(seed)
    draw = Random(seed)
    thd = context > 1 or draw.random() < 0.5
    lengths, shape = ((8, 16, 4), (1, 28)) if thd else ([16], (3, 16))
    cut = draw.choice((None, TRUE))
    ids, labels = (torch.randint(0, cut or VOCABULARY, shape) for _ in range(2))
    labels[torch.rand(shape) < 0.1] = -100
    density = draw.choice((0.0, 0.1, 0.3, 0.9, None))
    mask = None if density is None else torch.rand(shape) < density
    if mask is not None and draw.random() < 0.3:
        mask[:, : shape[1] // 2] = False  # all rows that count are on one sequence-parallel rank
    weights, temperature = torch.randn(shape), draw.choice((1.0, 0.7, 0.5 + torch.rand(shape)))
    spans = None
    if draw.random() < 0.5:  # any ids beside the label; no ids at all mean the whole vocabulary
        others = [draw.sample(range(TRUE), draw.choice((0, 1, 5, 40))) for _ in range(labels.numel())]
        spans = [
            [*{*each, label}] if each and label >= 0 else each
            for each, label in zip(others, labels.flatten().tolist(), strict=True)
        ]
    if parallel_state.get_data_parallel_rank():  # the other data rank has other rows
        ids, labels, weights = (values.flip(-1) for values in (ids, labels, weights))
        spans = (
            None
            if spans is None
            else [span for row in range(shape[0]) for span in spans[row * shape[1] :][: shape[1]][::-1]]
        )

    def mine(whole: Any) -> Any:
        return my_rows(whole, lengths) if isinstance(whole, Tensor) and thd else whole

    given: dict[str, Any] = {"mask": mine(mask), "temperature": mine(temperature), "vocab_size": cut}
    if mask is not None and draw.random() < 0.5:
        given["max_rows"] = int(given["mask"].sum()) + draw.choice((0, 2))
    if spans is not None:
        place = mine(torch.arange(labels.numel()).view(shape)).flatten()
        given["sampling_mask"] = SamplingMask.from_lists(spans).index_select(place)
    model = tiny_model(VOCABULARY, seed=seed, **model_options)
    packing = {"packed_seq_params": packed(lengths)} if thd else {}
    results = logprob_entropy(model, mine(ids), mine(labels), call=packing, **given)
    loss = sum((factor * result * mine(weights)).sum() for factor, result in zip((1, -0.3), results, strict=True))
    loss.backward()

    reference = reference_of(model)
    logits = reference(ids, None, None, **packing)[..., :cut]
    wanted = exact_logprob_entropy(
        logits, labels, temperature=temperature, mask=mask,
        sampling_mask=None if spans is None else SamplingMask.from_lists(spans),
    )  # fmt: skip
    for ours, exact in zip(results, wanted, strict=True):
        torch.testing.assert_close(ours.double(), mine(exact), rtol=1e-5, atol=1e-5)
    sum((factor * result * weights).sum() for factor, result in zip((1, -0.3), wanted, strict=True)).backward()
    found, group = full_gradients(model), parallel_state.get_data_parallel_group()
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad
        if "ddp" in model_options:  # Megatron's mean over the data and context ranks
            gradient = gathered(gradient[None], 0, group).sum(0) / (group.size() * context)
        assert (found[name].double() - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("ddp", [None, {}, OVERLAP, OVERLAP | {"use_distributed_optimizer": True}])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_two_ranks(sequence_parallel: bool, tied: bool, ddp: Any) -> None:
    options = {"sequence_parallel": sequence_parallel, "tied": tied} | ({} if ddp is None else {"ddp": ddp})
    world(2).run(compare, torch.randint(2**31, ()).item(), 2, 1, options)


@pytest.mark.parametrize("context", [1, 2], ids=["data", "context"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_four_ranks(sequence_parallel: bool, context: int) -> None:
    options = {"sequence_parallel": sequence_parallel, "ddp": OVERLAP}
    world(4).run(compare, torch.randint(2**31, ()).item(), 2, context, options)


def test_one_rank() -> None:
    world(1).run(compare, torch.randint(2**31, ()).item(), 1, 1, {"tied": True, "ddp": OVERLAP})


# ---- what is gathered and waited for ---------------------------------------------------------------------------------


@on_ranks(2)
def only_rows_that_count_are_gathered(ranks: Ranks) -> None:
    """As many from each rank as the rank with the most of them has; with a bound, the bound and one more."""
    arrange(2)
    model, ids = tiny_model(sequence_parallel=True), torch.arange(40).view(1, 40)
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[0, [3, 4, 11, 25]] = True
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "gathered", lambda hidden, group: sent.append(len(hidden)) or GATHERED(hidden, group))
        for wanted, options in (
            (20, {}), (3, {"mask": mask}), (5, {"mask": mask, "max_rows": 4}), (20, {"mask": mask, "max_rows": 19}),
            (0, {"mask": mask & False}), (20, {"mask": mask | True}),
        ):  # fmt: skip
            logprob_entropy(model, ids, ids, **options)
            assert sent == [wanted]
            del sent[:]
    exceeded = logprob_entropy(model, ids, ids, mask=mask.logical_xor(torch.arange(40) < 4), max_rows=4)
    assert all(result.isnan().all() for result in exceeded)


GATHERED = shard.gathered
IDS = torch.arange(8, 96, 11).view(1, 8)


# ---- how a trainer calls it ------------------------------------------------------------------------------------------


@on_ranks(2)
def a_trainer_calls_the_model_itself(ranks: Ranks) -> None:
    """Through wrappers, in bfloat16. The layer's hooks run, and without the head the model has its logits again."""
    arrange(2)
    model = tiny_model(dtype=torch.bfloat16, ddp=OVERLAP | {"grad_reduce_in_fp32": True}, sequence_parallel=True)
    layer, called = unwrapped(model).output_layer, []
    layer.register_forward_pre_hook(lambda *_: called.append(True))
    head = LMHead(model)
    for _ in range(2):
        with head:
            output = model(IDS, None, None)
        assert output.shape == (*IDS.shape, 0)  # in the first call too, whose logits of a trial only the head sees
        kept = head.logprob_entropy(IDS, keep=True)
        logprob, entropy = head.logprob_entropy(IDS)
        assert_same_bits(kept[0].detach(), logprob.detach())
    assert len(called) == 2
    (-logprob.sum()).backward()
    assert layer.weight.main_grad.any()
    logits = gathered(model(IDS, None, None), -1)
    for ours, theirs in zip((logprob, entropy), logprobs_of(logits.double(), IDS), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0.02, atol=0.05)  # their logits are rounded
    with pytest.raises(RuntimeError, match="got no hidden states, since the model was not called"):
        head.logprob_entropy(IDS)


@on_ranks(2)
def a_frozen_head_makes_no_product(ranks: Ranks) -> None:
    """One of the two products of a backward with one tile is that of the weight's gradient."""
    arrange(2)
    products = []
    for frozen in (False, True):
        model = tiny_model().requires_grad_(False)
        weight, norm = model.output_layer.weight.requires_grad_(not frozen), model.decoder.final_layernorm.weight
        norm.requires_grad_()
        logprob, _ = logprob_entropy(model, IDS, IDS)
        with torch.profiler.profile() as profile:
            logprob.sum().backward()
        assert (weight.grad is None) == frozen
        assert norm.grad.any()
        names = [event.name for event in profile.events()]
        products.append(sum(names.count(f"aten::{name}") for name in ("mm", "addmm", "bmm")))
    assert products[1] == products[0] - 1


@on_ranks(2)
def other_uses_of_the_weight_in_the_same_step(ranks: Ranks) -> None:
    """Its gradient is complete, with layers of Megatron that add to main_grad themselves, and without."""
    arrange(2)

    def add(rows: Tensor, gradient: Tensor, into: Tensor) -> None:
        into.addmm_(gradient.t(), rows)

    for tied, is_fused, at_once in product((False, True), repeat=3):
        model = tiny_model(tied=tied, ddp={"overlap_grad_reduce": False})
        for module in model.modules():
            if hasattr(module, "gradient_accumulation_fusion"):
                module.gradient_accumulation_fusion = is_fused
        inner, found = unwrapped(model), []
        weight = inner.embedding.word_embeddings.weight if tied else inner.output_layer.weight

        def ours(model: Any) -> Tensor:
            return logprob_entropy(model, IDS, IDS)[0].sum()

        def theirs(model: Any) -> Tensor:
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(model(IDS, None, None))
            return logprobs_of(logits, IDS)[0].sum()

        with pytest.MonkeyPatch.context() as patch:
            kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add)
            patch.setattr(tensor_parallel.layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
            for losses in ((theirs, theirs), (ours, ours), (ours, theirs), (theirs, ours)):
                model.zero_grad_buffer()
                for loss in [sum(loss(model) for loss in losses)] if at_once else (loss(model) for loss in losses):
                    loss.backward()
                found.append(weight.main_grad.clone())
        for gradient in found[1:]:
            torch.testing.assert_close(gradient, found[0], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def stages_of_a_pipeline(ranks: Ranks) -> None:
    """The stage without an output layer returns its hidden states; the other one gets them."""
    arrange(1, pipeline=2)
    first, ids = parallel_state.is_pipeline_first_stage(), torch.arange(12).view(1, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "cuda", lambda self: self)  # Megatron copies tied weights to the other stage
        model = tiny_model(pre_process=first, post_process=not first, tied=True, ddp={})
    if first:
        hidden = logprob_entropy(model, ids, ids)
        assert hidden.shape == (12, 1, 32)
        torch.distributed.send(hidden.detach(), 1)
        with pytest.raises(RuntimeError, match="this pipeline stage has no output layer"):
            LMHead(model).logprob_entropy(ids)
    else:
        received = torch.empty(12, 1, 32)
        torch.distributed.recv(received, 0)
        unwrapped(model).set_input_tensor(received)
        logprob, entropy = logprob_entropy(model, ids, ids)
        wanted = logprobs_of(model(ids, None, None), ids)
        torch.testing.assert_close((logprob, entropy), wanted, rtol=1e-5, atol=1e-5)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Scaled(GPTModel):
    def _postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * super()._postprocess(*args, **kwargs)


class SoftCapped(tensor_parallel.ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return 20 * (super().forward(*args, **kwargs)[0] / 20).tanh(), None


@on_ranks(2)
def a_model_that_changes_its_logits_is_refused(ranks: Ranks) -> None:
    """On all ranks, also if one of them alone differs; and a cap that is named is served."""
    arrange(2)
    half = unwrapped(tiny_model(sequence_parallel=True, dtype=torch.bfloat16))
    half.output_layer.__class__ = SoftCapped
    with pytest.raises(UnsupportedHead, match="own logits differ"):
        logprob_entropy(half, IDS[:, :2], IDS[:, :2])  # a cap shows although each rank has one position
    for change in ("scaled", "one rank", "bias", "capped"):
        model = tiny_model(sequence_parallel=True)
        layer = model.output_layer
        if change == "scaled" or (change == "one rank" and ranks.rank == 1):
            model.__class__ = Scaled
        if change == "bias":  # it is part of the formula
            layer.bias = torch.nn.Parameter(torch.randn(VOCABULARY // 2))
        if change == "capped":
            layer.__class__ = SoftCapped
        logits = gathered(model(IDS, None, None), -1)
        if change != "bias":
            with pytest.raises(UnsupportedHead, match=r"own logits differ|another tensor-parallel rank"):
                logprob_entropy(model, IDS, IDS)
            assert "forward" not in vars(layer)
        if change in ("bias", "capped"):
            cap = 20.0 if change == "capped" else None
            results = logprob_entropy(model, IDS, IDS, logit_softcap=cap)
            torch.testing.assert_close(results, logprobs_of(logits, IDS), rtol=1e-5, atol=1e-5)


def _adapter(model: Any) -> None:
    model.output_layer.lora_a = torch.nn.Linear(32, 2)


def _wrapped(model: Any) -> None:
    model.output_layer = torch.nn.Sequential(model.output_layer)


def _whole(model: Any) -> None:
    model.output_layer.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 32))


def _quantised(model: Any) -> None:
    model.output_layer.weight = torch.nn.Parameter(model.output_layer.weight.to(torch.float8_e4m3fn), False)


def _replaced(model: Any) -> None:
    model.output_layer.forward = model.output_layer.forward


def _fsdp(model: Any) -> None:
    model.output_layer.weight.__fsdp_param__ = True


REFUSED: dict[str, tuple[Callable[[Any], None] | dict[str, Any], str]] = {
    "adapter": (_adapter, "whose lora_a.weight, lora_a.bias would never be trained"),
    "wrapped": (_wrapped, "an output layer Sequential without weight, .*LoRA"),
    "whole": (_whole, "a weight of 96 rows on each of 2 tensor-parallel ranks; takes this rank's rows of the 96 ids"),
    "quantised": (_quantised, "maybe quantised"),
    "replaced": (_replaced, "an output layer with another forward"),
    "fsdp": (_fsdp, "weight: got a parameter of Megatron-FSDP"),
    "mtp": ({"mtp_num_layers": 1}, "mtp_num_layers=1; takes one without"),
    "deferred": ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute=True; takes"),
}


@on_ranks(2)
def what_is_refused(ranks: Ranks) -> None:
    arrange(2)
    for change, said in REFUSED.values():
        model = tiny_model()
        if callable(change):
            change(model)
        else:
            vars(model.config).update(change)
        with pytest.raises((ValueError, RuntimeError), match=said):
            logprob_entropy(model, IDS, IDS)
    model = tiny_model()
    if ranks.rank == 1:  # alone: rank 0 does not wait for it
        _quantised(model)
    with pytest.raises(UnsupportedHead, match="maybe quantised" if ranks.rank else "another tensor-parallel rank"):
        logprob_entropy(model, IDS, IDS)

    model, spans = tiny_model(), SamplingMask.from_lists([[1]] * 9)
    for call, said in (
        (lambda: LMHead(torch.nn.Linear(2, 2)), "got a Linear; takes a GPTModel"),
        (lambda: logprob_entropy(model, IDS, IDS[0]), r"labels: got shape \[8\] with hidden states of"),
        (lambda: logprob_entropy(model, IDS, IDS, mask=IDS[:, :3]), r"mask: got shape \[1, 3\]; takes"),
        (lambda: logprob_entropy(model, IDS, IDS.to("meta")), "labels: is on meta; takes .* cpu"),
        (lambda: logprob_entropy(model, IDS, IDS, vocab_size=97), "vocab_size: got 97; takes 1 to 96"),
        (lambda: logprob_entropy(model, IDS, IDS, vocab_size=90.0), "vocab_size: got 90.0"),
        (lambda: logprob_entropy(model, IDS, IDS, temperature=torch.ones(3)), r"temperature: got shape \[3\]"),
        (lambda: logprob_entropy(model, IDS, IDS, sampling_mask=spans), "sampling_mask: got 9 rows; takes .* 8"),
        (lambda: logprob_entropy(model, IDS, IDS, weight_grad_into=spans), "multiple values .* 'weight_grad_into'"),
        (
            lambda: logprob_entropy(model, IDS, IDS, call={"labels": IDS}),
            "labels: got a tensor in a call of the model",
        ),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=said):
            call()
    with LMHead(model) as head:
        model(IDS, None, None)
        with pytest.raises(ValueError, match="labels"):
            model(IDS, None, None, labels=IDS)
        with pytest.raises(RuntimeError, match="got no hidden states"):  # none of the call before
            head.logprob_entropy(IDS)


def test_versions_that_were_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.__version__", "0.17.0")
    with pytest.raises(ImportError, match=r"megatron-core 0.17.0; takes .*>=0.15,<0.17, .* D3S_MEGATRON_UNTESTED=1"):
        LMHead(None)
