"""The arguments of a selection, checked once, and how one process makes it.

The public functions hand these objects to the ranks of a process group, or call ``select`` themselves.
"""
