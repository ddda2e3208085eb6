"""Each op once on small inputs, for compute-sanitizer: every kernel, every size class, rows that lie askew.

compute-sanitizer --tool racecheck python tests/cuda/sanitized.py
"""

import torch

import d3s_kernels as d3s

GPU = torch.device("cuda")
op = torch.ops.d3s_kernels


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, vocabulary in ((3, 40_000), (700, 33), (5, 1021)):
            logits = torch.randn(rows, vocabulary, device=GPU).to(dtype).requires_grad_()
            logprob, entropy = d3s.logprob_entropy(logits, torch.randint(vocabulary, (rows,), device=GPU))
            (logprob.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    hidden = torch.randn(20, 16, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3000, 16, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(3000, (20,), device=GPU)
    d3s.linear_logprob_entropy(hidden, weight, labels, max_grad_rows=20)[0].sum().backward()  # type: ignore[no-untyped-call]

    offsets = torch.tensor([0, 0, 100, 3000, 9000], device=GPU)
    for length in (100, 3000, 9000, 200_000):
        scores = torch.randint(0, 50, (length,), device=GPU).float()
        d3s.topk_mask(scores, 0.1)
        d3s.select_tokens(scores, torch.tensor(1.0, device=GPU), 0.5, drop_zeros=True)
        d3s.max_variance_select(scores, 30)
        d3s.compact(scores > 10, length)
        d3s.group_advantages(scores)
    ragged = torch.randint(0, 50, (9000,), device=GPU).float()
    d3s.topk_mask(ragged, 0.1, offsets=offsets)
    d3s.max_variance_select(ragged, 30, offsets=offsets)
    d3s.group_advantages(ragged, offsets=offsets, scale="batch")
    ids = d3s.entropy_groups(ragged, quantiles=(0.3, 0.8), offsets=offsets)
    d3s.adaptive_clip(ragged, ids, vocab_size=100, offsets=offsets)
    for level, groups in (("token", None), ("sequence", None), ("entropy_group", ids)):
        leaf = ragged.clone().requires_grad_()
        d3s.importance_ratio(
            leaf, ragged, level=level, groups=groups, offsets=offsets, denominator="old"
        ).sum().backward()
    for segments in (None, offsets):  # in steps, as the ranks of a group do it
        cut = torch.zeros(1 if segments is None else 4, 3, dtype=torch.int64, device=GPU)
        keys = op.order_keys(ragged, None, None, segments)
        for shift, bits in ((21, 11), (10, 11), (0, 10)):
            op.narrow_cut_(cut, op.key_histogram(keys, cut, shift, bits, segments), shift, ratio=0.1)
        op.mask_at_cut(keys, cut, cut[:, 1].contiguous(), segments, True)
    d3s.select_tokens_from_logits(torch.randn(4, 9, 500, device=GPU), torch.randn(4, device=GPU), 0.3)
    torch.cuda.synchronize()
    print("every op ran")


if __name__ == "__main__":
    main()
