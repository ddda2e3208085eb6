"""Connects each torch op with the code that computes it. Imports ``_arguments``, ``_torch``, ``_triton`` and
``reference``.

``libraries`` loads the compiled libraries, which define the schemas of all ops. ``backends`` decides which back-end
computes each op on each kind of device. ``registration`` registers for each op the shapes of its results, its gradient,
and an error for the layouts that no kernel reads. ``over_supports`` joins the ops for dense rows with the ops for rows
that have a support. The other packages call the functions of ``ops``.
"""

from . import libraries  # first, since it defines the schemas

from . import backends, registration, ops  # isort: skip

__all__ = ["backends", "libraries", "ops", "registration"]
