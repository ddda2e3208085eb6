"""Connects each torch op with the code that computes it.

``libraries`` loads the compiled libraries, which define the schemas of all ops. ``fakes`` and ``autograd`` register the
ops' shapes and gradients. ``backends`` decides what computes each op on each kind of device. ``unreadable`` refuses
layouts that no kernel reads. ``ops`` has the ops by name, for the other packages.
"""

from . import libraries  # first, since it brings the schemas

from . import autograd, backends, fakes, ops, unreadable  # isort: skip

__all__ = ["autograd", "backends", "fakes", "libraries", "ops", "unreadable"]
