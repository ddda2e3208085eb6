"""The ops across the ranks of a process group, with the results of a single device that holds all values.

``d3s_kernels/_groups.py`` has the collectives, ``agreement.py`` the checks before the first of them. Every rank takes
part in every collective, even with no values, and their number depends only on what all ranks know.
"""
