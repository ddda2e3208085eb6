"""From a torch op to what computes it.

``libraries`` loads the compiled libraries, with the schemas of all ops; ``fakes`` and ``autograd`` tell torch the rest;
``backends`` decides what computes each op on each kind of device; ``ops`` has the ops by name, for the other rooms.
"""

from . import libraries  # first: it brings the schemas

from . import autograd, backends, fakes, ops  # isort: skip

__all__ = ["autograd", "backends", "fakes", "libraries", "ops"]
