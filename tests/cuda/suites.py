"""Which tests of the ops run on other kernels than the CPU's: on the emulated CUDA kernels (test_cuda_emulated.py), and
on a GPU, `D3S_KERNELS_BACKEND=cuda pytest -p on_cuda`. The table draws every op's arguments; the other files have the
edges that it does not draw. Tests of code above the kernels are left out. This file imports nothing, so that tools can
read it without torch.
"""

# In groups of about the same time, emulated.
GROUPS = (
    ("test_table.py", "test_logprob_entropy.py", "test_sampling_masks.py", "test_compact.py", "test_faults.py"),
    ("test_topk_mask.py", "test_topk_steps.py", "test_select_tokens.py", "test_max_variance.py", "test_invariance.py"),
    ("test_ratios.py", "test_group_advantages.py", "test_softmax_state.py", "test_token_logprobs.py"),
    ("test_topk_logprobs.py",),
    ("test_sampling_masks_head.py",),
)
KERNELS = "cuda_shim/kernels.py"  # tests of what only the CUDA kernels have
# Triton has no kernels for these; plain PyTorch serves them, and its own run tests them.
NOT_IN_TRITON = (
    "test_compact.py",
    "test_faults.py",
    "test_group_advantages.py",
    "test_ratios.py",
    "test_sampling_masks_head.py",
    "test_token_logprobs.py",
    "test_topk_logprobs.py",
    "test_topk_steps.py",
)
_ALL = sum(GROUPS, ())
# By back-end, from the root of the repository. The tests of tests/cuda run torch.compile and torch's opcheck there.
SUITES = {
    "cuda": tuple(f"tests/{name}" for name in (*_ALL, KERNELS)),
    "triton": tuple(f"tests/{name}" for name in _ALL if name not in NOT_IN_TRITON),
    "torch": tuple(f"tests/{name}" for name in _ALL),
}
