"""Draws the first picture of README.md: what is kept of a batch, and the time of an update with it.

    python tools/overview.py            # after a benchmark run on a GPU whose result was committed
    python tools/overview.py --check    # checks that the picture matches the results; writes nothing

The library chooses what the picture shows as kept. The answers and their entropies are a model's:
tools/record_answers.py recorded them. The times are those of the newest run on a GPU. A test runs the check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from performance import ROOT, newest
from performance_picture import MOST_BYTES, words_in

import d3s_kernels as d3s
from benchmarks.withdrawn import FULL_UPDATE
from d3s_kernels.report.render import LEVELS, darkest_from, shade
from d3s_kernels.savings.model import from_config

PICTURE = ROOT / "docs" / "overview.png"
BATCH = Path(__file__).with_name("overview_batch.json")
KEEP, RATIO = 4, 0.1  # of a group's 8 rollouts on average, and of the kept rollouts' tokens; as in the contest
OPENED = 1, 2  # the question and the answer whose tokens are shown
CONTENDERS = {
    "TRL, everything": "GRPOTrainer",
    "with our LM head": "GRPOTrainer with our LM head",
    "with D3S": "d3s_kernels",
}


# Of Qwen2.5-0.5B, as in its config.json.
QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
}  # fmt: skip


class Token(NamedTuple):
    text: str
    kept: bool
    shade: float  # from 0 to 1


class Shown(NamedTuple):
    """All that the picture shows."""

    questions: list[str]
    rewards: list[list[float]]  # of each answer to each question
    kept: list[list[bool]]
    opened: int  # the answer to the last question whose tokens are shown
    tokens: list[Token]
    headings: list[tuple[str, str]]
    milliseconds: dict[str, float]
    note: str

    def words(self) -> str:
        """The same as text. It is stored in the picture's file, because pixels change with matplotlib's releases."""
        rows = zip(self.questions, self.rewards, self.kept, strict=True)
        groups = [f"{question}: rewards {rewards}, kept {kept}" for question, rewards, kept in rows]
        tokens = [f"{token.text!r}{' kept' * token.kept} {token.shade:.1f}" for token in self.tokens]
        times = [f"{name}: {time:.0f} ms" for name, time in self.milliseconds.items()]
        return "\n".join([*map(": ".join, self.headings), *groups, ", ".join(tokens), *times, self.note])


def recorded() -> dict[str, Any]:
    return json.loads(BATCH.read_text(encoding="utf-8"))


def shown_of(batch: dict[str, Any], run: dict[str, Any]) -> Shown:
    question, opened = OPENED
    groups = list(batch["groups"])
    groups.append(groups.pop(question))  # the last row, above its tokens
    answers = [answer for group in groups for answer in group["answers"]]
    rewards = torch.tensor([answer["reward"] for answer in answers]).view(len(groups), -1)
    advantages = d3s.group_advantages(rewards)
    kept = d3s.select_rollouts(advantages, KEEP)

    rows = [torch.tensor(answers[row]["entropy"]) for row in kept.flatten().nonzero()]
    entropy, lengths = torch.cat(rows), torch.tensor([len(row) for row in rows])
    ends = lengths.cumsum(0)
    tokens = d3s.select_tokens(entropy, advantages[kept], RATIO, offsets=F.pad(ends, (1, 0)))
    scores = advantages[kept].abs().repeat_interleave(lengths) * entropy
    darkest = darkest_from(scores.tolist())

    row = int(kept[:-1].sum() + kept[-1, :opened].sum())  # the index of the opened answer among the kept answers
    place = slice(int(ends[row] - lengths[row]), int(ends[row]))
    shades = [shade(score, darkest) / (LEVELS - 1) for score in scores[place].tolist()]
    texts = groups[-1]["answers"][opened]["tokens"]

    contest = run["contests"][FULL_UPDATE]
    times = {name: 1e3 * contest[contender]["median_seconds"] for name, contender in CONTENDERS.items()}
    everything, _, ours = times.values()
    rollouts, length, _ = contest["d3s_kernels"]["size"].split(" x ")
    of_rollouts = part_of_rollouts(*(int(size.split()[0].replace(",", "")) for size in (rollouts, length)))
    return Shown(
        questions=[group["question"].split(".")[0] for group in groups],
        rewards=rewards.tolist(),
        kept=kept.tolist(),
        opened=opened,
        tokens=[Token(*each) for each in zip(texts, tokens.mask[place].tolist(), shades, strict=True)],
        headings=[
            ("Keep half of the rollouts", f"{int(kept.sum())} of {kept.numel()}"),
            ("and 10 % of their tokens", f"{int(tokens.count)} of {len(entropy)}"),
            ("Skip the rest", f"{everything / ours:.1f} times as fast"),
        ],
        milliseconds=times,
        note=f"Answers of {batch['model']}, shaded by |advantage| x entropy. Times of TRL's update on an {run['gpu']}, "
        f"Qwen2.5-0.5B's shapes: {rollouts} of {length}, all full. D3S: half, and 10 %. {of_rollouts:.0%} of the "
        "operations that it saves are the dropped rollouts'. Where all is kept, our LM head takes longer: it makes "
        "float32 logits, TRL's bfloat16.",
    )


def part_of_rollouts(rollouts: int, length: int) -> float:
    """The dropped rollouts' part of the operations that are saved, as d3s savings counts; the rest is the tokens'."""
    model, prompt = from_config(QWEN), 16
    body, head = sum(model.body(rollouts, prompt + length)), 2 * model.hidden * model.vocabulary * rollouts * length
    return (body + 4 * head) / 2 / (body + 4 * head - (body + (1 + 3 * RATIO) * head) / 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the picture is another")
    check = parser.parse_args().check
    shown = shown_of(recorded(), newest()[0][1])
    if not check:
        from overview_picture import draw  # needs matplotlib, but the check does not

        draw(PICTURE, shown)
    wrong = words_in(PICTURE) != shown.words() or PICTURE.stat().st_size > MOST_BYTES
    if wrong:
        print(f"{PICTURE.relative_to(ROOT)} is not what benchmarks/results say: run python tools/overview.py")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
