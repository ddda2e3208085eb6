"""select_tokens from given entropies, and directly from logits."""

import math

import pytest
import torch

import d3s_kernels as d3s

from . import inputs, peers
from .harness import Contest, describe, same_kept
from .sizes import Sizes

RATIO = 0.1


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_select_tokens(contest: Contest, sizes: Sizes, scope: str) -> None:
    entropy, advantages = inputs.entropies(*sizes.batch), inputs.advantages(sizes.batch[0])

    def scores(entropy: torch.Tensor) -> torch.Tensor:
        product = advantages.abs().unsqueeze(-1) * entropy
        return product.flatten() if scope == "batch" else product

    quantile_fits = scope == "sequence" or math.prod(sizes.batch) <= 2**24  # torch.quantile takes at most 2^24
    contest(
        f"select_tokens, of each {scope}, {RATIO:.0%}",
        describe(*sizes.batch),
        lambda entropy: d3s.select_tokens(entropy, advantages, RATIO, scope=scope).mask,
        inputs=(entropy,),
        peers={
            "topk + scatter": lambda entropy: peers.topk_scatter(scores(entropy), RATIO),
            "kthvalue": lambda entropy: peers.kthvalue(scores(entropy), RATIO),
            "quantile": (lambda entropy: peers.quantile(scores(entropy), RATIO)) if quantile_fits else None,
        },
        agree=same_kept(0.01),
    )


def test_select_tokens_from_logits(contest: Contest, sizes: Sizes) -> None:
    logits, labels = inputs.logits_and_labels(sizes)
    advantages = inputs.advantages(sizes.sequences)
    contest(
        "select_tokens_from_logits",
        describe(*logits.shape, dtype=logits.dtype),
        lambda: d3s.select_tokens_from_logits(logits, advantages, RATIO).mask,
        peers={peers.TRL: peers.from_trl(lambda: peers.trl_token_mask(logits, advantages, RATIO))},
        yardsticks={"logprob_entropy": lambda: d3s.logprob_entropy(logits, labels)},
        agree=same_kept(0.2),  # TRL's entropies are rounded to bfloat16
    )
