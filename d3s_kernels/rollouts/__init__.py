"""Advantages of groups, which rollouts are kept, and which rollouts are forwarded together. Imports ``_arguments``,
``_collectives``, ``_dispatch``, ``_rules``, ``_segments`` and ``distributed``.
"""
