"""A selection on Megatron's groups of ranks: over data and context ranks, never over tensor ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-megatron)")

import torch
from ranks import Ranks, world
from tiny_megatron import arrange, gathered, my_rows, parallel_state

import d3s_kernels as d3s
from d3s_kernels.distributed import vocab_parallel_logprob_entropy

# Groups of rollouts on a data rank, rollouts of a group, tokens of a rollout, vocabulary.
GROUPS, EACH, LENGTH, VOCABULARY = 2, 4, 16, 12


def choose(ranks: Ranks, seed: int, context: int, scope: str, rule: str) -> None:
    """What the ranks choose is what one process chooses of the joined batch, and the same on both tensor ranks."""
    arrange(2, context)
    data = parallel_state.get_data_parallel_group()
    with_context = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    selection = d3s.Selection(
        rollouts_start=0.5, rollouts_end=0.5, token_ratio_start=0.3, token_scope=scope, token_rule=rule
    )

    # Every rank draws the joined batch, and takes its own part.
    torch.manual_seed(seed)
    groups = GROUPS * data.size()
    logits = torch.randn(groups * EACH, LENGTH, VOCABULARY)
    labels = torch.randint(VOCABULARY, logits.shape[:2])
    rewards, present = torch.randn(groups, EACH), torch.rand(groups * EACH, LENGTH) < 0.8
    advantages = d3s.group_advantages(rewards)
    kept = selection.rollouts(advantages, 0.0)
    _, entropy = d3s.logprob_entropy(logits, labels)
    rows = kept.flatten()
    chosen = selection.tokens(entropy[rows], advantages.flatten()[rows], 0.0, mask=present[rows])
    wanted = torch.zeros_like(present).index_put((rows,), chosen.mask)
    denominator = selection.denominator(chosen, present[rows])

    def mine(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(data.size())[data.rank()]

    my_kept = selection.rollouts(mine(advantages), 0.0, process_group=data)
    assert torch.equal(my_kept, mine(kept))

    my_kept = my_kept.flatten()
    my_present = my_rows(mine(present), [LENGTH])[my_kept]
    shard = my_rows(mine(logits), [LENGTH])[my_kept].chunk(2, dim=-1)[tensor.rank()].contiguous()
    my_labels = my_rows(mine(labels), [LENGTH])[my_kept]
    start = tensor.rank() * shard.shape[-1]
    _, my_entropy = vocab_parallel_logprob_entropy(shard, my_labels, start, tensor, vocab_size=VOCABULARY)
    weights = mine(advantages).flatten()[my_kept]
    if scope == "batch":
        tokens = selection.tokens(my_entropy, weights, 0.0, mask=my_present, process_group=with_context)
        assert tokens.count == chosen.count
    else:  # the context ranks have pieces of the same sequences
        of_context = parallel_state.get_context_parallel_group()
        tokens = selection.tokens(
            my_entropy, weights, 0.0, mask=my_present, process_group=of_context, placement="pieces"
        )
        counts = torch.zeros(rows.shape, dtype=chosen.count.dtype).masked_scatter(rows, chosen.count)
        assert torch.equal(tokens.count, mine(counts)[my_kept])
    assert torch.equal(tokens.mask, my_rows(mine(wanted), [LENGTH])[my_kept])
    assert selection.denominator(tokens, my_present, process_group=with_context) == denominator
    for other in gathered(tokens.mask.byte()[None], 0, tensor):
        assert torch.equal(other.bool(), tokens.mask)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("context", [1, 2], ids=["data x tensor", "context x tensor"])
def test_four_ranks_choose_what_one_process_chooses(context: int, scope: str) -> None:
    world(4).run(choose, torch.randint(2**31, ()).item(), context, scope, "advantage_entropy")


@pytest.mark.slow("data and context ranks at the same time, where each sequence is on ranks that are no neighbours")
def test_eight_ranks_choose_what_one_process_chooses() -> None:
    for scope in ("batch", "sequence"):
        world(8).run(choose, torch.randint(2**31, ()).item(), 2, scope, "entropy")
