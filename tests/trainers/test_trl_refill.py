"""DAPO's dynamic sampling in D3STrainer: groups without a spread give way to groups of other prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import pandas as pd
from batches import looked_at
from processes import run_processes
from tiny_trl import GROUP, generated, none_for_even_prompts, trainer

from d3s_kernels.integrations.trl.refill import other_prompts, replacements, rows_of


def made_with(refill: int, reward_funcs: Any = none_for_even_prompts, **options: Any) -> Any:
    return trainer(refill=refill, reward_funcs=reward_funcs, rollouts=GROUP, tokens=1.0, **options)


def first_words(batch: dict[str, Any]) -> list[int]:
    """The number of each row's first word: the prompt's is the first that is no padding."""
    rows = zip(batch["prompt_ids"].tolist(), batch["prompt_mask"].tolist(), strict=True)
    return [next(token for token, there in zip(ids, mask, strict=True) if there) for ids, mask in rows]


def test_groups_without_a_spread_are_replaced() -> None:
    made = made_with(8)
    batch = generated(made, prompts=(3, 4, 6, 5))  # of 4 and 6 all rewards are equal
    words = torch.tensor(first_words(batch)).view(-1, GROUP)
    assert (words == words[:, :1]).all(), "a group's rows are one prompt's, and stay together"
    assert words[:, 0].tolist()[::3] == [3, 5]
    assert (words % 2 == 1).all()
    advantages = batch["advantages"].view(-1, GROUP)
    assert (advantages.std(dim=1) > 0.5).all(), "scaled by their own group's deviation"
    logged = made._metrics["train"]
    assert logged["d3s/groups_refilled"] == [2]
    assert 1 <= logged["d3s/refills"][0] <= 8
    assert logged["d3s/groups_without_spread"] == [0]


def test_the_table_of_completions_has_the_rows_of_the_batch(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the new rows are also scored by the old policy's and the reference's pass, and shown on a page."""

    def reward(prompts: list[str], completion_ids: list[list[int]], log_extra: Any, **_: Any) -> list[float]:
        log_extra("length", [len(tokens) for tokens in completion_ids])
        return none_for_even_prompts(prompts, completion_ids)

    scored = {"policy": saved, "selection_page_steps": 1, "entropy_from": "rollout", "beta": 0.1}
    made, batches = made_with(8, reward, log_completions=True, output_dir=str(tmp_path), **scored), []
    looked_at(monkeypatch, made, "_keep_rollouts", lambda _, batch, *__: batches.append(batch))
    made.train()
    refills = 0
    for step, batch in enumerate(batches, 1):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        ids = [row[mask.bool()] for row, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)]
        assert [int(prompt.split()[0][1:]) for prompt in table["prompt"]] == first_words(batch)
        assert list(table["completion"]) == made._tokenizer.batch_decode(ids, skip_special_tokens=True)
        assert list(table["length"]) == [len(tokens) for tokens in ids]
        assert list(table["advantage"]) == batch["advantages"].tolist()
        assert table["reward"].groupby(table.index // GROUP).nunique().gt(1).all()
        refills += made.state.log_history[step - 1]["d3s/refills"]
    assert refills > 0


def test_fields_of_a_rollout_func_are_no_columns_of_the_data_set() -> None:
    """TRL adds them to the examples, so that reward functions get them."""

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        ids = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
        scores = [prompt[0] % 2 * place / len(ids) for place, prompt in enumerate(ids)]  # even prompts: no spread
        return {"prompt_ids": ids, "completion_ids": [[5, 6]] * len(ids), "logprobs": None, "score": scores}

    made = trainer(refill=8, reward_funcs=lambda score, **_: score, rollout_func=rollout)
    generated(made, prompts=(4, 3))
    assert made._metrics["train"]["d3s/groups_refilled"] == [1]


def test_nothing_is_generated_again_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sizes = made_with(3), []
    looked_at(monkeypatch, made, "_generate", lambda _, prompts: sizes.append(len(prompts)))
    generated(made, prompts=(3, 5))
    assert sizes == [2 * GROUP]
    generated(made, prompts=(3, 4))
    assert set(sizes[2:]) == {GROUP}, "only as many prompts as are missing"


def test_it_gives_up_after_so_many_times() -> None:
    made = made_with(2, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    batch = generated(made, prompts=(3, 5))
    assert first_words(batch) == [3] * GROUP + [5] * GROUP
    assert made._metrics["train"]["d3s/refills"] == [2]
    assert made._metrics["train"]["d3s/groups_refilled"] == [0]


def test_ranks_draw_other_prompts_of_one_order() -> None:
    data = [{"prompt": f"w{i}", "answer": i} for i in range(12)]
    drawn = [other_prompts(data, ["prompt"], 2, 3, 2, rank, 7, 5, 0) for rank in range(2)]
    assert all(list(example) == ["prompt"] for of_rank in drawn for example in of_rank)
    names = [example["prompt"] for of_rank in drawn for example in of_rank]
    assert len(set(names)) == 4
    assert names == [name for name in dict.fromkeys(names) for _ in range(3)]
    assert other_prompts(data, ["prompt"], 2, 3, 2, 0, 7, 5, 0) == drawn[0]
    assert other_prompts(data, ["prompt"], 2, 3, 2, 0, 7, 5, 1) != drawn[0]


def test_every_rank_knows_what_replaces_what() -> None:
    same = torch.tensor([[True, False, True], [False, True, False]])
    groups = replacements(same, torch.tensor([[True, False], [False, False]]))
    assert groups.tolist() == [[4, 1, 2], [0, 3, 2]]
    assert rows_of(groups, 2).tolist() == [[8, 9, 2, 3, 4, 5], [0, 1, 6, 7, 4, 5]]


def test_a_data_set_without_a_length() -> None:
    made = made_with(1)
    made.train_dataset = iter([])
    with pytest.raises(ValueError, match="refill: takes prompts without images, a data set with a length"):
        generated(made, prompts=(3, 4))


@pytest.mark.slow("that processes which need different numbers of further prompts agree")
def test_two_processes(tmp_path: Path) -> None:
    run_processes(Path(__file__).with_name("trl_ranks.py"), 2, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["weights"], second["weights"])
    for name in ("d3s/refills", "d3s/groups_refilled"):
        assert first["logged"][name] == second["logged"][name], name
    words = [torch.tensor(first_words(found["batch"])).view(-1, GROUP) for found in (first, second)]
    assert all((of_rank == of_rank[:, :1]).all() for of_rank in words)
    for found in (first, second):  # TRL's table of completions has the rows of all ranks
        assert [int(prompt.split()[0][1:]) for prompt in found["prompts"]] == torch.cat(words).flatten().tolist()
    assert words[0][0, 0] == 3
    replaced = sum(int(word % 2) for of_rank in words for word in of_rank[:, 0]) - 1
    assert first["logged"]["d3s/groups_refilled"] == [replaced]
