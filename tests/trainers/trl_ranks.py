"""One of several processes that train together; it leaves in a folder what it has then.

torchrun ... trl_ranks.py FOLDER OPTIONS     (JSON) what it kept, and its gradient; for test_trl_processes.py
torchrun ... trl_ranks.py FOLDER             groups without a spread are replaced; for test_trl_refill.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from batches import forwards, generation_batch, gradients, rows_of, with_sets
from test_trl_micro_batches import trained
from tiny_trl import GROUP, PlainTrainer, generated, model, none_for_even_prompts, trainer
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from traffic import counted

from d3s_kernels import select_tokens
from d3s_kernels.integrations.trl import D3STrainer
from d3s_kernels.integrations.trl.batch import SETS

ROWS = 24  # three groups of 8; on two processes the second one lies on both
PROMPTS = ((3, 4), (6, 8))  # of each process, to refill; all rewards of the even ones are equal


def batch_of_rank(seed: int, rank: int, ranks: int, sets: bool = False, ruled: bool = False) -> dict[str, Tensor]:
    """This process's rows, as narrow as they can be. ``ruled``: with what an ``off_policy_rule`` reads."""
    batch = generation_batch(seed, ROWS)
    batch["advantages"][:8] *= 0.1  # so that processes differ in how many rollouts they keep
    # The first process has the shorter prompts and completions, so rows that it receives are wider.
    batch["prompt_mask"][:8, :2] = 0
    batch["completion_mask"][:8, 6:] = 0
    batch["completion_ids"][batch["completion_mask"].sum(dim=1) > 3, 0] = 3  # many rollouts begin alike
    batch["completion_ids"] *= batch["completion_mask"]
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    if ruled:
        random, shape = torch.Generator().manual_seed(seed), batch["completion_ids"].shape
        batch["old_per_token_logps"] = -3 * torch.rand(shape, generator=random)
        noise = 0.3 * torch.randn(shape, generator=random)
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + noise
    if sets:
        batch = with_sets(batch)
        batch[SETS][:8, :, 4:] = -1
    share = ROWS // ranks
    own = rows_of(batch, slice(rank * share, (rank + 1) * share))
    prompt = int((own["prompt_mask"].any(0)).long().argmax())
    completion = int(own["completion_mask"].any(0).sum())
    if sets:
        own[SETS] = own[SETS][:, :, : int((own[SETS] >= 0).any(0).any(0).nonzero().max()) + 1]
    return {
        name: value[:, prompt:] if name.startswith("prompt") else value[:, :completion] if value.dim() > 1 else value
        for name, value in own.items()
    }


def kinds_of(args: Any) -> tuple[bool, bool]:
    return args.sampling_mask, args.off_policy_rule != "none"


def outcome(made: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What D3S does with a generation batch: the rows, the tokens and the gradient of the loss."""
    has_mass = made.args.group_variance_mass is not None
    rewards = batch_of_rank(1, 0, 1)["advantages"].unsqueeze(1) if has_mass else None
    batch = made._keep_rollouts(batch, rewards)
    if made._tokens_before_update:
        made._choose_tokens_of_batch(batch)
    made.compute_loss(made.model, batch).backward()
    logged = made._metrics["train"]
    metrics = {name: torch.tensor(values) for name, values in logged.items() if "d3s" in name or name == "entropy"}
    return {**batch, **metrics, "gradient": gradients(made)}


def watched(made: Any, name: str, calls: list[tuple[str, int]]) -> None:
    """From now on, records what a method of the trainer sends."""
    method = getattr(made, name)

    def counting(*arguments: Any) -> Any:
        with counted() as seen:
            result = method(*arguments)
        calls.extend(seen)
        return result

    setattr(made, name, counting)


def refilled(folder: str) -> None:
    made = trainer(
        refill=2, rollouts=GROUP, tokens=1.0, reward_funcs=none_for_even_prompts, ddp_backend="gloo",
        per_device_train_batch_size=2 * GROUP, gradient_accumulation_steps=1, output_dir=folder,
    )  # fmt: skip
    here = made.accelerator.process_index
    found = {"batch": generated(made, PROMPTS[here]), "prompts": list(made._logs["prompt"])}
    found["logged"] = {name: list(value) for name, value in made._metrics["train"].items()}
    made.train()
    torch.save(found | {"weights": parameters_to_vector(made.model.parameters())}, Path(folder) / f"{here}.pt")


def nothing_dropped(loss: str) -> dict[str, Any]:
    """The gradients of TRL's trainer and of ours, and the shapes of our forwards."""
    options = {"loss_type": loss, "ddp_backend": "gloo", "gradient_accumulation_steps": 3, "num_iterations": 2}
    options |= {"max_steps": 2, "per_device_train_batch_size": GROUP}
    _, theirs, _ = trained(PlainTrainer, options)
    _, ours, shapes = trained(D3STrainer, options)
    return {"theirs": theirs, "ours": ours, "shapes": shapes}


def selected(folder: str, options: str) -> None:
    made = trainer(
        policy=model(), ddp_backend="gloo", gradient_accumulation_steps=1, output_dir=folder, selection_page_steps=1,
        **json.loads(options),
    )  # fmt: skip
    here, ranks = made.accelerator.process_index, made.accelerator.num_processes
    assert ranks > 1
    sent: dict[str, list[tuple[str, int]]] = {"_keep_rollouts": [], "_choose_tokens": []}
    for name, calls in sent.items():
        watched(made, name, calls)
    with forwards(made.model) as seen_forwards:
        found = outcome(made, batch_of_rank(1, here, ranks, *kinds_of(made.args)))
    found["forwards"] = torch.tensor(len(seen_forwards))
    with counted() as sent["one token"]:
        one = torch.ones(1, 1), torch.ones(1)
        select_tokens(*one, 1.0, drop_zeros=made.args.drop_zeros, process_group=torch.distributed.group.WORLD)
    torch.save(found | {"sent": sent}, Path(folder) / f"{here}.pt")
    made._metrics["train"].clear()
    made.train()  # whole steps, with generation; DDP averages the gradients
    rows = [row for row in made.state.log_history if "d3s/tokens_kept" in row]
    found = {"logged": [(row["d3s/rollouts_kept"], row["d3s/tokens_kept"]) for row in rows]}
    found |= nothing_dropped(made.loss_type)
    torch.save(found | {"weights": parameters_to_vector(made.model.parameters())}, Path(folder) / f"trained-{here}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    (refilled if len(sys.argv) == 2 else selected)(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's shutdown: gloo's threads may still want to free objects that Python holds, and abort.
    os._exit(0)
