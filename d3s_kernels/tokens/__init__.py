"""Which tokens are kept: by score, by random prefixes, or once where rollouts share a prefix. Imports ``_arguments``,
``_dispatch``, ``_rules``, ``_segments``, ``distributed`` and ``support``.
"""
