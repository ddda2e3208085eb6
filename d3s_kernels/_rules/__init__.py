"""Checks the arguments of the selections, and applies their rules, for one process and for several ranks. Imports
``_arguments``, ``_dispatch`` and ``_segments``.
"""
