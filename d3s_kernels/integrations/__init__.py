"""Integrates the selection into trainers. Each trainer has its own folder, which is imported only on request. Imports
``_arguments``, ``_collectives``, ``_dispatch``, ``_lm_head``, ``distributed``, ``logprobs``, ``off_policy``,
``report``, ``rollouts``, ``selection``, ``support`` and ``tokens``.
"""
