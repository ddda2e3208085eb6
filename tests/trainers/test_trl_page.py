"""The pages that `selection_page_steps` writes show what was trained on. With processes: test_trl_processes.py."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from tiny_trl import EOS, GROUP, share_of_even, trainer

from d3s_kernels.integrations.trl.page import SHOWN

Token = tuple[str, bool, float, float | None]  # text, kept, score, entropy


def pages(folder: Path) -> dict[int, str]:
    """The pages by step."""
    found = sorted((folder / "selection").glob("*"))
    return {int(re.fullmatch(r"step-(\d{6})\.html", path.name)[1]): path.read_text("utf-8") for path in found}


def rollouts(page: str) -> list[str]:
    """The HTML of each rollout, in the order of the generation batch."""
    return re.findall(r"<(?:article|details)>.*?</(?:article|details)>", page, re.DOTALL)


def tokens(rollout: str) -> list[Token]:
    """The tokens of a kept rollout that have a score."""
    found = re.findall(r"<(i|mark) class=s\d data-s=([^ >]+)(?: data-h=([^ >]+))?>(.*?)</\1>", rollout, re.DOTALL)
    return [
        (html.unescape(text).strip(), tag == "mark", float(score), float(entropy) if entropy else None)
        for tag, score, entropy, text in found
    ]


def text(rollout: str) -> str:
    (inside,) = re.findall(r'<div class="text"[^>]*>(.*)</div>', rollout, re.DOTALL)
    return html.unescape(re.sub("<[^>]*>", "", inside))


def run(folder: Path, **options: Any) -> tuple[list[dict[int, list[Token]]], Any]:
    """Trains. Returns the tokens that each loss saw, of each rollout by its place, and the trainer."""
    made = trainer(output_dir=str(folder), **options)
    seen: list[dict[int, list[Token]]] = []
    log = made._log_tokens

    def spy(batch: Any, chosen: Any, mask: torch.Tensor, entropy: torch.Tensor, *more: torch.Tensor) -> Any:
        rows: dict[int, list[Token]] = {}
        values = batch["completion_ids"], chosen.kept, mask, entropy
        for row, place in enumerate(batch["d3s_rollout"].tolist() if "d3s_rollout" in batch else []):
            weight = abs(float(batch["advantages"][row]))
            rows[place] = [
                (made._tokenizer.decode([token]), is_kept, weight * h, h)
                for token, is_kept, counts, h in zip(*(value[row].tolist() for value in values), strict=True)
                if counts
            ]
        seen.append(rows)
        return log(batch, chosen, mask, entropy, *more)

    made._log_tokens = spy
    made.train()
    return seen, made


def one_page(folder: Path, **options: Any) -> tuple[str, list[dict[int, list[Token]]]]:
    """The page of a single step, and the tokens that each loss saw."""
    seen, _ = run(folder, max_steps=1, selection_page_steps=1, **options)
    (page,) = pages(folder).values()
    return page, seen


def assert_shows(page: str, seen: list[dict[int, list[Token]]], count: int = 2 * GROUP) -> None:
    """The page has the tokens of the loss, each in its place, and folds the rollouts that no loss saw."""
    expected = {place: row for micro_batch in seen for place, row in micro_batch.items()}
    shown = rollouts(page)
    assert len(shown) == count
    for place, rollout in enumerate(shown):
        assert rollout.startswith("<article>" if place in expected else "<details>")
        found, wanted = tokens(rollout), expected.get(place, [])
        assert [token[:2] for token in found] == [token[:2] for token in wanted]
        for (*_, score, entropy), (*_, wanted_score, wanted_entropy) in zip(found, wanted, strict=True):
            assert score == pytest.approx(wanted_score, rel=6e-3, abs=1e-6)
            if entropy is not None:
                assert entropy == pytest.approx(wanted_entropy, rel=6e-3, abs=1e-6)
            else:
                assert score == 0  # no pass has scored a rollout without an advantage


def test_every_second_step_the_tokens_that_were_kept(tmp_path: Path) -> None:
    seen, made = run(tmp_path, max_steps=4, selection_page_steps=2)
    found = pages(tmp_path)
    assert list(found) == [0, 2]
    for step, page in found.items():
        assert_shows(page, seen[2 * step : 2 * step + 2])
        assert page.count("<article>") == made.state.log_history[step]["d3s/rollouts_kept"]
        assert f"<title>Step {step}: " in page


def test_rollouts_without_an_advantage_have_no_entropy_of_their_own(tmp_path: Path) -> None:
    """The advantages that are shown are those that the loss has."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        values = share_of_even(completion_ids)
        return [value if row < GROUP else 0.5 for row, value in enumerate(values)]

    options = {"entropy_from": "rollout", "advantages_from": "kept", "rollout_scope": "group"}
    page, seen = one_page(tmp_path, reward_funcs=reward, rollouts=7, **options)
    assert_shows(page, seen)
    found = [token for rollout in rollouts(page)[GROUP:] for token in tokens(rollout)]
    assert found
    assert all(entropy is None for *_, entropy in found)


def test_each_rollout_has_its_reward_and_its_advantage_and_marks_tokens_of_the_loss_alone(tmp_path: Path) -> None:
    """Every second completion is truncated, and tokens in the middle of each are a tool's."""
    ids, rewards = torch.randint(2, 60, (2 * GROUP, 10)), torch.rand(2, GROUP)
    ids[::2, -1] = EOS

    def generate(prompts: list[Any], _: Any) -> dict[str, Any]:
        mask = [[1, 1, 1, 0, 0, 0, 1, 1, 1, 1] for _ in prompts]
        return {
            "prompt_ids": [[5, 6]] * len(prompts),
            "completion_ids": ids.tolist(),
            "logprobs": None,
            "env_mask": mask,
        }

    page, _ = one_page(
        tmp_path, rollout_func=generate, reward_funcs=lambda **_: rewards.flatten().tolist(), rollouts=GROUP,
        mask_truncated_completions=True,
    )  # fmt: skip
    assert f"of {7 * GROUP:,}</b> tokens" in page
    assert page.count("of 7 tokens kept") == GROUP
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    for place, rollout in enumerate(rollouts(page)):
        is_whole = place % 2 == 0
        assert text(rollout).split()[:9] == [f"w{token}" for token in ids[place, :9].tolist()]
        assert len(tokens(rollout)) == (7 if is_whole else 0)
        assert ("not in the loss" in rollout) == (not is_whole)
        reward, advantage = re.search(r"reward ([\d.]+), advantage <b[^>]*>([-+.\d]+)</b>", rollout).groups()
        assert float(reward) == pytest.approx(rewards.flatten()[place].item(), abs=5e-3)
        assert float(advantage) == pytest.approx(advantages.flatten()[place].item(), abs=5e-3)


def test_pages_are_of_generations_and_a_second_run_has_its_own(tmp_path: Path) -> None:
    """Each generation lasts for two steps, so the page of step 1 is that of step 2."""
    _, made = run(tmp_path, max_steps=4, selection_page_steps=1, num_iterations=2)
    assert list(pages(tmp_path)) == [0, 2]
    for page in (tmp_path / "selection").iterdir():
        page.unlink()
    made.train()
    assert list(pages(tmp_path)) == [0, 2]
    run(tmp_path / "other", max_steps=1)
    assert not (tmp_path / "other" / "selection").exists(), "a page is written only if it is asked for"


def test_at_most_so_many_rollouts_in_whole_groups(tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 3 * GROUP, "num_generations": 24, "gradient_accumulation_steps": 4}
    page, _ = one_page(tmp_path, **options)
    assert len(rollouts(page)) == SHOWN // 24 * 24
    assert page.count("<h2>") == SHOWN // 24


def test_what_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "selection").write_text("in the way")
    with pytest.warns(UserWarning, match=r"selection_page_steps: the page .*step-000000.html could not be written"):
        _, made = run(tmp_path, max_steps=2, selection_page_steps=1)
    assert made.state.global_step == 2
