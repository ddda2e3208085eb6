"""The order of the contests on a GPU: first the most important contests, last less important contests that start
slowly.

A GPU is available for minutes, and a run may end at any moment. Each line below has a beginning of test ids, and a
number of seconds. A test whose id has this beginning stops after this number of seconds, and keeps the rounds that it
has. Tests that match no line come before `LAST`.
"""

HEADLINES: tuple[tuple[str, float], ...] = (
    ("bench_bandwidth.py", 10),
    ("bench_logprob_entropy.py::test_forward", 20),
    ("bench_logprob_entropy.py::test_backward", 20),
    ("bench_head.py::test_forward[wide-bf16]", 20),
    ("bench_head.py::test_every_gradient[bf16]", 20),
    ("bench_head.py::test_workspace[bf16]", 15),
    ("bench_topk_mask.py::test_topk_mask[batch-0.1]", 10),
    ("bench_topk_mask.py::test_topk_mask[segment-0.1]", 10),
    ("bench_max_variance.py::test_max_variance_select", 10),
    ("bench_compact.py", 10),
    ("bench_sampling_masks_head.py::test_forward", 15),
    ("bench_sampling_masks_head.py::test_added_to_a_gradient[8]", 15),
)
THEN: tuple[tuple[str, float], ...] = (
    ("bench_head.py::test_head_few[wide", 30),
    ("bench_head.py::test_kept_logits[kept-wide", 25),
    ("bench_head.py::test_head_few[narrow", 25),
    ("bench_before.py", 12),
    ("bench_logprob_entropy.py::test_narrow_gradient", 10),
    ("bench_ratios.py::test_groups", 5),
    ("bench_head.py::test_few_gradients[wide-bf16]", 20),
    ("bench_head.py::test_liger", 30),
    ("bench_head.py::test_workspace", 15),
    ("bench_head.py::test_workspace_of_a_step", 15),
    ("bench_ratios.py::test_forward", 10),
    ("bench_sampling_masks_head.py::test_forward_and_backward", 15),
    ("bench_sampling_masks.py", 15),
    ("bench_trl_step.py::test_micro_batches[8-recorded", 60),
    ("bench_trl_step.py::test_prefixes", 40),
    ("bench_trl_step.py::test_micro_batches[8-", 60),
    ("bench_trl_step.py::test_micro_batches", 45),
    ("bench_trl_step.py::test_update", 90),
    ("bench_head.py::test_accumulated_gradients", 15),
    ("bench_head.py::test_every_gradient", 20),
    ("bench_topk_mask.py::test_ragged", 30),
    ("bench_topk_mask.py", 10),
    ("bench_select_tokens.py", 10),
    ("bench_logprob_entropy.py::test_half_masked", 10),
    ("bench_logprob_entropy.py::test_backward_", 10),
    ("bench_triton.py", 20),
    ("bench_overhead.py", 5),
    ("bench_ratios.py", 10),
    ("bench_max_variance.py", 10),
    ("bench_head.py::test_forward", 20),
)
LAST: tuple[tuple[str, float], ...] = (
    ("bench_sampling_masks_head.py::test_added_to_a_gradient", 15),
    ("bench_head.py::test_verl", 60),
    ("bench_ratios.py::test_compiled", 60),
    ("bench_logprob_entropy.py::test_compiled", 60),
    ("bench_trl_step.py", 90),
    ("bench_head.py::test_unsloth", 60),
)
OTHERS_SECONDS = 15.0


def place(test: str) -> tuple[int, float]:
    """The test's position in the order, and its seconds. If several lines match, the line with the longest beginning
    counts.
    """
    rows = [*HEADLINES, *THEN, ("", OTHERS_SECONDS), *LAST]
    name = test.removeprefix("benchmarks/")
    fitting = [(len(begin), row, seconds) for row, (begin, seconds) in enumerate(rows) if name.startswith(begin)]
    _, row, seconds = max(fitting)
    return row, seconds


def is_headline(test: str) -> bool:
    return place(test)[0] < len(HEADLINES)
