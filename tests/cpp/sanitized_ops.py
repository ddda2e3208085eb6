"""Runs every CPU op of a library built with AddressSanitizer, on tensors whose ends it watches.

    LD_PRELOAD=$(gcc -print-file-name=libasan.so) python tests/cpp/sanitized_ops.py build/sanitize/_cpu.so

Values are compared with the reference as everywhere; what this adds is that a read or write out of bounds ends it.
"""

import importlib.util
import sys
from pathlib import Path

import torch

torch.ops.load_library(sys.argv[1])
op = torch.ops.d3s_kernels

# The reference by its path: importing the package would load the other build of the library.
_spec = importlib.util.spec_from_file_location("reference", Path(__file__).parents[2] / "d3s_kernels" / "reference.py")
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def vocabulary() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, tokens in ((1, 1), (3, 2), (2, 33), (5, 8192), (2, 8193), (40, 300), (0, 7)):
            logits = (3 * torch.randn(rows, tokens)).to(dtype)
            labels = torch.randint(0, tokens, (rows,))
            mask = torch.rand(rows) < 0.7
            outputs = op.logprob_entropy(logits, labels, row_mask=mask)
            for ours, exact in zip(outputs, reference.logprob_entropy(logits, labels, row_mask=mask), strict=False):
                torch.testing.assert_close(ours, exact.float(), atol=2e-5, rtol=1e-5)
            ones = torch.ones(rows)
            op.logprob_entropy_backward(ones, ones, logits, labels, *outputs[1:], row_mask=mask)
            state = torch.tensor([[torch.finfo(torch.float32).min, 0, 0, -torch.inf]]).repeat(rows, 1)
            op.softmax_state_(state, logits, labels, 0)
            op.softmax_state_(state, logits[:, 1:], labels, 1, row_mask=mask)
            op.softmax_state_finish(state)
            op.softmax_state_finish(torch.stack([state, state, state]), 1.0, 0.5 + torch.rand(rows))
            op.logprob_entropy_backward(ones, ones, logits[:, 1:], labels, *outputs[1:], row_mask=mask, first_token=1)
            op.logprob_entropy_backward_(ones, ones, logits, labels, *outputs[1:], 0)


def tokens() -> None:
    for n in (0, 1, 31, 1000, 65537, 140001):
        scores = torch.randint(0, 50, (n,)).float()
        mask = torch.rand(n) < 0.9
        for ratio in (1e-6, 0.3, 1.0):
            assert torch.equal(op.topk_mask(scores, ratio, mask=mask), reference.topk_mask(scores, ratio, mask=mask))
        cuts = torch.tensor([0, n // 3, n // 3, n])
        op.select_tokens(scores, torch.randn(3), 0.2, offsets=cuts, pooled=True)
        op.select_tokens(scores, torch.randn(3), 0.2, offsets=cuts, pooled=False, drop_zeros=True)
        for capacity in (0, 5, n + 3):
            indices, count = op.compact(mask, capacity)
            assert count.item() == mask.sum()
            assert len(indices) == capacity
    op.select_tokens_from_logits(torch.randn(2, 3, 100), torch.randn(2), 0.5)


def tokens_in_steps() -> None:
    for n in (0, 1, 31, 1000, 65537, 140001):
        scores, mask = torch.randint(0, 50, (n,)).float(), torch.rand(n) < 0.9
        whole = torch.tensor([0, n])
        for offsets in (None, torch.tensor([0, n // 3, n // 3, n])):
            keys = op.order_keys(scores, None, mask, offsets)
            cut = torch.zeros(1 if offsets is None else 3, 3, dtype=torch.int64)
            for shift, bits in ((21, 11), (10, 11), (0, 10)):
                op.narrow_cut_(cut, op.key_histogram(keys, cut, shift, bits, offsets), shift, ratio=0.3)
            # More ties than there are, and none, are both allowed.
            for ties in (cut[:, 1].contiguous(), torch.full_like(cut[:, 1], -3), torch.full_like(cut[:, 1], n + 5)):
                kept, _, _ = op.mask_at_cut(keys, cut, ties, offsets, True)
            kept, _, _ = op.mask_at_cut(keys, cut, cut[:, 1].contiguous(), offsets)
            cuts = whole if offsets is None else offsets
            assert torch.equal(kept, op.topk_mask(scores, 0.3, mask=mask, offsets=cuts))


def rollouts() -> None:
    for shape in ((3, 1), (4, 8), (1, 1023), (2, 5000), (0, 4), (4, 0)):
        rewards = torch.randint(0, 5, shape).float()
        for scale in ("group", "batch", "none"):
            op.group_advantages(rewards, scale=scale)
        for keep in (1, 4, 10000):
            ours = op.max_variance_select(rewards, keep)
            assert torch.equal(ours, reference.max_variance_select(rewards, keep))


def ratios() -> None:
    for shape in ((3, 1), (4, 33), (1, 40_001), (2, 4097), (0, 4), (4, 0)):
        old = -torch.rand(shape)
        leaf = (old + 0.1 * torch.randn(shape)).requires_grad_()
        mask = torch.rand(shape) < 0.8
        groups = op.entropy_groups(-old, [0.3, 0.8], mask)
        assert torch.equal(groups, reference.entropy_groups(-old, mask, [0.3, 0.8]))
        op.adaptive_clip(-old, groups, mask, None, 1000)
        for level, ids in (("token", None), ("sequence", None), ("entropy_group", groups)):
            for denominator in ("self", "old"):
                ratio = op.importance_ratio(leaf.detach(), old, mask, ids, None, level, denominator)
                exact = reference.importance_ratio(leaf, old, mask, level=level, groups=ids, denominator=denominator)
                torch.testing.assert_close(ratio, exact.detach().float(), rtol=1e-5, atol=1e-7)
                op.importance_ratio_backward(old, ratio, mask, ids)


vocabulary()
tokens()
tokens_in_steps()
rollouts()
ratios()
print("5 passed, 0 failed")
