"""Records answers of a real model: rewards, and the entropy of each token.

    make smollm2                                                             # the model of the demo
    python tools/record_answers.py picture .venv/SmolLM2-135M-Instruct       # half a minute; needs what the demo needs
    python tools/record_answers.py benchmarks .venv/SmolLM2-135M-Instruct    # two minutes

`picture` is what the first picture of README.md shows: with its seed, one group has no right answer, and so none of its
rollouts is kept. `benchmarks` is what the contests of TRL's update draw lengths, rewards and entropies from. The
questions are the demo's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent / "examples"))

from _demo.models import from_folder  # noqa: E402
from _demo.problems import draw  # noqa: E402
from _demo.rollouts import record  # noqa: E402

import d3s_kernels as d3s  # noqa: E402
from d3s_kernels.report.text import decoder, token_texts  # noqa: E402


class Recording(NamedTuple):
    file: Path
    seed: int  # of the questions and of the sampling
    questions: int
    group: int  # answers to each question
    limit: int  # tokens of an answer at most
    texts: bool  # the answers' tokens too; without them, rewards and entropies in hundredths of a nat suffice


RECORDINGS = {
    "picture": Recording(TOOLS / "overview_batch.json", 22, 4, 8, 32, texts=True),
    "benchmarks": Recording(TOOLS.parent / "benchmarks" / "recorded.json", 2, 8, 8, 128, texts=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=RECORDINGS)
    parser.add_argument("model", type=Path, help="a folder with a model, its tokenizer and its chat template")
    given = parser.parse_args()
    wanted = RECORDINGS[given.what]
    model, tokenizer = from_folder(given.model)
    random_ = random.Random(wanted.seed)
    torch.manual_seed(wanted.seed)
    problems = [draw(random_) for _ in range(wanted.questions)]
    recorded = record(model, tokenizer, problems, wanted.group, wanted.limit, lambda: None)
    decode = decoder(tokenizer)
    groups = []
    for number, (problem, prompt) in enumerate(zip(problems, recorded.prompts, strict=True)):
        answers: list[dict[str, Any]] = []
        completions = recorded.completions[number * wanted.group : (number + 1) * wanted.group]
        for completion, reward in zip(completions, recorded.rewards[number].tolist(), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            entropy = d3s.entropy(logits).tolist()
            if wanted.texts:
                texts = token_texts(decode, completion)
                answers.append({"reward": reward, "tokens": texts, "entropy": [round(each, 3) for each in entropy]})
            else:
                answers.append({"reward": int(reward), "entropy": [round(100 * each) for each in entropy]})
        groups.append({"question": problem.question, "answers": answers})
    batch: dict[str, Any] = {"model": given.model.name.removesuffix("-Instruct"), "seed": wanted.seed}
    batch |= ({} if wanted.texts else {"limit": wanted.limit}) | {"groups": groups}
    compact = None if wanted.texts else (",", ":")
    wanted.file.write_text(json.dumps(batch, ensure_ascii=False, separators=compact) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
