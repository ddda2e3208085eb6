"""The ops for values that are spread over the ranks of a process group. The results are the same as on a single device
that holds all values.

``d3s_kernels/_groups.py`` has the collectives. ``agreement.py`` has the checks before the first collective. Every rank
takes part in every collective, even if it has no values. The number of collectives depends only on information that all
ranks have.
"""
