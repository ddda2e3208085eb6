"""Profiling for :func:`plan_rollouts`: how often the initial policy solves each query.

``python -m d3s_kernels.profile --model ... --dataset ... --reward ... --out profile.jsonl`` samples and counts;
:func:`load_profile` reads the counts. The extra ``profile`` brings what the first needs; the second needs nothing.
"""

from .records import load_profile

__all__ = ["load_profile"]
