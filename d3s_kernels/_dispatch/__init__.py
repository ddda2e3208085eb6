"""Connects each torch op with the code that computes it.

``libraries`` loads the compiled libraries, which define the schemas of all ops. ``registration`` registers the shapes
of their results and their gradients. ``backends`` decides what computes each op on each kind of device. ``unreadable``
refuses layouts that no kernel reads. ``ops`` has the ops by name, for the other packages.
"""

from . import libraries  # first, since it brings the schemas

from . import registration, backends, ops, unreadable  # isort: skip

__all__ = ["backends", "libraries", "ops", "registration", "unreadable"]
