"""With nothing dropped, the gradient of every optimizer step is that of TRL's own trainer, from micro-batches of fewer
positions.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import slow
from torch import Tensor

pytest.importorskip("trl")
from batches import forwards, generation_batch
from peft import LoraConfig
from tiny_trl import EOS, GROUP, PAD, VOCABULARY, PlainTrainer, generated, model, trainer
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from d3s_kernels.integrations.trl import D3STrainer

LIMIT = 24
IDS = {"vocab_size": VOCABULARY, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
TOLERANCE = 1e-6  # of the norm of the gradient. Later steps start from weights that differ by such an error.


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Prompts and completions of all lengths; those of a step and a process are the same for every trainer."""
    seed = 1_000 * trainer.state.global_step + trainer.accelerator.process_index
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randn(len(prompts), generator=draws).exp().mul(5).ceil().clamp(1, LIMIT).int().tolist()
    lengths[0] = LIMIT
    begins = torch.randint(1, 7, (len(prompts),), generator=draws).tolist()

    def tokens(length: int) -> list[int]:
        drawn: list[int] = torch.randint(2, VOCABULARY, (length,), generator=draws).tolist()
        return drawn

    made = {"prompt_ids": [tokens(n) for n in begins], "completion_ids": [tokens(n) for n in lengths]}
    for tokens_of_row in made["completion_ids"]:  # most completions end, the others are truncated
        if torch.rand((), generator=draws) < 0.7:
            tokens_of_row[-1] = EOS
    return made | {"logprobs": None}


class Steps(TrainerCallback):
    """The gradient of each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        self.gradients.append(torch.cat([gradient.flatten().clone() for gradient in found]))


def trained(
    kind: type[GRPOTrainer], options: dict[str, Any], callback: Any = None
) -> tuple[GRPOTrainer, list[Tensor], list[list[int]]]:
    """A trainer after its run, the gradient of each optimizer step, and the shape of each forward with a gradient."""
    options = {"gradient_accumulation_steps": 4, "max_steps": 1, "max_completion_length": LIMIT} | options
    options |= {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 0.0}
    policy = options.pop("model", model)()
    if issubclass(kind, D3STrainer):
        options = {"keep_all": True, "rollouts": 1.0, "tokens": 1.0} | options
    made = trainer(kind, policy=policy, rollout_func=rollouts, **options)
    for each in [steps := Steps(), *([callback] if callback else [])]:
        made.add_callback(each)
    torch.manual_seed(3)
    with forwards(made.model) as seen:
        made.train()
    return made, steps.gradients, [list(given["input_ids"].shape) for has_gradient, given in seen if has_gradient]


def positions(shapes: list[list[int]]) -> int:
    return sum(map(math.prod, shapes))


def assert_same_gradients(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert theirs.norm() > 0
        assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE * (5 if step else 1)


def gpt2() -> GPT2LMHeadModel:
    """Learns an embedding for each position, so that prompts may not be cut."""
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40}
    made = GPT2LMHeadModel(GPT2Config(**sizes, **IDS, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    with torch.no_grad():
        made.transformer.wpe.weight.mul_(20)
    return made


# Losses, levels, divisions and terms of the loss are drawn by test_trl_sweep.py.
ORDERED: dict[str, dict[str, Any]] = {
    "updates that end within a generation": {
        "steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 5,
    },
    "positions that are learnt": {"model": gpt2},
    "embeddings that depend on the number of columns": {
        "num_iterations": 2, "max_steps": 2, "loss_type": "dapo", "model": lambda: model(
            max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
    },
}  # fmt: skip
LATER: dict[str, dict[str, Any]] = {
    "activation checkpointing": {"gradient_checkpointing": True},
    "adapters": {"peft_config": LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)},
    "a window": {"model": lambda: model(use_sliding_window=True, sliding_window=4, max_window_layers=0)},
}
CASES = [*ORDERED, *(slow(name, shows="that this leaves the gradient as it is") for name in LATER)]


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_trls(name: str) -> None:
    options = {"loss_type": "grpo"} | (ORDERED | LATER)[name]
    _, theirs, before = trained(PlainTrainer, options)
    made, ours, after = trained(D3STrainer, options)
    assert_same_gradients(ours, theirs)
    assert len(after) == len(before)
    by_length = name == "embeddings that depend on the number of columns"
    assert positions(after) == positions(before) if by_length else positions(after) < 0.9 * positions(before)
    steps = made.args.steps_per_generation
    assert [sum(rows for rows, _ in shapes[:steps]) for shapes in (before, after)] == [steps * GROUP] * 2
    if not by_length:
        assert max(map(math.prod, after)) <= max(map(math.prod, before))
        assert len({rows for rows, _ in after}) > 1


def experts() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **of_experts, **IDS))
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(20)
    return made


def test_rows_stay_where_each_micro_batch_has_a_router_loss() -> None:
    """Other losses whose rows stay: test_trl_sweep.py."""
    options = {"model": experts}
    _, theirs, before = trained(PlainTrainer, options)
    _, ours, after = trained(D3STrainer, options)
    assert_same_gradients(ours, theirs)
    assert [rows for rows, _ in after] == [GROUP] * len(before)
    assert positions(after) < positions(before)  # each micro-batch is cut to its own columns
    with pytest.raises(ValueError, match="order_rows: got 'work'; takes 'auto' or 'none', because the router loss is"):
        trained(D3STrainer, options | {"order_rows": "work"})


def test_an_epoch_that_ends_within_a_step_leaves_nothing_behind() -> None:
    """The next step has all of its rows. (The step that was broken off had others of its rows than TRL's.)"""

    class EndsEpoch(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen = getattr(self, "seen", 0) + 1
            control.should_epoch_stop = self.seen == 2

    options = {"steps_per_generation": 8, "max_steps": 3}
    (_, _, before), (_, _, after) = (
        trained(kind, options, callback=EndsEpoch()) for kind in (PlainTrainer, D3STrainer)
    )
    assert len(after) == len(before)
    assert sum(rows for rows, _ in after[2:]) == GROUP * len(after[2:])


def test_a_pass_forwards_rows_of_similar_lengths_together(saved: str) -> None:
    """The passes for old and reference log-probabilities, with sets, as many forwards as TRL's."""
    found = {}
    for order in ("none", "auto"):
        options = {"num_iterations": 2, "steps_per_generation": 4, "beta": 0.1, "sampling_mask": True, "top_p": 0.9}
        made = trainer(policy=saved, rollouts=1.0, order_rows=order, max_completion_length=LIMIT, **options)
        torch.manual_seed(5)
        with forwards(made.model) as seen:
            batch = generated(made, (3, 5, 7, 9))
        shapes = [list(given["input_ids"].shape) for _, given in seen]
        found[order] = batch, shapes
    (plain, before), (ordered, after) = found["none"], found["auto"]
    assert len(after) == len(before)
    assert positions(after) < positions(before)
    mask = plain["completion_mask"].bool()
    for name in ("old_per_token_logps", "ref_per_token_logps", "d3s_entropy"):
        torch.testing.assert_close(ordered[name][mask], plain[name][mask], rtol=0, atol=1e-5)
    assert torch.equal(ordered["completion_ids"], plain["completion_ids"])


def test_images_go_with_their_rows() -> None:
    made = trainer(keep_all=True, rollouts=1.0, tokens=1.0, loss_type="grpo")
    batch = generation_batch(3)
    numbers = torch.arange(len(batch["advantages"]))
    batch |= {"advantages": numbers.float(), "num_images": (numbers % 3).tolist()}
    owner = numbers.repeat_interleave(numbers % 3)  # of images, which have one or two patches
    grids = torch.stack([torch.ones_like(owner), torch.ones_like(owner), 1 + owner % 2], dim=1)
    batch |= {"pixel_values": owner.repeat_interleave(1 + owner % 2)[:, None].float(), "image_grid_thw": grids}
    batch |= {"mm_token_type_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)}
    shuffled = split_tensor_dict(shuffle_sequence_dict(split_pixel_values_by_grid(batch)), 2)
    parts = made._divided([unsplit_pixel_values_by_grid(part) for part in shuffled])
    assert sorted(torch.cat([part["advantages"] for part in parts]).tolist()) == numbers.tolist()
    for part in parts:
        rows = part["advantages"].long()
        assert part["num_images"] == (rows % 3).tolist()
        images = rows.repeat_interleave(rows % 3)
        assert part["image_grid_thw"][:, 2].equal(1 + images % 2)
        assert part["pixel_values"][:, 0].equal(images.repeat_interleave(1 + images % 2).float())
        sides = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        assert torch.equal(part["mm_token_type_ids"], sides)
        for row, number in enumerate(rows.tolist()):
            mask = part["completion_mask"][row].bool()
            assert torch.equal(part["completion_ids"][row][mask], batch["completion_ids"][number][: mask.sum()])
            assert mask.sum() == batch["completion_mask"][number].sum()
