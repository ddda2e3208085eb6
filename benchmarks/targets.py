"""The targets of the library: the contest, the contender that ours is compared with, and the bound.

The bounds apply to the sizes of a full run on a machine that does nothing else.
"""

from typing import Any

from .judging import Faster, ShareOf, Target, Under, Within

RECORDED, TRL_6092 = "recorded lengths", "lengths of trl#6092"
# Qwen2.5-7B's time is computed (computed.py) from the times of models that have few of its layers, but its whole head.
LAYERS_OF_7B, COMPUTED_FROM = 28, (2, 6)
SMALL_MODEL, SMALL_VOCABULARY = "8 layers of 256", 12_288
DEEP_MODEL = "32 layers of 192"
GRPO, GRPO_CUT = "GRPOTrainer", "GRPOTrainer, micro-batches cut to their rows"  # the second is what trl#7179 asks for
NOTHING, HALF, PREFIXES = "nothing dropped", "half of the rollouts", "half of the tokens, before random cuts"
ALL_TOKENS = f"d3s_kernels, {NOTHING}"
STEP_MEMORY = 0.4  # a bound on our memory: this share of GRPOTrainer's
TORCH_TOPK = ("topk + scatter", "kthvalue")
TRL_TRITON = "TRL's Triton kernel"
TORCHS_HEAD = "torch's linear_cross_entropy, log-probability alone"
LIGER, LIGER_SHAPE = "Liger's head", "Liger's shape"
FLASHINFER = "FlashInfer's indices"
UNSLOTH = "Unsloth's head, in torch"
CUDA_LIBRARY = "CUDA library"
HALF_A_COPY = "copy of one half"  # moves as many bytes as a read of all logits
READS = ("read", HALF_A_COPY)

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

COPIES = tuple(contest for contest, _ in RATIOS if contest.startswith("importance_ratio"))

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


def of_a_call(selection: float, differentiable: float) -> tuple[Target, ...]:
    """The targets of a call's fixed cost; what has a gradient is also called with one."""
    bounds = {call: differentiable if call in DIFFERENTIABLE else selection for call in CALLS}
    bounds |= {f"{call} with a gradient": differentiable for call in DIFFERENTIABLE}
    return tuple(Within(f"overhead of {call}", "x.sum()", bound) for call, bound in bounds.items())


def in_triton(contest: str) -> str:
    """The name of this contest for the Triton kernels, which serve GPUs without the CUDA library."""
    return f"{contest}, in Triton"


def in_micro_batches(number: int, dropped: str, lengths: str, model: str) -> str:
    """The name of a contest of an update in micro-batches of 8 rollouts."""
    return f"TRL's update in {number} micro-batches, {dropped}, {lengths}, {model}"


TRLS_DISTILLATION = "TRL's distillation, in chunks"
GIVEN_IDS = "linear_token_logprobs forward, K = 64, wide, bf16, fp32 logits"
GIVEN_IDS_STEP = "linear_token_logprobs forward + backward, K = 64, wide, bf16, fp32 logits"
TOPK_AND_LOGSUMEXP, HEAD_ALONE = "topk + logsumexp", "linear_logprob_entropy"


def largest(k: int) -> str:
    return f"topk_logprobs, k = {k}"


def largest_of_head(k: int) -> str:
    return f"linear_topk_logprobs, k = {k}, wide, bf16, fp32 logits"


def of_64_rollouts(model: str, nothing: float, half: float) -> tuple[Target, ...]:
    """The targets of updates in eight micro-batches."""
    drop_nothing, drop_half = (in_micro_batches(8, dropped, RECORDED, model) for dropped in (NOTHING, HALF))
    other_lengths = in_micro_batches(8, NOTHING, TRL_6092, model)
    return (
        Within(drop_nothing, GRPO, nothing),
        Within(drop_nothing, GRPO_CUT),
        Within(drop_half, GRPO, half),
        Within(other_lengths, GRPO, 0.5),
        Within(other_lengths, GRPO_CUT),
        Within(in_micro_batches(8, PREFIXES, RECORDED, model), ALL_TOKENS, 0.7),
    )


MASKED = "with a sampling mask"
AVX2_ALONE = ", AVX2 alone"  # ends the names of the contests of bench_avx2.py
BESIDE_UNSLOTH = ", beside Unsloth's"  # ends the names of the contests of bench_unsloth.py
RAGGED = "topk_mask of ragged rows, 2,048 of each"
AVX2_ENVIRONMENT = {
    "D3S_KERNELS_SIMD": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # for torch's float32 products; only an Intel CPU obeys it
}
# The speed of vector operations limits the forward on a CPU. OPERATIONS is the number of these operations for one
# vector of floats, counted in the machine code of softmax_rows.cpp for bfloat16. The loop of the maximum has 2: half a
# shift and half a mask for the conversion, and one maximum. The loop of the sums has 15: the conversion, subtraction,
# maximum, 11 operations for 2^x, addition and product.
OPERATIONS = 17
AS_MANY = "a product of as many operations"
UNSLOTH_ENVIRONMENT = {"UNSLOTH_ZOO_DISABLE_GPU_INIT": "1"}
HEAD_STEP = "linear_logprob_entropy forward + backward"
FEW = tuple(f"{HEAD_STEP}, 10% of the tokens, {width}, bf16" for width in ("wide", "narrow"))


def groups_of_tokens(number: int) -> str:
    return f"importance_ratio, {number} entropy groups"


def kept_logits(width: str) -> str:
    return f"{HEAD_STEP}, {width}, bf16, kept logits"


def computed_again(width: str) -> str:
    return f"{HEAD_STEP}, {width}, bf16, beside torch's head"


ADDED = "linear_logprob_entropy backward, 10% of the tokens, wide, bf16, added to a gradient"

CPU: tuple[Target, ...] = (
    Faster("logprob_entropy forward", ("TRL",)),
    Faster("logprob_entropy forward", ("torch.compile",)),
    Within("logprob_entropy forward", "logits.sum()", 1.3),
    Within(f"logprob_entropy forward{AVX2_ALONE}", "logits.sum()", 1.4),
    Within("logprob_entropy forward", AS_MANY, 1.15),
    Within(f"logprob_entropy forward{AVX2_ALONE}", AS_MANY, 1),
    Faster("logprob_entropy backward, both gradients", ("TRL",), 6),
    Within("logprob_entropy backward, both gradients", "copy", 1.15),
    Within("logprob_entropy forward, half of the rows masked (alternate)", "all rows", 0.55),
    Within("logprob_entropy forward, half of the rows masked (right-padded)", "all rows", 0.55),
    Within("select_tokens_from_logits", "logprob_entropy", 1.03),
    Within(f"logprob_entropy forward, {MASKED}", "all tokens", 0.05),
    Within(f"logprob_entropy forward + backward, {MASKED}", "zeros_like", 1.1),
    Within(f"linear_logprob_entropy forward, {MASKED}", "all tokens", 0.005),
    Within(f"{HEAD_STEP}, {MASKED}", "all tokens", 0.12),
    Within(f"{HEAD_STEP}, {MASKED}, added to a gradient", "all tokens", 0.01),
    Within("linear_logprob_entropy forward, wide, bf16", "matmul", 1.05),
    Within("linear_logprob_entropy forward, wide, fp32", "matmul", 1.05),
    Within(f"{HEAD_STEP}, wide, bf16", "four products", 1.05),
    Within(f"{HEAD_STEP}, wide, bf16, fp32 logits", "four products"),
    *(Within(f"{HEAD_STEP}, {half}{AVX2_ALONE}", "float32", 1.25) for half in ("bfloat16", "float16")),
    Within(FEW[0], "all tokens", 0.42),
    Within(kept_logits("narrow"), TORCHS_HEAD, 0.9),
    Within(computed_again("narrow"), TORCHS_HEAD, 1.1),
    Within(ADDED, "autograd adds it"),
    Within(GIVEN_IDS, HEAD_ALONE, 1.05),
    Within(GIVEN_IDS_STEP, HEAD_ALONE, 1.1),
    *(Faster(contest, (TRLS_DISTILLATION,), 4) for contest in (GIVEN_IDS, GIVEN_IDS_STEP)),
    Faster(largest(64), (TOPK_AND_LOGSUMEXP,), 3),
    Within(largest_of_head(64), HEAD_ALONE, 1.1),
    Within(largest_of_head(256), HEAD_ALONE, 1.2),
    *(Faster(f"topk_mask of a batch, {ratio}", TORCH_TOPK, 7) for ratio in ("5%", "10%", "20%")),
    *(Faster(f"topk_mask of a segment, {ratio}", TORCH_TOPK, 8) for ratio in ("5%", "10%", "20%")),
    Faster("max_variance_select, groups", ("vectorised PyTorch",), 6),
    Faster("max_variance_select, pool", ("vectorised PyTorch",), 12),
    Faster("compact, one position in ten", ("nonzero_static",), 4),
    *(Within(contest, "copy", 1.3) for contest in COPIES),
    *(Faster(contest, (peer,)) for contest, peer in RATIOS if contest in COPIES),
    *(Faster(contest, (peer,), 5) for contest, peer in RATIOS if contest not in COPIES),
    *of_a_call(selection=4, differentiable=7),
    Faster(f"linear_logprob_entropy forward, wide, bf16{BESIDE_UNSLOTH}", (UNSLOTH,)),
    Faster(f"{HEAD_STEP}, wide, bf16{BESIDE_UNSLOTH}", (UNSLOTH,)),
    *of_64_rollouts(DEEP_MODEL, 0.4, 0.2),
)

# The targets for any NVIDIA GPU: shares of what the same GPU reaches in the same run, and times of launches, which
# hardly depend on the GPU. Targets without a bound are only reported.
CUDA: tuple[Target, ...] = (
    ShareOf("logprob_entropy forward", READS, 98),
    Faster("logprob_entropy forward", (TRL_TRITON,), 1.35),
    Faster("logprob_entropy forward, beside torch.compile", ("torch.compile",)),
    ShareOf("logprob_entropy backward, both gradients", ("copy",), 90, moves=2),
    Faster("logprob_entropy backward, both gradients", (TRL_TRITON,)),
    Within("logprob_entropy forward, half of the rows masked (alternate)", "all rows", 0.55),
    Within("logprob_entropy forward, half of the rows masked (right-padded)", "all rows", 0.55),
    Within("select_tokens_from_logits", "logprob_entropy", 1.03),
    Within(f"logprob_entropy forward, {MASKED}", "all tokens", 0.05),
    Within(f"logprob_entropy forward + backward, {MASKED}", "zeros_like", 1.1),
    Within(f"linear_logprob_entropy forward, {MASKED}", "all tokens", 0.03),
    Within(f"{HEAD_STEP}, {MASKED}", "all tokens", 0.06),
    Within(f"{HEAD_STEP}, {MASKED}, added to a gradient", "all tokens", 0.03),
    Within("linear_logprob_entropy forward, wide, bf16", "matmul", 1.07),
    Within("linear_logprob_entropy forward, wide, bf16", LIGER, 1.1),
    Within("linear_logprob_entropy forward, wide, bf16, fp32 logits", "matmul", 1.15),
    Within("linear_logprob_entropy forward, narrow, bf16", "matmul"),
    Within("linear_logprob_entropy forward, narrow, bf16, fp32 logits", "matmul"),
    Within(f"{HEAD_STEP}, wide, bf16", "four products", 1.05),
    Within(f"{HEAD_STEP}, wide, bf16", LIGER, 1.1),
    Within(f"{HEAD_STEP}, wide, bf16, fp32 logits", "four products", 1.2),
    Within(f"{HEAD_STEP}, wide, bf16, fp32 logits", "old cut"),
    Within(f"linear_logprob_entropy forward, {LIGER_SHAPE}", "matmul", 1.07),
    Within(f"linear_logprob_entropy forward, {LIGER_SHAPE}", LIGER, 1.1),
    Within(f"{HEAD_STEP}, {LIGER_SHAPE}", "four products", 1.2),
    Within(f"{HEAD_STEP}, {LIGER_SHAPE}", LIGER, 1.1),
    *(Within(contest, "all tokens", 0.34, same_clock=True) for contest in FEW),
    Within(FEW[0], f"{LIGER}, all tokens", 0.34),
    Within(kept_logits("wide"), LIGER, 0.78),
    Within(ADDED, "autograd adds it"),
    Within(GIVEN_IDS, HEAD_ALONE, 1.05),
    Within(GIVEN_IDS_STEP, HEAD_ALONE, 1.1),
    *(Faster(contest, (TRLS_DISTILLATION,), 8) for contest in (GIVEN_IDS, GIVEN_IDS_STEP)),
    Within(largest(64), "read", 1.3),
    Faster(largest(64), (TOPK_AND_LOGSUMEXP,), 3),
    Within(largest_of_head(64), HEAD_ALONE, 1.1),
    Within(largest_of_head(256), HEAD_ALONE, 1.2),
    *(Under(f"topk_mask of a batch, {ratio}", 10.5) for ratio in ("5%", "10%", "20%")),
    *(Under(f"topk_mask of a segment, {ratio}", 36) for ratio in ("5%", "10%", "20%")),
    *(Faster(f"topk_mask of a {where}, 10%", TORCH_TOPK) for where in ("batch", "segment")),
    Faster(RAGGED, (FLASHINFER,)),
    Faster(RAGGED, TORCH_TOPK),
    Under("max_variance_select, groups", 3.7),
    Under("max_variance_select, pool", 35),
    Under("compact, one position in ten", 7),
    *(Faster(f"max_variance_select, {where}", ("vectorised PyTorch",)) for where in ("groups", "pool")),
    *(Within(contest, "copy", 1.12) for contest in COPIES),
    *(Faster(contest, (peer,)) for contest, peer in RATIOS),
    *of_a_call(selection=2, differentiable=3),
    ShareOf(in_triton("logprob_entropy forward"), READS, 85),
    Within(in_triton("logprob_entropy forward"), CUDA_LIBRARY),
    Within(in_triton("logprob_entropy forward, few rows"), CUDA_LIBRARY),
    Within(in_triton("logprob_entropy forward, half of the rows masked (right-padded)"), "all rows"),
    Within(in_triton("logprob_entropy backward, both gradients"), "copy"),
    Within(in_triton("logprob_entropy backward, both gradients"), CUDA_LIBRARY),
    Within(in_triton("select_tokens_from_logits"), "logprob_entropy"),
    Within(in_triton("topk_mask of a batch, 10%"), CUDA_LIBRARY, 2),
    Within(in_triton("max_variance_select, groups"), CUDA_LIBRARY, 2),
    *of_64_rollouts("0.5B", 0.5, 0.25),
)

# The H100 and the H200 differ in their memory. The times below hardly depend on the memory, so these bounds apply to
# both GPUs.
HOPPER: tuple[Target, ...] = (
    *(Under(contest, most) for contest, most in zip(FEW, (8_000, 2_600), strict=True)),
    Under(kept_logits("wide"), 18_800),
    Under(groups_of_tokens(6), 20),
    Under(f"{HEAD_STEP}, wide, bf16", 23_500),
)

# The bounds are the times that Liger publishes for its head with entropy on an H100 (linkedin/Liger-Kernel #1370 and
# #1359), multiplied by 1.1.
H100: tuple[Target, ...] = (
    Under(f"linear_logprob_entropy forward, {LIGER_SHAPE}", 1.1 * 6_110),
    Under(f"{HEAD_STEP}, {LIGER_SHAPE}", 1.1 * 26_150),
)

# The bound is the time that FlashInfer publishes (flashinfer #4295) for a choice of indices in which the lower index
# wins a tie, as in ours.
B200: tuple[Target, ...] = (Under(RAGGED, 40.4),)

TARGETS = {"cpu": CPU, "cuda": CUDA}
# Targets for a particular GPU, by the GPU's name, in addition to the targets for any GPU. A GH200, or an H100 on a PCIe
# card, has another name.
ON = {"NVIDIA H100 80GB HBM3": HOPPER + H100, "NVIDIA H200": HOPPER, "NVIDIA B200": B200}


def targets_of(device: str, build_info: dict[str, Any], gpu: str = "") -> tuple[Target, ...]:
    held = TARGETS[device] + ON.get(gpu, ())
    return tuple(target for target in held if above_avx2(build_info) or not target.contest.endswith(AVX2_ALONE))


def above_avx2(build_info: dict[str, Any]) -> bool:
    """Whether the library uses better instructions than AVX2 here."""
    levels = build_info["simd_levels"]
    return "avx2" in levels and build_info["simd"] in levels[levels.index("avx2") + 1 :]
