"""The targets of the library: the contest, the contender that ours is compared with, and the bound.

The bounds apply to the sizes of a full run on a machine that does nothing else.
"""

from .judging import Faster, Moves, ShareOf, Target, Under, Within

STEP_CONTEST = "TRL's update, half of the rollouts and 10% of their tokens"
STEP_MEMORY = 0.4  # of GRPOTrainer's
TORCH_TOPK = ("topk + scatter", "kthvalue")
TRL_TRITON = "TRL's Triton kernel"
CUDA_LIBRARY = "CUDA library"

# Each op with its peer: a trainer's formula, or plain PyTorch if no trainer has one.
RATIOS = (
    ("importance_ratio, token", "verl's formula"),
    ("importance_ratio, sequence", "verl's formula"),
    ("importance_ratio, entropy_group", "plain PyTorch"),
    ("importance_ratio with its gradient, token", "verl's formula"),
    ("importance_ratio with its gradient, sequence", "verl's formula"),
    ("importance_ratio with its gradient, entropy_group", "plain PyTorch"),
    ("entropy_groups", "nanquantile"),
    ("adaptive_clip", "plain PyTorch"),
)

CALLS = (
    "topk_mask",
    "select_tokens",
    "compact",
    "group_advantages",
    "max_variance_select",
    "select_rollouts",
    "importance_ratio",
    "entropy_groups",
    "adaptive_clip",
    "entropy",
    "logprob_entropy",
)

DIFFERENTIABLE = ("importance_ratio", "entropy", "logprob_entropy")


def in_triton(contest: str) -> str:
    """The name of the same contest for the Triton kernels, which serve GPUs without the CUDA library."""
    return f"{contest}, in Triton"


CPU: tuple[Target, ...] = (
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
    *(Faster(contest, (peer,), 5) for contest, peer in RATIOS),
    Within(STEP_CONTEST, "GRPOTrainer", 0.30),
    *(Under(f"overhead of {call}", 12 if call in DIFFERENTIABLE else 8) for call in CALLS),
)

# The targets for an NVIDIA H200. Targets without a bound are only reported.
CUDA: tuple[Target, ...] = (
    Moves("logprob_entropy forward", 4.2),
    Faster("logprob_entropy forward", (TRL_TRITON,), 1.15),
    Faster("logprob_entropy forward", ("torch.compile",)),
    ShareOf("logprob_entropy backward, both gradients", "copy", 90),
    Faster("logprob_entropy backward, both gradients", (TRL_TRITON,)),
    Within("logprob_entropy forward, half of the rows masked (alternate)", "all rows", 0.55),
    Within("logprob_entropy forward, half of the rows masked (right-padded)", "all rows", 0.55),
    Within("select_tokens_from_logits", "logprob_entropy", 1.03),
    Within("linear_logprob_entropy forward, wide, bf16", "matmul", 1.07),
    Within("linear_logprob_entropy forward, wide, bf16, fp32 logits", "matmul", 1.13),
    Within("linear_logprob_entropy forward, narrow, bf16", "matmul"),
    Within("linear_logprob_entropy forward, narrow, bf16, fp32 logits", "matmul"),
    Within("linear_logprob_entropy forward + backward, 10% of the tokens, wide, bf16", "all tokens", 0.40),
    *(Under(f"topk_mask of a batch, {ratio}", 20) for ratio in ("5%", "10%", "20%")),
    *(Under(f"topk_mask of a segment, {ratio}", 60) for ratio in ("5%", "10%", "20%")),
    *(Faster(f"topk_mask of a {where}, 10%", TORCH_TOPK) for where in ("batch", "segment")),
    Under("max_variance_select, groups", 8),
    Under("max_variance_select, pool", 100),
    *(Faster(f"max_variance_select, {where}", ("vectorised PyTorch",)) for where in ("groups", "pool")),
    *(Faster(contest, (peer,)) for contest, peer in RATIOS),
    *(Under(f"overhead of {call}", 12) for call in CALLS),
    Moves(in_triton("logprob_entropy forward"), 3.9),
    Within(in_triton("logprob_entropy forward"), CUDA_LIBRARY),
    Within(in_triton("logprob_entropy forward, few rows"), CUDA_LIBRARY),
    Within(in_triton("logprob_entropy forward, half of the rows masked (right-padded)"), "all rows"),
    Within(in_triton("logprob_entropy backward, both gradients"), "copy"),
    Within(in_triton("logprob_entropy backward, both gradients"), CUDA_LIBRARY),
    Within(in_triton("select_tokens_from_logits"), "logprob_entropy"),
    Within(in_triton("topk_mask of a batch, 10%"), CUDA_LIBRARY, 2),
    Within(in_triton("max_variance_select, groups"), CUDA_LIBRARY, 2),
)

TARGETS = {"cpu": CPU, "cuda": CUDA}
