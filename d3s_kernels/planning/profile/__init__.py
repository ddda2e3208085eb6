"""Profiling for :func:`plan_rollouts`: measures how often the initial policy solves each query.

``python -m d3s_kernels.planning.profile --model ... --dataset ... --reward ... --out profile.jsonl`` samples and counts
successes, and needs the extra ``profile``. :func:`load_profile` reads the counts, and needs no extra.
"""

from .files import load_profile

__all__ = ["load_profile"]
