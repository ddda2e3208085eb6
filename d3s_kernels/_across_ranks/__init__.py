"""The ops across the ranks of a process group: what a single device would do that holds everything.

``d3s_kernels/_groups.py`` has the collectives, ``agreement.py`` what is checked before the first of them. Every rank
takes part in every collective, whatever it holds, and how many there are depends on nothing that only one rank knows.
"""
