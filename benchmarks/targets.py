"""What the library has to reach: which two benchmarks of a contest form a ratio, which way, and its bound.

The bounds are meant for the sizes of a full run, and for a machine that does nothing else.
"""

from .judging import Faster, Target, Under, Within

TORCH_TOPK = ("topk + scatter", "kthvalue")

TARGETS: tuple[Target, ...] = (
    Faster("logprob_entropy forward", ("TRL",), 30),
    Faster("logprob_entropy forward", ("torch.compile",), 4),
    Within("logprob_entropy forward", "logits.sum()", 2),
    Faster("logprob_entropy backward, both gradients", ("TRL",), 6),
    Within("logprob_entropy backward, both gradients", "empty + fill_", 1.4),
    Within("logprob_entropy forward, half of the rows masked (alternate)", "all rows", 0.55),
    Within("logprob_entropy forward, half of the rows masked (right-padded)", "all rows", 0.55),
    Within("select_tokens_from_logits", "logprob_entropy", 1.05),
    Within("linear_logprob_entropy forward, wide, bf16", "matmul", 1.15),
    Within("linear_logprob_entropy forward, wide, fp32", "matmul", 1.15),
    Within("linear_logprob_entropy forward + backward, 10% of the tokens, wide, bf16", "all tokens", 0.45),
    Faster("topk_mask of a batch, 5%", TORCH_TOPK, 6),
    Faster("topk_mask of a batch, 10%", TORCH_TOPK, 6),
    Faster("topk_mask of a batch, 20%", TORCH_TOPK, 6),
    Faster("topk_mask of a segment, 5%", TORCH_TOPK, 3),
    Faster("topk_mask of a segment, 10%", TORCH_TOPK, 3),
    Faster("topk_mask of a segment, 20%", TORCH_TOPK, 3),
    Faster("max_variance_select, groups", ("vectorised PyTorch",), 5),
    Faster("max_variance_select, pool", ("vectorised PyTorch",), 5),
    Under("overhead of topk_mask", 8),
    Under("overhead of select_tokens", 8),
    Under("overhead of compact", 8),
    Under("overhead of group_advantages", 8),
    Under("overhead of max_variance_select", 8),
    Under("overhead of select_rollouts", 8),
    Under("overhead of entropy", 12),
    Under("overhead of logprob_entropy", 12),
)
