"""Compares the back-ends with the reference: ``d3s_kernels.compare`` and ``d3s doctor``. Imports ``_arguments``,
``_dispatch``, ``_lm_head``, ``logprobs``, ``off_policy``, ``reference``, ``rollouts``, ``support`` and ``tokens``.
"""
