"""verl's top-k distillation loss from our LM head, beside verl's own, which it computes from logits.

Real: verl's losses and their configuration, a small Llama, ``prepare_model_inputs`` and ``prepare_model_outputs`` of
the FSDP engine, FSDP2 and the exchange of Ulysses in two processes.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")

from head_ranks import (
    VOCABULARY,
    TableModel,
    distilled,
    divided_distillation,
    make_model,
    sharded_distillation,
)
from ranks import world
from tensordict import TensorDict
from test_verl_sampling_masks import FIELD, make_batch, micro_batch_of
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding
from verl_losses import actor_config

from d3s_kernels.integrations.verl import head
from d3s_kernels.integrations.verl.sampling_mask import NOTE
from d3s_kernels.logprobs.token_logprobs import linear_token_logprobs

K = 5
SUPERVISED = {"use_task_rewards": False, "use_policy_gradient": False}
READ = ("distillation_losses", "student_mass", "teacher_mass")


def loss_of(**options: Any) -> Any:
    """As verl's workers make it."""
    config = DistillationLossConfig(loss_mode="forward_kl_topk", topk=K, **options)
    return partial(
        distillation_ppo_loss, config=actor_config("actor_rollout_ref.actor.entropy_coeff=0.1"),
        distillation_config=DistillationConfig(distillation_loss=config),
    )  # fmt: skip


def a_micro_batch(rows: int = 8, **notes: Any) -> TensorDict:
    """An update in which some tokens are dropped, with the teacher's ids as int32, as verl's teachers return them."""
    batch, _ = make_batch(rows)
    tensors, mask = batch.batch, batch.batch["response_mask"]
    mask *= torch.rand(mask.shape) < 0.7
    mask[0, 1] = 1
    tensors["old_log_probs"] = -3 * torch.rand(mask.shape)
    best = torch.log_softmax(2 * torch.randn(*tensors["input_ids"].shape, VOCABULARY), -1).topk(K)
    tensors["teacher_logprobs"], tensors["teacher_ids"] = best.values, best.indices.int()
    return micro_batch_of(
        batch, distillation_use_topk=True, use_remove_padding=True, dp_size=1, global_batch_size=rows,
        batch_num_tokens=int(mask.sum()), **notes,
    )  # fmt: skip


LOSSES: dict[str, tuple[dict[str, Any], bool]] = {
    "the divergence alone": (SUPERVISED, True),
    "where no policy is trained, every position": (SUPERVISED, False),
    "with the policy's loss, clamped": (
        {"use_policy_gradient": False, "log_prob_min_clamp": -2.5, "loss_max_clamp": 0.5}, True,
    ),
    "as the reward, not clamped": ({"log_prob_min_clamp": None, "loss_max_clamp": None}, True),
    "in chunks": (SUPERVISED | {"use_chunked_topk": True, "chunked_topk_chunk_size": 7}, True),
}  # fmt: skip


@pytest.mark.parametrize("what", LOSSES)
def test_the_same_as_from_logits(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, metrics, gradients, and for each token the divergence and the masses."""
    rows: list[int] = []

    def counting(*arguments: Any, mask: Tensor | None = None, **options: Any) -> Any:
        rows.append(-1 if mask is None else int(mask.sum()))
        return linear_token_logprobs(*arguments, mask=mask, **options)

    monkeypatch.setattr(head, "linear_token_logprobs", counting)
    options, an_update = LOSSES[what]
    only = not (options.get("use_task_rewards", True) or options.get("use_policy_gradient", True))
    data, loss, found = a_micro_batch(distillation_only=only), loss_of(**options), []
    if not an_update:
        data = data.exclude("old_log_probs")
    for backend in (None, "d3s"):
        tu.assign_non_tensor(data, use_fused_kernels=backend is not None)
        model = make_model(backend)
        value, metrics, outputs = distilled(model, data, loss)
        value.backward()
        numbers = {name: one.aggregate() if isinstance(one, Metric) else float(one) for name, one in metrics.items()}
        found.append((value.detach(), numbers, outputs, model))
    (theirs, of_theirs, read_theirs, their_model), (ours, of_ours, read_ours, model) = found
    mask = data["response_mask"].bool()
    assert rows == [int(mask.sum()) if an_update else -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    left_out = {"distillation/overlap_ratio", "distillation/overlap_token_advantage"}
    assert of_ours == pytest.approx({name: of_theirs[name] for name in of_theirs.keys() - left_out}, rel=1e-4, abs=1e-6)
    assert ("log_probs" in read_ours) == ("log_probs" in read_theirs) == (not only)
    for name in READ:
        mine, verls = (no_padding_2_padding(each[name], data)[mask] for each in (read_ours, read_theirs))
        torch.testing.assert_close(mine, verls, rtol=0, atol=1e-5)
    for name, value in their_model.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, value.grad, rtol=1e-4, atol=1e-6)


def test_two_processes_that_share_the_weights() -> None:
    """The divergence alone: only the log-probabilities at the teacher's ids have a gradient, and FSDP2 gathers the
    head's weight for it.
    """
    batches, loss = [a_micro_batch(distillation_only=True) for _ in range(2)], loss_of(**SUPERVISED)
    ours = world(2).run(sharded_distillation, batches, loss)
    model = make_model("d3s")
    for data, (found, _) in zip(batches, ours, strict=True):
        expected = distilled(model, data, loss)[0]
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, value in model.named_parameters():
        for _, gradients in ours:
            torch.testing.assert_close(gradients[name], value.grad / 2, rtol=1e-4, atol=1e-6)


def test_two_processes_that_share_the_positions() -> None:
    """With an odd number of positions, one of the two parts is padded."""
    data = a_micro_batch(rows=3)
    while len(data["input_ids"].values()) % 2 == 0:
        data = a_micro_batch(rows=3)
    table, loss = torch.randn(VOCABULARY, VOCABULARY), loss_of(use_policy_gradient=False)
    whole = table.clone().requires_grad_()
    expected = distilled(TableModel(whole), data, loss)[0]
    expected.backward()
    for found, gradient in world(2).run(divided_distillation, data, table, loss):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    model, loss = make_model("d3s"), loss_of(**SUPERVISED)
    data = a_micro_batch()
    tu.assign_non_tensor(data, use_remove_padding=False)
    with pytest.raises(ValueError, match="use_remove_padding: got False; takes True with distillation_use_topk and"):
        distilled(model, data, loss)
    with pytest.raises(ValueError, match=f"distillation_use_topk: got True with {NOTE}; takes False"):
        distilled(model, a_micro_batch(**{NOTE: FIELD}), loss)
    unknown = partial(ppo_loss, config=loss.keywords["config"])
    for other in (unknown, None, partial(distillation_ppo_loss, config=None)):
        with pytest.raises(ValueError, match=r"loss_function: got \w+ with distillation_use_topk; takes functools"):
            distilled(model, a_micro_batch(), other)
    with pytest.raises(RuntimeError, match="but the model has not called this head"):
        distilled(make_model("torch"), a_micro_batch(), loss)
