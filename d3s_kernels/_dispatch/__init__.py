"""Connects each torch op with the code that computes it.

``libraries`` loads the compiled libraries, which define the schemas of all ops. ``backends`` decides what computes each
op on each kind of device. ``registration`` registers the shapes of their results, their gradients, and the layouts that
no kernel reads. ``ops`` has the ops by name, for the other packages.
"""

from . import libraries  # first, since it brings the schemas

from . import backends, registration, ops  # isort: skip

__all__ = ["backends", "libraries", "ops", "registration"]
