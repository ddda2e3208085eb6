"""The held-out reward: one answer to each held-out prompt, sampled as in training."""

from __future__ import annotations

import torch
from _learn_problem import Problem
from _learn_reward import reward
from transformers import PreTrainedModel

SAMPLING_SEED = 0  # the same random numbers at every evaluation of every run


@torch.no_grad()
def held_out_reward(model: PreTrainedModel, problem: Problem, completion: int, batch: int) -> float:
    """The share of right answers. The random state of training does not change."""
    tokenizer, table = problem.tokenizer, problem.held_out
    was_training = model.training
    model.eval()
    rewards: list[float] = []
    with torch.random.fork_rng():
        torch.manual_seed(SAMPLING_SEED)
        for first in range(0, len(table), batch):
            rows = table[first : first + batch]
            prompts = [as_text(prompt, tokenizer) for prompt in rows["prompt"]]
            inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
            tokens = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=completion,
                pad_token_id=tokenizer.pad_token_id,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            texts = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
            rewards += reward(texts, rows["answer"])
    model.train(was_training)
    return sum(rewards) / len(rewards)


def as_text(prompt: str | list[dict[str, str]], tokenizer: object) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
