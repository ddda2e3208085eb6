"""TRL's distillation from a teacher on a server, with our LM head: loss, gradients and metrics are TRL's. A made-up
teacher is in place of the server and of the workers that ask it.
"""

from __future__ import annotations

import itertools
import queue
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", minversion="1.16", reason="TRL distills asynchronously from 1.16 on")
import trl.generation.vllm_client as trls_client
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from tiny_trl import EOS, VOCABULARY, model, run_example, tokenizer
from transformers import PrinterCallback
from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer
from trl.experimental.async_distillation import async_distillation_trainer as trl_async
from trl.experimental.async_distillation.async_rollout_worker import RolloutSample
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

import d3s_kernels.integrations.trl.head as our_head
from d3s_kernels.integrations.trl import (
    D3SAsyncDistillationTrainer,
    D3SServerDistillationTrainer,
    UnknownTRL,
    UnsupportedHead,
    distillation,
)
from d3s_kernels.integrations.trl.distillation import GatheredLogits, jsd_loss

PROMPT, WIDTH = 3, 5
TEACHERS = {"math": "http://localhost:1", "code": "http://localhost:2"}
trl_async.get_peak_flops_per_device = lambda accelerator, dtype: None  # a CPU's is not known; then no MFU is logged


# ---- the loss of some positions --------------------------------------------------------------------------------------


def positions(rows: int = 40, width: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """What TRL's function takes: hidden states, a head, and a teacher near the student, with ids that are left out."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = 0.4 * torch.randn(rows, 24, generator=draw), torch.randn(VOCABULARY, 24, generator=draw)
    bias = torch.randn(VOCABULARY, generator=draw)
    teacher = (hidden @ weight.T / 2 + torch.randn(rows, VOCABULARY, generator=draw)).log_softmax(-1)
    scores, ids = teacher.topk(width)
    candidates = torch.rand(rows, width, generator=draw) < 0.8
    candidates[:, 0] = True
    made = {
        "hidden_valid": hidden.to(dtype), "lm_head_weight": weight.to(dtype), "lm_head_bias": bias.to(dtype),
        "logit_scale": 1.0, "final_logit_softcapping": None, "target_ids": torch.where(candidates, ids, -1),
        "teacher_target_logps": torch.where(candidates, scores, -torch.inf), "valid_candidate_mask": candidates,
        "beta": 0.0, "temperature": 1.0, "add_tail_bucket": True,
        "teacher_id_idx": torch.randint(3, (rows,), generator=draw), "num_teachers": 4, "chunk_size": 16,
    }  # fmt: skip
    return made


def differentiated(loss: Callable[..., Any], given: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The function's results, and the gradients of the loss for hidden states, weight and bias."""
    names = ("hidden_valid", "lm_head_weight", "lm_head_bias")
    leaves = [given[name].clone().requires_grad_() for name in names if given[name] is not None]
    results = loss(*{**given, **dict(zip(names, leaves, strict=False))}.values())
    return [part.detach() for part in results], list(torch.autograd.grad(results[0], leaves))


def head_of(given: dict[str, Any]) -> Any:
    return SimpleNamespace(scale=given["logit_scale"], softcap=given["final_logit_softcapping"], name="Tiny")


LOSSES = list(itertools.product((0.0, 0.3, 0.5, 1.0), (True, False)))
OTHERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "a scale and a soft cap": {"logit_scale": 0.25, "final_logit_softcapping": 3.0, "temperature": 1.5},
    "one teacher, no bias": {"teacher_id_idx": None, "num_teachers": 1, "lm_head_bias": None},
}


@pytest.mark.parametrize(("beta", "tail"), LOSSES)
@pytest.mark.parametrize("other", OTHERS)
def test_sums_and_gradients_are_trls(other: str, beta: float, tail: bool) -> None:
    given = positions() | OTHERS[other] | {"beta": beta, "add_tail_bucket": tail}
    expected, theirs = differentiated(trl_async._chunked_jsd_loss, given)
    found, ours = differentiated(lambda *more: jsd_loss(head_of(given), *more), given)
    assert expected[0] > 0
    for own, right in zip(found, expected, strict=True):
        assert own.dtype == right.dtype == torch.float32
        torch.testing.assert_close(own, right, rtol=2e-5, atol=2e-5)
    for own, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_bfloat16_is_multiplied_as_it_is(beta: float) -> None:
    """TRL multiplies its float32 copies, which is the same for the logits. Our backward rounds their gradient."""
    given = positions(dtype=torch.bfloat16) | {"beta": beta}
    expected, theirs = differentiated(trl_async._chunked_jsd_loss, given)
    found, ours = differentiated(lambda *more: jsd_loss(head_of(given), *more), given)
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=2e-5, atol=2e-5)
    for own, right in zip(ours, theirs, strict=True):
        assert own.dtype == right.dtype == torch.bfloat16
        assert (own - right).float().norm() < 1e-2 * right.float().norm()


def test_a_small_tail_is_exact() -> None:
    """TRL's tail is 1 minus the rounded sum of the others."""
    given = positions(width=6)
    given["hidden_valid"] = given["lm_head_weight"][given["target_ids"][:, 0]] * 0.75  # students that are nearly sure
    given |= {"lm_head_bias": None, "temperature": 1.0}
    logprobs = (given["hidden_valid"].double() @ given["lm_head_weight"].double().T).log_softmax(-1)
    ids, candidates = given["target_ids"], given["valid_candidate_mask"]
    inside = torch.zeros(logprobs.shape, dtype=torch.bool)
    for row, (own, which) in enumerate(zip(ids, candidates, strict=True)):
        inside[row, own[which]] = True
    tail = logprobs.masked_fill(inside, -torch.inf).logsumexp(-1).clamp(min=np.log(1e-7))
    teacher, support = trl_async._add_tail_bucket(given["teacher_target_logps"].double(), candidates)
    student = torch.cat([logprobs.gather(-1, ids.clamp(min=0)), tail[:, None]], dim=-1)
    right = trl_async._jsd_divergence(student, teacher, 0.0, support).sum()
    theirs, ours = trl_async._chunked_jsd_loss(*given.values()), jsd_loss(head_of(given), *given.values())
    assert (tail < -9).sum() > 20
    assert abs(ours[0] - right) < 1e-6 * right
    assert abs(ours[0] - right) < 0.1 * abs(theirs[0] - right)


def test_a_tail_of_nothing_is_trls_least_tail() -> None:
    """All ids are given, so that nothing is left: TRL takes a mass of 1e-7, without a gradient."""
    given = positions(rows=6, width=VOCABULARY) | {"beta": 0.5}
    given["valid_candidate_mask"] = torch.ones_like(given["valid_candidate_mask"])
    draw = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    given |= {"target_ids": torch.arange(VOCABULARY).expand(6, -1), "teacher_target_logps": draw}
    for beta in (0.0, 0.5, 1.0):
        given["beta"] = beta
        expected, theirs = differentiated(trl_async._chunked_jsd_loss, given)
        found, ours = differentiated(lambda *more: jsd_loss(head_of(given), *more), given)
        for own, right in zip((*found, *ours), (*expected, *theirs), strict=True):
            torch.testing.assert_close(own, right, rtol=1e-4, atol=5e-5)


def test_what_our_head_cannot_compute_is_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_head, "_said", set())
    given = positions(dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"TRL's own LM head is used, because the head's weight is torch.float64"):
        found, _ = differentiated(lambda *more: jsd_loss(head_of(given), *more), given)
    expected, _ = differentiated(trl_async._chunked_jsd_loss, given)
    assert all(map(torch.equal, found, expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        jsd_loss(head_of(given), *given.values())


def test_a_scale_that_is_not_the_models_is_refused() -> None:
    given = positions() | {"logit_scale": 0.5}
    with pytest.raises(UnsupportedHead, match=r"TRL scales the logits of Tiny by 0\.5 .* the model itself by 1 "):
        jsd_loss(head_of(positions()), *given.values())


# ---- the asynchronous trainer ----------------------------------------------------------------------------------------


class Recording:
    """A worker, and a weight transfer, for samples that were recorded."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)
        self.update_model_version = self.start = self.stop = lambda *_: None
        self.init_weight_transfer = self.pause = self.resume = self.destroy = lambda: None

    def send_weights(self, iterator: Iterator[Any]) -> None:
        assert list(iterator)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the recording has ended")


def recorded(number: int, seed: int = 0) -> list[RolloutSample]:
    """Samples as the worker makes them: the teacher's largest ids and the real one, and some tokens without any."""
    random, teacher, samples = np.random.default_rng(seed), model(seed=7), []
    for index in range(number):
        tokens = [2 + index, 7, 9, *random.integers(2, 20, random.integers(2, 8)).tolist(), EOS]
        with torch.no_grad():
            logprobs = teacher(torch.tensor([tokens])).logits[0].log_softmax(-1)
        ids, scores = np.full((len(tokens), WIDTH), -1), np.full((len(tokens), WIDTH), -np.inf, dtype=np.float32)
        for place in range(PROMPT, len(tokens)):
            if place % 5 == 4 and index % 2:
                continue
            best = logprobs[place - 1].topk(WIDTH - 1).indices.tolist()
            best += [tokens[place]] * (tokens[place] not in best)
            ids[place, : len(best)], scores[place, : len(best)] = best, logprobs[place - 1, best]
        samples.append(
            RolloutSample(
                prompt=[{"role": "user", "content": "w2"}], completion=[{"role": "assistant", "content": "w3"}],
                input_ids=np.array(tokens), completion_mask=np.array([0] * PROMPT + [1] * (len(tokens) - PROMPT)),
                teacher_topk_ids=ids, teacher_topk_logprobs=scores, model_version=1, metrics={},
                teacher_id=list(TEACHERS)[index % 3 // 2], prompt_id=index, enqueued_at=time.time(),
            )
        )  # fmt: skip
    return samples


def options(kind: Any, **changed: Any) -> Any:
    common: dict[str, Any] = {
        "output_dir": "/tmp/d3s-distillation", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_steps": 2, "learning_rate": 1e-3, "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "logging_steps": 1, "gradient_checkpointing": False,
    }  # fmt: skip
    if issubclass(kind, AsyncDistillationConfig):
        common |= {"token_budget": 0, "model_init_kwargs": {"attn_implementation": "sdpa"}}
    return kind(**{**common, **changed})


def asynchronous(kind: type, saved: str, samples: list[RolloutSample], **changed: Any) -> Any:
    worker = Recording(samples)
    made = kind(
        saved, args=options(AsyncDistillationConfig, **changed), rollout_worker=worker, weight_transfer=worker,
        train_dataset=Dataset.from_dict({"prompt": ["w2"] * 40}), processing_class=tokenizer(),
    )  # fmt: skip
    made.current_gradient_accumulation_steps = 2
    made.model.train()
    made.model_version = 1
    return made


@pytest.fixture(scope="module")
def pair(saved: str) -> list[Any]:
    kinds = (AsyncDistillationTrainer, D3SAsyncDistillationTrainer)
    return [asynchronous(kind, saved, recorded(4), teacher_server_urls=TEACHERS) for kind in kinds]


@pytest.fixture(scope="module")
def batch(pair: list[Any]) -> dict[str, Tensor]:
    """A micro-batch of both teachers, as the trainer gets it."""
    loader = pair[0].get_train_dataloader()
    made: dict[str, Tensor] = loader.collate_fn([next(iter(loader.dataset))])
    assert made["teacher_id_idx"].unique().tolist() == [0, 1]
    return made


def loss_of(made: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """The loss, the gradient of each parameter, and the metrics."""
    made.model.zero_grad()
    made._metrics["train"].clear()
    loss = made.compute_loss(made.model, batch)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in made.model.named_parameters()}
    return loss.detach(), gradients, dict(made._metrics["train"])


def assert_same(found: Any, expected: Any) -> None:
    (loss, gradients, metrics), (their_loss, their_gradients, their_metrics) = found, expected
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-6)
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert metrics.keys() == their_metrics.keys()
    for name, values in their_metrics.items():  # a value is a number, or the numerator and the denominator of one
        np.testing.assert_allclose(metrics[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(("beta", "tail"), LOSSES)
def test_loss_is_that_of_the_asynchronous_trainer(
    pair: list[Any], batch: dict[str, Tensor], beta: float, tail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At beta above 0, TRL compares one or two ids. The least loss is that of one id without a tail: 0."""
    for made in pair:
        vars(made.args).update(beta=beta, add_tail_bucket=tail, teacher_temperature=1.0 if tail else 0.7)
    expected = loss_of(pair[0], batch)
    rows, op = [], distillation.linear_token_logprobs
    monkeypatch.setattr(
        distillation, "linear_token_logprobs", lambda *given, **more: rows.append(len(given[0])) or op(*given, **more)
    )
    found = loss_of(pair[1], batch)
    assert_same(found, expected)
    assert {"jsd", "entropy", "teacher_jsd/math", "teacher_jsd/code"} <= found[2].keys()
    asked = batch["completion_mask"].bool() & (batch["teacher_topk_ids"] >= 0).any(-1)
    assert rows == [int(asked.sum())]
    assert trl_async._chunked_jsd_loss is distillation._TRLS_LOSS  # it is there again


def test_a_micro_batch_without_a_teacher(pair: list[Any], batch: dict[str, Tensor]) -> None:
    nothing = batch | {"teacher_topk_ids": torch.full_like(batch["teacher_topk_ids"], -1)}
    loss, gradients, _ = loss_of(pair[1], nothing)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


MIXED = {"bf16": True, "gradient_checkpointing": True, "teacher_server_urls": TEACHERS, "beta": 0.5}


@pytest.mark.parametrize("changed", [{}, MIXED], ids=["one teacher", "two teachers, bf16"])
def test_training_is_the_asynchronous_trainers(saved: str, changed: dict[str, Any]) -> None:
    made = [
        asynchronous(kind, saved, recorded(20), **changed)
        for kind in (AsyncDistillationTrainer, D3SAsyncDistillationTrainer)
    ]
    for trainer in made:
        trainer.train()
    assert_same_training(*made)


def assert_same_training(theirs: Any, ours: Any, rel: float = 1e-4) -> None:
    """After two steps, each of two micro-batches."""
    logs = [[log for log in made.state.log_history if "loss" in log] for made in (theirs, ours)]
    assert len(logs[0]) == len(logs[1]) == 2
    for their_log, log in zip(*logs, strict=True):
        assert log.keys() == their_log.keys()
        for name in {"loss", "grad_norm", "entropy"} & log.keys():
            assert log[name] == pytest.approx(their_log[name], rel=rel)
    for (name, expected), own in zip(theirs.model.named_parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, atol=0.2 * rel, rtol=rel, msg=name)


def test_examples_of_the_docstrings(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrinterCallback, "on_log", lambda *_, **__: None)  # an example prints its results alone
    worker = Recording(recorded(12))
    run_example(
        D3SAsyncDistillationTrainer, folder=saved, args=options(AsyncDistillationConfig, max_steps=1),
        prompts=Dataset.from_dict({"prompt": ["w2"] * 40}),
        worker={"rollout_worker": worker, "weight_transfer": worker, "processing_class": tokenizer()},
    )  # fmt: skip
    own = options(
        ServerDistillationConfig, teacher_model_server_url="http://localhost:1", max_steps=1, max_completion_length=3,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["w2"] * 4})
    run_example(D3SServerDistillationTrainer, policy=model(), args=own, prompts=prompts, tokenizer=tokenizer())


def test_an_adapter_on_the_head_is_refused(pair: list[Any], batch: dict[str, Tensor]) -> None:
    """TRL refuses one in a PeftModel only, and only when the trainer is made."""
    made = pair[1]
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], r=2), model())
    with pytest.raises(UnsupportedHead, match="an adapter, which would be ignored"):
        made._compute_loss(adapted, batch)


def test_another_loss_is_refused_when_the_trainer_is_made(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, unwrapped_model: Any, inputs: Any) -> Any:
        return self.loss_with_another_name(inputs)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncDistillationTrainer, "_compute_loss", changed)
        with pytest.raises(UnknownTRL, match=r"changed: does not call _chunked_jsd_loss\(hidden_valid .*replaced"):
            asynchronous(D3SAsyncDistillationTrainer, saved, [])
    monkeypatch.setattr(distillation, "_TRLS_LOSS", lambda hidden_valid, positions: None)
    with pytest.raises(UnknownTRL, match="function's parameters are hidden_valid positions"):
        asynchronous(D3SAsyncDistillationTrainer, saved, [])


# ---- the trainer that asks the server in each step -------------------------------------------------------------------


class Teacher:
    """The client of a server whose teacher is a tiny model."""

    def __init__(self, **_: Any) -> None:
        self.model = model(seed=7)

    @torch.no_grad()
    def get_sequence_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for tokens, start in zip(sequences, prompt_lengths, strict=True):
            logits = self.model(torch.tensor([tokens])).logits[0, start - 1 : -1]
            logprobs = (logits / temperature).log_softmax(-1)
            best = logprobs.topk(top_logprobs)
            actual = logprobs.gather(-1, torch.tensor(tokens[start:])[:, None])
            for name, value in zip(found, (best.values, best.indices, actual), strict=True):
                found[name].append(value.tolist())
        return found


@pytest.fixture(scope="module", autouse=True)
def teacher() -> Iterator[None]:
    client, trls_client.VLLMClient = trls_client.VLLMClient, Teacher
    yield
    trls_client.VLLMClient = client


def with_server(kind: type, policy: Any = None, **changed: Any) -> Any:
    args = options(
        ServerDistillationConfig, teacher_model_server_url="http://localhost:1", max_completion_length=6, **changed
    )
    made = kind(
        model() if policy is None else policy, args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} " * (i % 3 + 1) for i in range(2, 34)]}),
    )  # fmt: skip
    made.current_gradient_accumulation_steps = 2
    made.model.train()
    return made


@pytest.fixture(scope="module")
def servers() -> list[Any]:
    return [with_server(kind) for kind in (ServerDistillationTrainer, D3SServerDistillationTrainer)]


@pytest.fixture(scope="module")
def generated(servers: list[Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    made: dict[str, Any] = servers[0]._generate_and_score_completions([{"prompt": f"w{i} " * i} for i in (2, 3, 1, 4)])
    made["completion_mask"][1, 2:] = 0  # rows of other lengths, and one without a token
    made["completion_mask"][2] = 0
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("beta", "tail"), LOSSES)
def test_loss_is_that_of_the_trainer_with_a_server(
    servers: list[Any], generated: dict[str, Any], beta: float, tail: bool, temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for made in servers:
        vars(made).update(beta=beta, loss_add_tail=tail, loss_top_k=1 if beta else WIDTH, temperature=temperature)
    expected = loss_of(servers[0], generated)
    masks, op = [], distillation.linear_token_logprobs
    monkeypatch.setattr(
        distillation, "linear_token_logprobs", lambda *given, **more: masks.append(more["mask"]) or op(*given, **more)
    )
    assert_same(loss_of(servers[1], generated), expected)
    (mask,) = masks
    assert mask.sum() == generated["completion_mask"].sum()


@pytest.mark.parametrize("bf16", [False, True])
def test_training_is_that_of_the_trainer_with_a_server(bf16: bool) -> None:
    """In mixed precision, TRL rounds logits to bfloat16."""
    made = []
    for kind in (ServerDistillationTrainer, D3SServerDistillationTrainer):
        torch.manual_seed(0)
        made.append(with_server(kind, beta=0.0, loss_top_k=WIDTH, bf16=bf16))
        made[-1].train()
    assert_same_training(*made, rel=2e-2 if bf16 else 1e-4)


def test_a_weight_that_our_head_cannot_read_is_left_to_trl(
    servers: list[Any], generated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(our_head, "_said", set())
    with pytest.warns(UserWarning, match=r"TRL's own LM head is used, because .*torch.float64"):
        made = [with_server(kind, model().double()) for kind in (type(servers[0]), type(servers[1]))]
    (loss, gradients, _), (their_loss, their_gradients, _) = (loss_of(one, generated) for one in reversed(made))
    assert loss == their_loss
    assert all(torch.equal(gradients[name], gradient) for name, gradient in their_gradients.items())


def test_a_head_that_does_more_is_refused() -> None:
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], r=2), model())
    with pytest.raises(UnsupportedHead, match="an adapter, which would be ignored"):
        with_server(D3SServerDistillationTrainer, adapted)


OTHER_READS: dict[str, Callable[[Any], Any]] = {
    "calls softmax": lambda logits: torch.nn.functional.softmax(logits, dim=-1),
    "calls log_softmax": lambda logits: torch.nn.functional.log_softmax(logits, dim=1),
    "reads argmax": lambda logits: logits.argmax(dim=-1),
    "reads the logits of the ids": lambda logits: logits[:, :, :7],
    "gathers logits over dimension -1": lambda logits: logits.gather(-1, torch.zeros(2, 3, 1, dtype=torch.long)),
}


@pytest.mark.parametrize("read", OTHER_READS)
def test_another_use_of_the_logits_is_refused(read: str) -> None:
    weight = torch.randn(VOCABULARY, 8)
    head: Any = {"weight": weight, "bias": None, "temperature": 1.0, "logit_softcap": None}
    logits: Any = GatheredLogits(torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool), head)
    with pytest.raises(UnknownTRL, match=f"TRL's loss {read}"):
        OTHER_READS[read](logits)
