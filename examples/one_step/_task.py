"""The task of `make step`, whose answers can be checked; a small Qwen2 that can partly do it; and its rollouts.

The task is the sum of two numbers below 50, spelled by place value ("47" is the two tokens "40 7"). A demonstration
begins with a few free words. Then it either works the sum out step by step, or guesses, mostly wrong. So a warmed-up
model is certain of some tokens (copied digits, punctuation) and unsure of others (the free words, a guess). One choice
decides most of its reward: whether to work the sum out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import d3s_kernels as d3s

VOCABULARY = 151_936  # Qwen2's
NO_TARGET = -100
MAX_COMPLETION = 32

LARGEST_SUM = 159  # the largest sum that has tokens; a guess may be larger than any right answer
OPENERS = [
    "okay",
    "hmm",
    "well",
    "right",
    "so",
    "now",
    "let",
    "us",
    "see",
    "here",
    "goes",
    "think",
    "slowly",
    "simple",
    "tricky",
    "again",
    "maybe",
    "perhaps",
]
CHEERS = ["good", "fine", "done", "nice", "next", "great", "sure", "yes", "check"]


def tens(number: int) -> str:
    return str(number // 10 * 10) if number >= 10 else "00"


def ones(number: int) -> str:
    return str(number % 10)


class Task:
    """Questions, demonstrations, the verifier, and the token table that maps texts to ids in Qwen2's vocabulary."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        numbers = [str(n) for n in range(19)] + [tens(n) for n in range(0, LARGEST_SUM, 10)]
        words = ["<bos>", "<eos>", "<pad>", "+", "=", ",", ".", ":", "step", "by", "just", "guess", "carry", "answer"]
        self.texts = list(dict.fromkeys([*words, *numbers, *OPENERS, *CHEERS]))
        self.row = {text: row for row, text in enumerate(self.texts)}  # its row in the table
        self.ids = torch.tensor(self.rng.sample(range(VOCABULARY), len(self.texts)))  # scattered, like a tokenizer's
        self.text_of = dict(zip(self.ids.tolist(), self.texts, strict=True))
        self.bos, self.eos, self.pad = (int(self.ids[self.row[text]]) for text in ("<bos>", "<eos>", "<pad>"))

    def question(self) -> tuple[int, int]:
        return self.rng.randrange(50), self.rng.randrange(50)

    def prompt(self, a: int, b: int) -> list[str]:
        return ["<bos>", tens(a), ones(a), "+", tens(b), ones(b), "="]

    def demonstration(self, a: int, b: int) -> list[str]:
        pick, total = self.rng.choice, a + b
        text = [pick(OPENERS) for _ in range(self.rng.randint(1, 3))]
        if self.rng.random() < 0.3:
            total = min(max(0, total + round(self.rng.gauss(0, 12))), LARGEST_SUM)
            text += ["just", "guess", ":"]
        else:
            sum_of_ones = a % 10 + b % 10
            carry = ["+", "carry"] if sum_of_ones > 9 else []
            text += ["step", "by", "step", ":", ones(a), "+", ones(b), "=", str(sum_of_ones), pick(CHEERS), ","]
            text += [tens(a), "+", tens(b), *carry, "=", tens(total), pick(CHEERS), ","]
        return [*text, *self.answer(total)]

    def answer(self, total: int) -> list[str]:
        return ["answer", tens(total), ones(total), ".", "<eos>"]

    def read(self, labels: torch.Tensor) -> list[str]:
        """The texts of a completion's tokens; "?" for tokens that the task does not use."""
        return [self.text_of.get(label, "?") for label in labels.tolist() if label != NO_TARGET]

    def reward(self, a: int, b: int, completion: list[str]) -> float:
        """1 for a completion that ends in the right answer, else 0."""
        answer = self.answer(a + b)
        return float(completion[-len(answer) :] == answer)


def new_model(task: Task) -> Qwen2ForCausalLM:
    # The body is small enough to warm up in seconds on two cores. The vocabulary, which makes an LM head expensive, is
    # the real one. The head is not tied to the embedding (as in Qwen2.5 from 7B on). So its weight has its own
    # gradient, and the measured cost is that of the head alone.
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=task.bos,
        eos_token_id=task.eos,
        pad_token_id=task.pad,
    )
    return Qwen2ForCausalLM(config)


def warm_up(model: Qwen2ForCausalLM, task: Task, steps: int, batch_size: int = 32, lr: float = 5e-3) -> Iterator[float]:
    """Supervised training on demonstrations; yields the loss after every step.

    The task uses fewer than a hundred tokens, so only their rows of the embedding and of the LM head are trained. All
    other tokens must become unlikely too. So each step adds a random sample of them to the softmax, weighted to
    represent all of them (a sampled softmax). With the full vocabulary a step would take seconds.
    """
    sampled = 512
    stands_for = math.log((VOCABULARY - len(task.texts)) / sampled)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    task_embedding, task_head = (torch.nn.Parameter(weight[task.ids].detach().clone()) for weight in (embedding, head))
    trained = [task_embedding, task_head, *model.model.layers.parameters(), *model.model.norm.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    rise_and_fall = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, (steps - step) / (0.4 * steps))
    )
    for _ in range(steps):
        inputs, labels = demonstrations(task, batch_size)
        hidden = model.model(inputs_embeds=F.embedding(inputs, task_embedding), use_cache=False).last_hidden_state
        hidden, labels = hidden[labels != NO_TARGET], labels[labels != NO_TARGET]
        others = head[torch.randint(VOCABULARY, (sampled,))].detach()
        logits = torch.cat([hidden @ task_head.T, hidden @ others.T + stands_for], dim=-1)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rise_and_fall.step()
        yield loss.item()
    with torch.no_grad():
        embedding[task.ids], head[task.ids] = task_embedding, task_head
    model.zero_grad()
    model.eval()


def demonstrations(task: Task, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, as rows of the token table; the prompt and padding have no target."""
    questions = [task.question() for _ in range(count)]
    texts = [(task.prompt(a, b), task.demonstration(a, b)) for a, b in questions]
    length = max(len(prompt) + len(completion) for prompt, completion in texts)
    tokens = torch.full((count, length), task.row["<pad>"])
    labels = torch.full((count, length), NO_TARGET)
    for i, (prompt, completion) in enumerate(texts):
        rows = torch.tensor([task.row[text] for text in [*prompt, *completion]])
        tokens[i, : len(rows)] = rows
        labels[i, len(prompt) : len(rows)] = rows[len(prompt) :]
    return tokens[:, :-1], labels[:, 1:]


@dataclass(frozen=True)
class Rollouts:
    """A batch of completions with rewards and advantages; the completions of one question (a group) are consecutive."""

    tokens: torch.Tensor  # [B, prompt + T]
    labels: torch.Tensor  # [B, T], NO_TARGET after the end of a completion
    rewards: torch.Tensor  # [B]
    advantages: torch.Tensor  # [B]
    questions: list[tuple[int, int]]  # one for each group

    @property
    def mask(self) -> torch.Tensor:
        return self.labels != NO_TARGET

    def grouped(self, per_rollout: torch.Tensor) -> torch.Tensor:
        return per_rollout.view(len(self.questions), -1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: torch.Tensor) -> Rollouts:
        names = ("tokens", "labels", "rewards", "advantages")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


@torch.no_grad()
def sample_completions(
    model: Qwen2ForCausalLM, task: Task, questions: list[tuple[int, int]], group_size: int
) -> Iterator[torch.Tensor]:
    """Samples `group_size` completions for each question, at temperature 1 from the full vocabulary.

    Yields all sequences so far, [B, prompt + t], after every token.
    """
    prompts = torch.tensor([[int(task.ids[task.row[text]]) for text in task.prompt(a, b)] for a, b in questions])
    tokens = new = prompts.repeat_interleave(group_size, dim=0)
    ended = torch.zeros(len(tokens), dtype=torch.bool)
    cache = DynamicCache(config=model.config)
    for _ in range(MAX_COMPLETION):
        hidden = model.model(input_ids=new, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        # Inverting the cumulative distribution takes one random number per row; multinomial draws one per logit.
        cumulative = model.lm_head(hidden).softmax(-1).cumsum(-1)
        point = torch.rand(len(tokens), 1) * cumulative[:, -1:]
        new = torch.searchsorted(cumulative, point, right=True).clamp(max=VOCABULARY - 1)
        new[ended] = task.pad
        ended |= new[:, 0] == task.eos
        tokens = torch.cat([tokens, new], dim=1)
        yield tokens
        if ended.all():
            return


def score(task: Task, questions: list[tuple[int, int]], tokens: torch.Tensor) -> Rollouts:
    """The verifier's rewards for sampled sequences, and the advantages within each question's group."""
    labels = tokens[:, len(task.prompt(0, 0)) :].clone()
    labels[labels == task.pad] = NO_TARGET
    group_size = len(tokens) // len(questions)
    rewards = torch.tensor([task.reward(*questions[i // group_size], task.read(row)) for i, row in enumerate(labels)])
    advantages = d3s.group_advantages(rewards.view(-1, group_size)).flatten()
    return Rollouts(tokens, labels, rewards, advantages, questions)
