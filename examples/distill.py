"""A student learns from a teacher: from its 64 largest log-probabilities, and for comparison from all of them.

    make distill                                 # SmolLM2-135M-Instruct, some 80 s on two cores
    python examples/distill.py --model FOLDER    # another model with its tokenizer
    python examples/distill.py                   # a tiny model that is made on the spot

The student is made of some of the teacher's layers. The teacher writes answers to word problems. Two students start
from the same weights and learn from the same answers, in the same order. (Answers that the students write would differ
between them.) The loss of one is the KL divergence over the whole vocabulary. The loss of the other is the KL
divergence over the teacher's 64 most likely ids, with one bucket for all other ids. A table compares the two.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import warnings
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Read when torch and the Hugging Face libraries are imported. Waiting threads sleep, as spinning slows other processes;
# large tensors come in pages of 2 MiB, because getting fresh memory in pages of 4 KiB takes longer than using it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from _demo import models, threads
from _demo.costs import Costs
from _demo.problems import draw
from torch import Tensor, nn
from transformers.utils import logging

import d3s_kernels as d3s

LENGTH, BATCH = 40, 16  # tokens of an answer; answers of a step
LESSONS, HELD_OUT = 48, 8  # answers that the students learn from, and that they never see
RATE = 1e-3
LESSONS_OF_STAND_IN = 30  # steps in which the tiny model is trained


class Answers(NamedTuple):
    """Questions with the answers that the teacher wrote, and its hidden states before each token of the answers."""

    tokens: Tensor
    hidden: Tensor

    def part(self, begin: int, count: int) -> Answers:
        return Answers(self.tokens[begin : begin + count], self.hidden[begin : begin + count])


def questions(tokenizer: Any, count: int, seed: int) -> Tensor:
    """The tokens of different problems, all of the same length, so that nothing is padded."""
    random_ = random.Random(seed)
    drawn = dict.fromkeys(tuple(tokenizer(draw(random_).question).input_ids) for _ in range(20 * count))
    length = Counter(map(len, drawn)).most_common(1)[0][0]
    return torch.tensor([tokens for tokens in drawn if len(tokens) == length][:count])


@torch.no_grad()
def write(teacher: Any, tokens: Tensor) -> Answers:
    """Samples an answer to each question."""
    past, states = None, []
    for _ in range(LENGTH):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions call the argument `cache`
            found = teacher.model(tokens if past is None else tokens[:, -1:], past_key_values=past, use_cache=True)
        past, hidden = found.past_key_values, found.last_hidden_state[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(teacher.lm_head(hidden).softmax(-1), 1)], 1)
        states.append(hidden)
    return Answers(tokens, torch.stack(states, 1))


def student_of(teacher: Any, count: int) -> Any:
    """The teacher's first layers and its last layer, which are trained, between its embedding and its head, which stay
    as they are.
    """
    layers = teacher.model.layers
    left_out = layers[count - 1 : -1]
    shared = [teacher.model.embed_tokens, teacher.lm_head, *left_out]
    student = copy.deepcopy(teacher, {id(module): module for module in shared})
    student.model.layers = nn.ModuleList([*student.model.layers[: count - 1], student.model.layers[-1]])
    student.config.num_hidden_layers = count
    student.model.layers.requires_grad_(True)
    student.model.norm.requires_grad_(True)
    return student


def hidden_of(student: Any, answers: Answers) -> Tensor:
    """The student's hidden states before each token of the answers."""
    hidden: Tensor = student.model(answers.tokens[:, :-1], use_cache=False).last_hidden_state[:, -LENGTH:]
    return hidden


def over_all_ids(student: Any, teacher: Any, answers: Answers, k: int) -> Tensor:
    """KL(teacher, student) over the whole vocabulary, from the logits of both."""
    with torch.no_grad():
        target = teacher.lm_head(answers.hidden).log_softmax(-1)
    found = student.lm_head(hidden_of(student, answers)).log_softmax(-1)
    return F.kl_div(found, target, reduction="sum", log_target=True) / (target.numel() // target.shape[-1])


def over_the_largest(student: Any, teacher: Any, answers: Answers, k: int) -> Tensor:
    """KL(teacher, student) over the teacher's k most likely ids, and all other ids as one. No logits are kept."""
    target = d3s.linear_topk_logprobs(answers.hidden, k=k, **d3s.lm_head(teacher))
    found = d3s.linear_token_logprobs(hidden_of(student, answers), token_ids=target.token_ids, **d3s.lm_head(student))
    p, q = buckets(target), buckets(found)
    return (p.exp() * (p - q)).sum(-1).mean()


def buckets(found: d3s.TopkLogprobs | d3s.TokenLogprobs) -> Tensor:
    """The log-probabilities of the given ids, and of all other ids together."""
    return torch.cat([found.logprobs, found.tail_logprob.unsqueeze(-1)], -1)


class Arm:
    """A student, its loss, and what its steps cost."""

    def __init__(self, loss: Any, student: Any) -> None:
        self.student = student
        self.costs: list[Costs] = []
        self._loss = loss
        self._trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=RATE, weight_decay=0.0)

    def step(self, teacher: Any, answers: Answers, k: int) -> None:
        costs = Costs()
        with costs.of("step"):
            self._loss(self.student, teacher, answers, k).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.costs.append(costs)

    @property
    def seconds(self) -> float:
        """Of a step's forward and backward, without the first step, in which `d3s.lm_head` checks the models."""
        return median(costs.seconds["step"] for costs in self.costs[1:])

    @property
    def megabytes(self) -> float:
        """The most memory of a step's forward and backward; NaN if the system does not say."""
        peaks = [costs.peak["step"] for costs in self.costs[1:]]
        return float("nan") if None in peaks else max(peaks) / 1e6


def run(teacher: Any, tokenizer: Any, steps: int, count: int, seed: int) -> None:
    teacher.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False).eval()
    torch.manual_seed(seed)
    k = min(64, teacher.config.vocab_size // 4)
    count = min(count, len(teacher.model.layers) - 1)
    answers = write(teacher, questions(tokenizer, LESSONS + HELD_OUT, seed).to(teacher.device))
    lessons, held_out = answers.part(0, LESSONS), answers.part(LESSONS, HELD_OUT)
    largest = d3s.linear_topk_logprobs(answers.hidden, k=k, **d3s.lm_head(teacher))
    print(
        f"Teacher: {len(teacher.model.layers)} layers, {teacher.config.vocab_size:,} ids. Its {k} most likely ids have "
        f"{1 - largest.tail_logprob.exp().mean():.1%} of the probability.\n"
        f"Students: {count} of its layers; {steps} steps of {BATCH} answers of {LENGTH} tokens, {LESSONS} in all."
    )
    arms = [Arm(loss, student_of(teacher, count)) for loss in (over_all_ids, over_the_largest)]

    def errors() -> list[float]:
        """KL(teacher, student) of the held-out answers over the whole vocabulary, for each student."""
        with torch.no_grad():
            return [float(over_all_ids(arm.student, teacher, held_out, k)) for arm in arms]

    before = errors()
    for step in range(steps):
        begin = step * BATCH % LESSONS
        for arm in arms:
            arm.step(teacher, lessons.part(begin, BATCH), k)
    after = errors()
    print(f"\n{'':42}{'all ids':>12}{f'largest {k}':>12}")
    for name, values, form in (
        ("forward and backward of a step, seconds", [arm.seconds for arm in arms], ".2f"),
        ("the most memory that it takes, MB", [arm.megabytes for arm in arms], ".0f"),
        ("KL of held-out answers before, nats", before, ".2f"),
        ("KL of held-out answers after, nats", after, ".2f"),
    ):
        print(f"{name:42}" + "".join(f"{value:12{form}}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--steps", type=int, default=12, help="of each student, at least 2 (default: 12)")
    parser.add_argument("--layers", type=int, default=4, help="of a student (default: 4)")
    parser.add_argument("--seed", type=int, default=1, help="of the questions and of the sampling (default: 1)")
    given = parser.parse_args()
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: {given.model} has no config.json; takes the folder of a saved model")
    if given.steps < 2 or given.layers < 1:
        parser.error("--steps takes at least 2, --layers at least 1")
    logging.disable_progress_bar()
    if given.model is None:
        print("The teacher is a stand-in that is made here, because no --model was given.")
        teacher, tokenizer = models.made_here(given.seed, lambda: None, LESSONS_OF_STAND_IN)
    else:
        print(f"{given.model.name}. {threads.take_the_faster()}")
        teacher, tokenizer = models.from_folder(given.model)
    run(teacher, tokenizer, given.steps, given.layers, given.seed)


if __name__ == "__main__":
    main()
