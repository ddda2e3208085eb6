"""Several processes choose what one process with all rollouts would choose, also for groups on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import slow
from torch import Tensor
from torch.nn.utils import parameters_to_vector

pytest.importorskip("trl")
from processes import run_processes
from test_trl_micro_batches import assert_same_gradients
from tiny_trl import model, trainer
from trl_ranks import ROWS, batch_of_rank, kinds_of, outcome

PER_RANK = {2: 12, 3: 8}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "shared tokens": (2, {"drop_shared_tokens": True}),
    "tokens before it": (2, {"entropy_from": "rollout"}),
    "an odd number to keep": (2, {"rollouts_start": 3, "rollouts_end": 3}),
    "of each group": (2, {"rollout_scope": "group", "token_scope": "sequence", "loss_type": "bnpo"}),
    "one that keeps none": (3, {"rollouts_start": 2, "rollouts_end": 2, "drop_zeros": True}),
    "by other rules": (2, {"rollout_rule": "random", "token_rule": "entropy", "entropy_from": "rollout"}),
    "prefixes": (2, {"token_rule": "prefix", "token_ratio_start": 0.5, "token_ratio_end": 0.5}),
    "sampling masks": (2, {"sampling_mask": True, "top_p": 0.9, "top_k": 50, "temperature": 0.8}),
    "off-policy tokens": (2, {"sampling_mask": True, "top_p": 0.9, "off_policy_rule": "m2po", "off_policy_high": 0.03}),
    "variance mass": (2, {"drop_shared_tokens": True, "entropy_from": "rollout", "group_variance_mass": 0.9}),
    "three processes": (
        3,
        {
            "advantages_from": "kept",
            "rollout_scope": "group",
            "loss_type": "grpo",
            "entropy_from": "rollout",
        },
    ),
}
QUICK = "shared tokens"
PARAMETERS = [QUICK, *(slow(name, shows="these options across processes") for name in CASES if name != QUICK)]


@pytest.fixture(scope="module", params=PARAMETERS)
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict, list, list]:
    """The number of processes, the options, each process's outcome, and what each has after training."""
    ranks, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("ranks")
    own = options | {"per_device_train_batch_size": PER_RANK[ranks]}
    run_processes(Path(__file__).with_name("trl_ranks.py"), ranks, folder, json.dumps(own))
    outcomes = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    trained = [torch.load(folder / f"trained-{rank}.pt") for rank in range(ranks)]
    pages = [path.read_text("utf-8") for path in sorted((folder / "selection").iterdir())]
    return ranks, options, outcomes, [one | {"pages": pages} for one in trained]


def alone(ranks: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """The outcome of a single process, which rounds up to the same number of rollouts."""
    made = trainer(
        policy=model(), per_device_train_batch_size=ROWS, gradient_accumulation_steps=ranks, **options,
        steps_per_generation=ranks,
    )  # fmt: skip
    made.current_gradient_accumulation_steps = ranks
    return outcome(made, batch_of_rank(1, 0, 1, *kinds_of(made.args)))


def by_rollout(batch: dict[str, Tensor], name: str) -> dict[tuple[int, ...], Any]:
    """A field's values, by the tokens of the rollout."""
    mask = batch["prompt_mask" if name.startswith("prompt") else "completion_mask"].bool()
    rows = zip(batch[name], mask, strict=True)
    values = [(value[present] if value.dim() else value).tolist() for value, present in rows]
    tokens = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
    found = {tuple(ids[present].tolist()): value for (ids, present), value in zip(tokens, values, strict=True)}
    assert len(found) == len(values)  # rollouts are told by their tokens
    return found


def merged(outcomes: list[dict[str, Tensor]], name: str) -> dict[tuple[int, ...], Any]:
    found: dict[tuple[int, ...], Any] = {}
    for one in outcomes:
        rows = by_rollout(one, name)
        assert not rows.keys() & found.keys()  # no rollout is on two processes
        found |= rows
    return found


def test_the_same_rollouts_and_as_many_on_each_process(together: tuple) -> None:
    ranks, options, outcomes, _ = together
    single = alone(ranks, options)
    assert len({len(one["advantages"]) for one in outcomes}) == 1
    assert outcomes[0]["forwards"] > 0
    assert len({int(one["forwards"]) for one in outcomes}) == 1  # the forwards of a sharded model are joint
    assert sum(len(one["advantages"]) for one in outcomes) == len(single["advantages"])
    assert merged(outcomes, "advantages") == pytest.approx(by_rollout(single, "advantages"), rel=1e-5, abs=1e-6)
    for one in outcomes:
        assert one["num_items_in_batch"] == single["num_items_in_batch"]


def test_prompts_travel_with_their_completions(together: tuple) -> None:
    prompts = by_rollout(batch_of_rank(1, 0, 1), "prompt_ids")
    ranks, options, outcomes, _ = together
    moved = []
    for rank, one in enumerate(outcomes):
        found, at_first = (by_rollout(batch, "prompt_ids") for batch in (one, batch_of_rank(1, rank, ranks)))
        assert found.items() <= prompts.items()
        moved.append(len(found.keys() - at_first.keys()))
    assert sum(moved) > 0 or options.get("rollout_scope") == "group"  # with scope "batch", one process has more to keep
    if options == CASES["one that keeps none"][1]:
        assert moved[1] == len(outcomes[1]["advantages"])  # all came from other processes
    exchanges = [name for one in outcomes for name, _ in one["sent"]["_keep_rollouts"] if "alltoall" in name]
    assert len(exchanges) == (ranks if sum(moved) else 0)


def test_no_scores_travel(together: tuple) -> None:
    """Ranks send two numbers for each rollout, the rows that move, and as many counts of tokens as for one token; also
    the ids of all tokens once, to find shared ones.
    """
    ranks, options, outcomes, _ = together
    rows, shared = PER_RANK[ranks], bool(options.get("drop_shared_tokens"))
    for one in outcomes:
        sizes = [size for name, size in one["sent"]["_keep_rollouts"] if "alltoall" not in name]
        large = [size for size in sizes if size > 4 * (2 * rows + 1)]
        assert len(large) <= shared
        assert max(large, default=0) <= 8 * 10 * rows
        by_sequence = options.get("token_scope") == "sequence"
        assert one["sent"]["_choose_tokens"] == ([] if by_sequence else one["sent"]["one token"])


def test_the_same_tokens_and_gradient(together: tuple) -> None:
    ranks, options, outcomes, _ = together
    single = alone(ranks, options)
    if "d3s_kept" in single:
        assert merged(outcomes, "d3s_kept") == by_rollout(single, "d3s_kept")
    for one in outcomes:
        shares = ["d3s/shared_share"] if options.get("drop_shared_tokens") else []
        for name in ("d3s/tokens_kept", "d3s/rollouts_kept", "d3s/groups_kept", *shares):
            assert one[name].tolist() == single[name].tolist(), name
        for name in ("entropy", "d3s/entropy_kept", "d3s/entropy_dropped"):
            assert one[name].tolist() == pytest.approx(single[name].tolist(), rel=1e-4, nan_ok=True), name
    gradient = torch.stack([one["gradient"] for one in outcomes]).mean(dim=0)
    assert gradient.norm() > 0
    loss, tolerance = options.get("loss_type", "dapo"), 1e-4 * float(gradient.abs().max())
    if loss != "bnpo":  # its mean is over each process's own tokens, in TRL too
        # The single process accumulates over as many steps, for which dapo's denominator accounts.
        expected = single["gradient"] * (ranks if loss == "grpo" else 1)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=tolerance)


def test_training_keeps_the_processes_together(together: tuple) -> None:
    first, *others = (one["weights"] for one in together[3])
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, parameters_to_vector(model().parameters()))


def test_with_nothing_dropped_the_gradient_is_trls(together: tuple) -> None:
    """The k-th micro-batch has as many rows on every process, since TRL gathers values of rows."""
    rows = [[rows for rows, _ in one["shapes"]] for one in together[3]]
    assert all(own == rows[0] for own in rows)
    assert together[1].get("loss_type") == "bnpo" or len({*rows[0]}) > 1
    for one in together[3]:
        assert_same_gradients(one["ours"], one["theirs"])


def test_pages_show_the_rollouts_of_all_processes(together: tuple) -> None:
    first = together[3][0]
    assert len(first["pages"]) == len(first["logged"]) > 1
    for page, (rollouts, tokens) in zip(first["pages"], first["logged"], strict=True):
        assert page.count("<article>") == rollouts
        assert page.count("<article>") + page.count("<details>") == ROWS
        assert page.count("<mark class=s") == tokens
