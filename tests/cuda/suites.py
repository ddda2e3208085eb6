"""Which tests of the ops run on other kernels than the CPU's: on the emulated CUDA kernels (test_cuda_emulated.py), and
on a GPU, `D3S_KERNELS_BACKEND=cuda pytest -p on_cuda`. This file imports the standard library alone, so that tools can
read it without torch."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In groups of about the same time, emulated. Tests of code that does not depend on the kernels are left out.
_LISTED = (
    ("test_table.py", "test_logprob_entropy.py", "test_sampling_masks.py", "test_compact.py", "test_faults.py"),
    ("test_group_advantages.py", "test_topk_mask.py", "test_errors.py", "test_weight_grad_into.py"),
    ("test_max_variance.py", "test_select_rollouts.py", "test_select_tokens.py", "test_invariance.py"),
    ("test_head.py", "test_ratios.py", "test_topk_steps.py", "test_softmax_state.py"),
    ("test_sampling_masks_head.py",),
)
# A file that is named after an op, or after a subject of csrc/ops/, need not be listed: the last group has it then.
_NAMED = {
    *re.findall(r'^ *"([a-z]\w+)\(', (ROOT / "csrc" / "library.cpp").read_text(encoding="utf-8"), re.MULTILINE),
    *(path.stem for path in ROOT.glob("csrc/ops/*.cpp")),
}
_OWN = {f"test_{name}.py" for name in _NAMED if (ROOT / "tests" / f"test_{name}.py").exists()}
GROUPS = (*_LISTED[:-1], (*_LISTED[-1], *sorted(_OWN.difference(*_LISTED))))
KERNELS = "cuda_shim/kernels.py"  # tests of what only the CUDA kernels have
# Triton has no kernels for these; plain PyTorch serves them, and its own run tests them. Where arguments are refused is
# the same code for every back-end.
NOT_IN_TRITON = (
    "test_compact.py",
    "test_errors.py",
    "test_faults.py",
    "test_group_advantages.py",
    "test_ratios.py",
    "test_sampling_masks_head.py",
    "test_topk_steps.py",
)
_ALL = sum(GROUPS, ())
# By back-end, from the root of the repository. The tests of tests/cuda run torch.compile and torch's opcheck there.
SUITES = {
    "cuda": tuple(f"tests/{name}" for name in (*_ALL, KERNELS)),
    "triton": tuple(f"tests/{name}" for name in _ALL if name not in NOT_IN_TRITON),
    "torch": tuple(f"tests/{name}" for name in _ALL if name != "test_errors.py"),
}
