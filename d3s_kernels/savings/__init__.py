"""Counts how much of TRL's update D3S would save, for any model and batch, without a GPU: ``d3s savings``. Imports
``_lm_head``, ``_segments``, ``rollouts``, ``selection`` and ``tokens``.
"""
