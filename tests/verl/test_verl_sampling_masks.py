"""Sampling masks in verl: they stay with their rows, and our LM head in verl's FSDP engine computes with them.

Real: verl's rows and storage, its conversions of batches, and the engine's ``prepare_model_inputs`` and
``prepare_model_outputs``. The model between the two is a table before our head: the logits depend on the token before
alone.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

import transfer_queue as tq
from head_ranks import VOCABULARY, bare_engine, divided_supports
from omegaconf import OmegaConf
from ranks import world
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding, response_from_nested
from verl_world import Workers, compose_config, draw_rewards, make_trainer, put_rollouts, rows_of, run_step

from d3s_kernels.integrations.verl.checks import require_config, require_supports
from d3s_kernels.integrations.verl.head import FusedLinearForPPO
from d3s_kernels.integrations.verl.sampling_mask import NOTE

PROMPT, RESPONSE, TEMPERATURE = 4, 6, 0.8
FIELD = "kept_tokens"
OPTION = f"+trainer.v1.d3s_sync.sampling_mask_field={FIELD}"
ACTOR = "actor_rollout_ref.actor"
CUT = "actor_rollout_ref.rollout.top_p=0.9"
HEAD = "actor_rollout_ref.model.fused_kernel_options"
FUSED = ("actor_rollout_ref.model.use_fused_kernels=true", f"{HEAD}.impl_backend=d3s")
Sets = list[list[int]]


def draw_sets(response: list[int]) -> Sets:
    """A set of 1 to 8 ids for each token, with the token. The first token is a tool's, which has none."""
    drawn = ([t, *(i for i in torch.randperm(VOCABULARY)[:7].tolist() if i != t)][: 1 + t % 8] for t in response[1:])
    return [[], *drawn]


def make_batch(rows: int = 8) -> tuple[Any, list[Sets]]:
    """A batch as verl's older ray trainer has it; its last row is one of padding, with the sets of another row."""
    lengths = torch.randint(2, RESPONSE + 1, (rows,))
    inside = torch.arange(RESPONSE) < lengths[:, None]
    before = torch.arange(PROMPT) >= torch.randint(0, PROMPT, (rows, 1))
    ids = torch.randint(VOCABULARY, (rows, PROMPT + RESPONSE))
    attention = torch.cat([before, inside], 1).long()
    sets = [draw_sets(row[:length].tolist()) for row, length in zip(ids[:, PROMPT:], lengths.tolist(), strict=True)]
    sets[-1] = [[0]] * RESPONSE
    response_mask = inside.long() * (torch.arange(RESPONSE) > 0)
    response_mask[-1] = 0
    tensors = {
        "input_ids": ids, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": attention,
        "position_ids": attention.cumsum(1) - 1, "response_mask": response_mask, "row": torch.arange(rows),
        "advantages": torch.randn(rows, 1) * response_mask, "padded": filled(sets),
    }  # fmt: skip
    carried = np.empty(rows, dtype=object)
    carried[:] = sets
    uids = np.array([f"u{row % 2}" for row in range(rows)], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={FIELD: carried, "uid": uids}), sets


def filled(sets: list[Sets]) -> Tensor:
    """``[B, T, K]``, filled up with -1."""
    ids = torch.full((len(sets), RESPONSE, 8), -1)
    for row, of_row in enumerate(sets):
        for place, of_token in enumerate(of_row):
            ids[row, place, : len(of_token)] = torch.tensor(of_token, dtype=torch.int64)
    return ids


def micro_batch_of(batch: Any, **notes: Any) -> TensorDict:
    """As in verl's older ray trainer: it makes notes of ``meta_info``."""
    batch.meta_info = {"temperature": TEMPERATURE, "calculate_entropy": True, "use_fused_kernels": True, **notes}
    return left_right_2_no_padding(batch.to_tensordict())


def in_the_engine(data: TensorDict, table: Tensor, backend: str = "d3s") -> dict[str, Tensor]:
    """What the engine makes of a model that multiplies rows of the table by a head of ones on the diagonal."""
    engine = bare_engine(backend)
    inputs, arguments = engine.prepare_model_inputs(data)
    ids = inputs["input_ids"]
    labels = inputs["shift_labels"] if "shift_labels" in inputs else ids.roll(-1, -1)
    scores = FusedLinearForPPO(impl_backend=backend)(table[ids], torch.eye(VOCABULARY), labels, TEMPERATURE)
    output = SimpleNamespace(log_probs=scores[0], entropy=scores[1])
    found: dict[str, Tensor] = engine.prepare_model_outputs(output, arguments, data, None)
    return found


def forward(data: TensorDict, table: Tensor, backend: str = "d3s") -> dict[str, Tensor]:
    """For the tokens of the responses, ``[B, T]``."""
    found = in_the_engine(data, table, backend)
    return {name: no_padding_2_padding(values, data) for name, values in found.items()}


def plainly(before: int, token: int, kept: list[int], table: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of one token: the softmax of logits that are -inf outside the set."""
    logits = table[before].double() / TEMPERATURE
    if kept:
        outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, torch.tensor(kept), False)
        logits = logits.masked_fill(outside, -torch.inf)
    log_p = torch.log_softmax(logits, -1)
    finite = log_p.isfinite()
    return log_p[token], -(log_p[finite].exp() * log_p[finite]).sum()


def expected_of(batch: Any, sets: list[Sets], table: Tensor) -> dict[str, Tensor]:
    """``[B, T]``, 0 where no token of the model's is."""
    ids, mask = batch.batch["input_ids"].tolist(), batch.batch["response_mask"].bool()
    found = {"log_probs": torch.zeros(mask.shape).double(), "entropy": torch.zeros(mask.shape).double()}
    for row, place in mask.nonzero().tolist():
        at = PROMPT + place
        values = plainly(ids[row][at - 1], ids[row][at], sets[row][place], table)
        for of_name, value in zip(found.values(), values, strict=True):
            of_name[row, place] = value
    return found


@pytest.mark.parametrize("field", [FIELD, "padded"])
@pytest.mark.parametrize("use_remove_padding", [True, False])
def test_the_engine_computes_over_the_sets(field: str, use_remove_padding: bool) -> None:
    batch, sets = make_batch()
    data = micro_batch_of(batch, use_remove_padding=use_remove_padding, **{NOTE: field})
    mask = batch.batch["response_mask"].bool()
    weights = torch.randn(2, *mask.shape) * mask
    values, gradients = torch.randn(VOCABULARY, VOCABULARY), []
    tables = [values.clone().requires_grad_() for _ in range(2)]
    results, expected = forward(data, tables[0]), expected_of(batch, sets, tables[1])
    for found, table in zip((results, expected), tables, strict=True):
        (weights[0] * found["log_probs"] + weights[1] * found["entropy"]).sum().backward()
        gradients.append(table.grad)
    for name, value in expected.items():
        torch.testing.assert_close((results[name] * mask).double(), value, rtol=0, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)
    assert not results["log_probs"][-1].any(), "a row of padding"


def test_ranks_of_ulysses_have_the_sets_of_their_positions() -> None:
    batch, sets = make_batch()
    data, mask = micro_batch_of(batch, **{NOTE: FIELD}), batch.batch["response_mask"].bool()
    weights, table = torch.randn(2, *mask.shape) * mask, torch.randn(VOCABULARY, VOCABULARY, requires_grad=True)
    expected = expected_of(batch, sets, table)
    (weights[0] * expected["log_probs"] + weights[1] * expected["entropy"]).sum().backward()
    for found, gradient in world(2).run(divided_supports, data, table.detach(), weights):
        for name, value in expected.items():
            torch.testing.assert_close((found[name] * mask).double(), value.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(gradient, table.grad, rtol=0, atol=1e-5)


class WorkersWithAnEngine(Workers):
    """The stand-in for workers, with the values of verl's engine."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = torch.randn(VOCABULARY, VOCABULARY)
        self.noted: list[Any] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        super().compute_log_prob(batch)
        self.noted.append(batch.extra_info.get(NOTE))
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        tu.assign_non_tensor(data, use_remove_padding=True, use_fused_kernels=True, **batch.extra_info)
        with torch.no_grad():
            found = in_the_engine(data, self.table)
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(found, len(batch)))
        for key, values in zip(batch.keys, response_from_nested(found["log_probs"], data["responses"]), strict=True):
            self.log_probs[key] = values.clone().requires_grad_()
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        self.noted.append(batch.extra_info.get(NOTE))
        return super().update_actor(batch)


def a_step(*overrides: str, sets_of: Any = draw_sets, option: str = OPTION, workers: Any = None) -> tuple[Any, Any]:
    put_rollouts(draw_rewards(), extra_fields=lambda row: {} if sets_of is None else {FIELD: sets_of(row)})
    trainer = make_trainer(
        option, CUT, *FUSED, f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "+trainer.v1.d3s_sync.rollouts_start=3", *overrides,
    )  # fmt: skip
    trainer.actor_rollout_wg = (workers or WorkersWithAnEngine)(trainer.config)
    trainer.ref_in_actor = True
    batch, trainer.logged = run_step(trainer, 6)
    return trainer, batch


def test_a_step_of_the_trainer_mode(queue: None) -> None:
    """Old and reference log-probabilities and entropies are those of the sets, which stay with their rows in verl's
    storage; tokens of one id, whose entropy is 0, are not chosen; rows of padding do no harm.
    """
    trainer, batch = a_step("+trainer.v1.d3s_sync.drop_zeros=true", f"{ACTOR}.use_kl_loss=true")
    workers = trainer.actor_rollout_wg
    assert workers.noted == [FIELD] * 3  # old, reference, update
    assert len(batch) > 18, "there are rows of padding"
    fields = ("old_log_probs", "ref_log_prob", "entropy", "extra_fields", "prompts", "responses", "response_mask")
    rows = rows_of(batch, *fields)
    assert len(rows) == 18
    sizes = [len(one) for row in rows.values() for one in row["extra_fields"][FIELD] if len(one)]
    assert trainer.logged["d3s/set_size_mean"] == pytest.approx(sum(sizes) / len(sizes))
    assert trainer.logged["d3s/set_singletons"] == pytest.approx(sizes.count(1) / len(sizes))
    tokens = 0
    for key, row in rows.items():
        sets, prompt = row["extra_fields"][FIELD], row["prompts"].tolist()
        ids = prompt + row["responses"].tolist()
        for place in range(1, len(sets)):
            at = len(prompt) + place
            logprob, entropy = plainly(ids[at - 1], ids[at], sets[place], workers.table)
            for name in ("old_log_probs", "ref_log_prob"):
                assert float(row[name][place]) == pytest.approx(float(logprob), abs=1e-5)
            assert float(row["entropy"][place]) == pytest.approx(float(entropy), abs=1e-5)
            if len(sets[place]) == 1:
                assert not row["response_mask"][place]
                assert row["old_log_probs"][place] == row["entropy"][place] == 0
        with_gradient = workers.tokens_with_gradient(key)
        assert not with_gradient[~row["response_mask"].bool()].any()
        tokens += int(with_gradient.sum())
    assert tokens


def test_rollouts_that_are_cut_lose_their_sets_too(queue: None) -> None:
    trainer, batch = a_step("+trainer.v1.d3s_sync.token_rule=prefix", f"{ACTOR}.use_kl_loss=true")
    rows = rows_of(batch, "extra_fields", "response_mask", "old_log_probs", "responses").values()
    lengths = [len(row["response_mask"]) for row in rows]
    assert lengths == [len(row["extra_fields"][FIELD]) for row in rows] == [len(row["old_log_probs"]) for row in rows]
    assert sum(lengths) < sum(len(row["responses"]) for row in rows)
    assert all(torch.tensor(loss).isfinite() for loss in trainer.actor_rollout_wg.losses)


def test_a_rollout_without_sets_and_workers_that_do_not_use_them(queue: None) -> None:
    with pytest.raises(ValueError, match=f"sampling_mask_field: got '{FIELD}', which row u._._0 does not have in"):
        a_step(sets_of=None)
    with pytest.raises(RuntimeError, match="sampling_mask_field: the workers have not used the supports: the entropy"):
        a_step(workers=Workers)


def test_sets_that_do_not_fit() -> None:
    response, mask = torch.tensor([3, 5, 7]), torch.tensor([0, 1, 1])
    assert require_supports(FIELD, {"a": ([[], [5, 2], [7]], response, mask)}).tolist() == [0, 2, 1]
    with pytest.raises(
        ValueError, match=f"{FIELD}: got 2 supports in row a; takes 3, one for each token of its response"
    ):
        require_supports(FIELD, {"a": ([[5, 2], [7]], response, mask)})
    for wrong in ([2], []):
        with pytest.raises(ValueError, match=f"a support of {len(wrong)} ids at token 1 of row a, without the token 5"):
            require_supports(FIELD, {"a": ([[], wrong, [7]], response, mask)})


REFUSED: dict[str, tuple[Any, str]] = {
    f"{ACTOR}.strategy": ("mindspeed", r"strategy: got 'mindspeed'; takes 'fsdp' or 'fsdp2' or 'megatron' with .*=d3s"),
    "actor_rollout_ref.ref.strategy": ("veomni", r"ref\.strategy: got 'veomni'; takes 'fsdp'"),
    "actor_rollout_ref.model.use_fused_kernels": (False, "use_fused_kernels: got False; takes True with"),
    "actor_rollout_ref.model.mtp.enable": (True, r"mtp\.enable: got True; takes False with"),
    f"{ACTOR}.calculate_sum_pi_squared": (True, "calculate_sum_pi_squared: got True; takes False with"),
    "distillation.enabled": (True, r"distillation\.enabled: got True; takes False with"),
    f"{HEAD}.impl_backend": ("torch", "got 'torch'; takes 'd3s' with sampling masks"),
    "actor_rollout_ref.rollout.multi_turn.enable": (True, r"multi_turn\.enable: got True; takes False"),
    "actor_rollout_ref.rollout.top_p": (1.0, "top_p: got 1.0 with top_k=-1, which cut nothing off; takes top_p below"),
}


def test_configurations_that_are_refused() -> None:
    config = compose_config(CUT, *FUSED)
    require_config(config)
    for key, (value, message) in REFUSED.items():
        before = OmegaConf.select(config, key)
        OmegaConf.update(config, key, value)
        with pytest.raises(ValueError, match=message):
            require_config(config)
        OmegaConf.update(config, key, before)
    with pytest.raises(ValueError, match="impl_backend: got 'torch'; takes 'd3s' with sampling masks"):
        make_trainer(CUT, OPTION, FUSED[0])  # the trainer mode looks at them


def test_configurations_of_megatron_that_are_refused() -> None:
    config = compose_config(CUT, *FUSED, file="ppo_megatron_trainer")
    require_config(config)
    for key, value in ("actor.megatron.use_remove_padding", False), ("ref.megatron.dynamic_context_parallel", True):
        OmegaConf.update(config, f"actor_rollout_ref.{key}", value)
        with pytest.raises(ValueError, match=rf"{key}: got {value}; takes {not value} with .*=d3s"):
            require_config(config)
        OmegaConf.update(config, f"actor_rollout_ref.{key}", not value)


def test_micro_batches_that_are_refused() -> None:
    batch, _ = make_batch()
    table = torch.zeros(VOCABULARY, VOCABULARY)
    with pytest.raises(
        ValueError, match=f"{NOTE}: got a micro-batch with it; takes .*use_fused_kernels=true and .*=d3s"
    ):
        forward(micro_batch_of(batch, **{NOTE: FIELD}), table, "torch")
    with pytest.raises(ValueError, match="nothing: is no field of the rows, which have advantages"):
        forward(micro_batch_of(batch, **{NOTE: "nothing"}), table)
    with pytest.raises(ValueError, match=r"row: got shape \[8\]; takes \[8, T, K\] with T of at least"):
        forward(micro_batch_of(batch, **{NOTE: "row"}), table)
    batch.non_tensor_batch[FIELD][2] = None
    with pytest.raises(ValueError, match=f"{FIELD}: got 0 supports in row 2; takes"):
        forward(micro_batch_of(batch, **{NOTE: FIELD}), table)
