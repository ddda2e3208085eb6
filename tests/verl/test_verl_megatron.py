"""verl's fused head on ours in its Megatron engine: ``fused_kernel_options.impl_backend=d3s``.

Real: Megatron's GPT model on two ranks, verl's patch of its forward, and verl's engine with its packing, micro-batches
and post-processing. Not real: a GPU, and the building of the engine.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl.protocol", reason="needs verl (make test-verl)")
pytest.importorskip("megatron.core", reason="needs megatron-core beside verl (make test-verl)")
pytest.importorskip("transfer_queue", reason="needs TransferQueue (make test-verl)")

sys.path.append(str(Path(__file__).parents[1] / "megatron"))  # tiny_megatron

from megatron_ranks import compare, everything, refusals, stages, verls_own
from ranks import world
from tensordict import TensorDict
from test_verl_sampling_masks import FIELD, RESPONSE, TEMPERATURE, make_batch, micro_batch_of
from verl.utils import tensordict_utils as tu

from d3s_kernels.integrations.verl.sampling_mask import NOTE, response_lengths


def an_update(**notes: Any) -> tuple[TensorDict, Any]:
    batch, sets = make_batch()
    mask = batch.batch["response_mask"]
    mask[1:] *= torch.rand(mask[1:].shape) < 0.6
    batch.batch["old_log_probs"] = -3 * torch.rand(mask.shape)
    batch.batch["weights"] = torch.randn(*mask.shape, 2)
    return micro_batch_of(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=4, **notes), sets


CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "tensor parallel": (2, 1, False, {}),
    "sequence parallel, with Megatron's data parallel": (2, 1, False, {"sequence_parallel": True, "ddp": {}}),
    "tied weights": (2, 1, False, {"sequence_parallel": True, "tied": True}),
    "context parallel": (1, 2, False, {}),
    "supports": (2, 1, True, {"sequence_parallel": True}),
    "supports, context parallel": (1, 2, True, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_the_whole_model(case: str) -> None:
    """Log-probabilities, entropies and all gradients; only positions that are read are computed."""
    tensor, context, with_supports, options = CASES[case]
    data, sets = an_update(**{NOTE: FIELD} if with_supports else {})
    rows = world(2).run(compare, data, sets if with_supports else None, tensor, context, options)
    mask = data["response_mask"].bool()
    real = response_lengths(data)[mask.any(1)].sum()
    # The ranks of a context have parts of the positions, others have the same ones.
    each = [sum(of_pass) for of_pass in zip(*rows, strict=True)] if context > 1 else rows[0]
    assert [sum(each[:2]), sum(each[2:])] == [int(mask.sum()), int(real)]


def test_a_loss_that_is_no_policys_computes_everything() -> None:
    data, _ = an_update()
    tokens = len(data["input_ids"].values())
    for rows in world(2).run(everything, data.exclude("old_log_probs")):
        assert sum(rows) == tokens


def test_stages_of_a_pipeline() -> None:
    world(2).run(stages, an_update()[0])


def test_without_our_name_verls_own_head_computes() -> None:
    data, _ = an_update()
    inside = torch.arange(RESPONSE) < response_lengths(data)[:, None]
    for found, given in world(2).run(verls_own, data):
        assert torch.equal(found[inside], data["responses"][inside].float())
        rows = given.pop("hidden")
        assert rows[0] % 2 == 0, "the rows of both ranks"
        assert rows[1:] == [1, 32]
        assert given == {"temperature": pytest.approx(TEMPERATURE), "reduction": "none", "group": 2}


def test_what_is_refused() -> None:
    (data, _), (noted, _) = an_update(), an_update(**{NOTE: FIELD})
    distilled = data.clone()
    tu.assign_non_tensor(distilled, distillation_use_topk=True)
    world(2).run(refusals, data, distilled, noted)
