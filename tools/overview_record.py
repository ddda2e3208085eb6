"""Records the answers that the first picture of README.md shows, with the entropy of each token, for tools/overview.py.

    make smollm2                                                   # the model of the demo
    python tools/overview_record.py .venv/SmolLM2-135M-Instruct    # half a minute; needs what the demo needs

The questions are those of the demo. With this seed, one group has no right answer, and so none of its rollouts is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch

TOOLS = Path(__file__).resolve().parent
sys.path.insert(0, str(TOOLS.parent / "examples"))

from _demo.models import from_folder  # noqa: E402
from _demo.problems import draw  # noqa: E402
from _demo.rollouts import record  # noqa: E402

import d3s_kernels as d3s  # noqa: E402
from d3s_kernels._page.text import decoder, token_texts  # noqa: E402

QUESTIONS, GROUP, LENGTH = 4, 8, 32  # questions, answers to each, tokens of an answer at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with a model, its tokenizer and its chat template")
    parser.add_argument("--seed", type=int, default=22, help="of the questions and of the sampling (default: 22)")
    parser.add_argument("--out", type=Path, default=TOOLS / "overview_batch.json", help="the file that is written")
    given = parser.parse_args()
    model, tokenizer = from_folder(given.model)
    random_ = random.Random(given.seed)
    torch.manual_seed(given.seed)
    problems = [draw(random_) for _ in range(QUESTIONS)]
    recorded = record(model, tokenizer, problems, GROUP, LENGTH, lambda: None)
    decode = decoder(tokenizer)
    groups = []
    for number, (problem, prompt) in enumerate(zip(problems, recorded.prompts, strict=True)):
        answers = []
        completions = recorded.completions[number * GROUP : (number + 1) * GROUP]
        for completion, reward in zip(completions, recorded.rewards[number].tolist(), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            entropy = [round(each, 3) for each in d3s.entropy(logits).tolist()]
            answers.append({"reward": reward, "tokens": token_texts(decode, completion), "entropy": entropy})
        groups.append({"question": problem.question, "answers": answers})
    batch = {"model": given.model.name.removesuffix("-Instruct"), "seed": given.seed, "groups": groups}
    given.out.write_text(json.dumps(batch, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
