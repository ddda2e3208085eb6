"""D3S in a training loop of your own, in plain PyTorch.

    python examples/own_loop.py

`update` below has every part. The policy is a small transformer that learns to continue counting from the last digit of
its prompt. Its rollouts come from an engine, a copy that gets new weights every few steps.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import d3s_kernels as d3s

DIGITS, LENGTH, LIMIT = 10, 4, 6  # a prompt has LENGTH digits, a completion has 1 to LIMIT
PROMPTS, GROUP, PARTS = 16, 16, 3  # prompts of a step, rollouts of each prompt, and micro-batches of the step
WIDTH, NEW_WEIGHTS = 64, 5  # the engine gets new weights every so many steps


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS + 1, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH + LIMIT, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS, bias=False)

    def get_output_embeddings(self) -> nn.Linear:  # as transformers' models have it
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:  # the logits of the next token
        logits: Tensor = self.head(self.hidden(tokens))
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """The hidden states [rows, tokens, width] that the head takes."""
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        states: Tensor = self.body(self.tokens(tokens) + self.places[: len(causal)], mask=causal, is_causal=True)
        return states


@torch.no_grad()
def generate(engine: Policy, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The prompts, each followed by LIMIT sampled tokens, and the log-probabilities of these tokens."""
    tokens, logprobs = prompts, []
    for _ in range(LIMIT):
        choice = torch.distributions.Categorical(logits=engine(tokens)[:, -1])
        drawn = choice.sample()
        tokens = torch.cat([tokens, drawn.unsqueeze(1)], 1)
        logprobs.append(choice.log_prob(drawn))
    return tokens, torch.stack(logprobs, 1)


def update(
    policy: Policy, engine: Policy, optimizer: torch.optim.Optimizer, selection: d3s.Selection, progress: float
) -> tuple[Tensor, Tensor]:
    """Makes one step of GRPO with D3S; returns the mean reward and the share of tokens that are trusted."""
    prompts = torch.randint(DIGITS, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
    tokens, sampling_logprob = generate(engine, prompts)
    lengths = (LIMIT * torch.rand(len(tokens)) ** 2).int() + 1  # most completions are short
    mask = torch.arange(LIMIT) < lengths.unsqueeze(1)
    right = (tokens[:, LENGTH - 1 : -1] + 1) % DIGITS
    rewards = ((tokens[:, LENGTH:] == right) & mask).sum(1) / lengths

    # 1. Advantages of all rollouts. Only the rollouts whose advantages vary most are kept and forwarded again.
    advantages = d3s.group_advantages(rewards.view(PROMPTS, GROUP))
    kept = selection.rollouts(advantages, progress)
    rows, weights = kept.flatten(), advantages[kept]
    tokens, mask, lengths, sampling_logprob = tokens[rows], mask[rows], lengths[rows], sampling_logprob[rows]

    # 2. Micro-batches of equal work: rows of similar lengths together, each as wide as its longest row.
    parts = d3s.micro_batches(lengths, PARTS)

    # 3. Log-probability and entropy of the sampled tokens, straight from the hidden states and the policy's head.
    def scores(part: d3s.MicroBatch, mask: Tensor) -> tuple[Tensor, Tensor]:
        columns, mask = tokens[part.rows, : LENGTH + part.width], mask[part.rows, : part.width]
        hidden = policy.hidden(columns[:, :-1])[:, LENGTH - 1 :]
        return d3s.linear_logprob_entropy(hidden, labels=columns[:, LENGTH:], mask=mask, **d3s.lm_head(policy))

    old_logprob, entropy = torch.zeros_like(sampling_logprob), torch.zeros_like(sampling_logprob)
    with torch.no_grad():
        for part in parts:
            old_logprob[part.rows, : part.width], entropy[part.rows, : part.width] = scores(part, mask)

    # 4. Of the tokens that have nearly the probability they were sampled with, those of largest |advantage| * entropy.
    trusted = selection.trusted(old_logprob, sampling_logprob, weights, mask=mask)
    chosen = selection.tokens(entropy, weights, progress, mask=trusted)

    # 5. GRPO's loss; all micro-batches have the same denominator. The head computes only the chosen tokens. The policy
    #    is that of the first pass, so nothing is clipped.
    optimizer.zero_grad()
    for part in parts:
        logprob, _ = scores(part, chosen.mask)
        place = part.rows, slice(part.width)
        ratio = d3s.importance_ratio(logprob, old_logprob[place]) * trusted.weight[place]
        loss = -(ratio * weights[part.rows].unsqueeze(1))[chosen.mask[place]].sum() / chosen.count.clamp(min=1)
        loss.backward()
    optimizer.step()
    return rewards.mean(), trusted.mask[mask].float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    policy = Policy()
    engine = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    # Few rollouts and tokens at first, more later: the budget of a step follows from the progress of training, 0 to 1.
    trust = {"off_policy_rule": "token_mask", "off_policy_low": 0.8, "off_policy_high": 1.25}
    selection = d3s.Selection(rollouts_start=4, rollouts_end=12, token_ratio_start=0.2, token_ratio_end=0.5, **trust)
    print(f"{'step':>5} {'reward':>7} {'rollouts':>9} {'trusted':>8} {'tokens':>7}")
    for step in range(steps):
        progress = d3s.progress_of(step, steps)
        if step % NEW_WEIGHTS == 0:
            engine.load_state_dict(policy.state_dict())
        reward, trusted = update(policy, engine, optimizer, selection, progress)
        budget = selection.budget(progress, GROUP)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"{step:5} {reward:7.3f} {budget.rollouts:6}/{GROUP} {trusted:8.0%} {budget.token_ratio:7.0%}")


if __name__ == "__main__":
    main()
