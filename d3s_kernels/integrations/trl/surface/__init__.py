"""What TRL has to be for this integration, and the checks that it is.

TRL changes private names and methods without notice. Whatever differs from what is known is refused by its name, before
the optimizer has made a step. :mod:`.table` says what is relied on, and :mod:`.names` compares it with TRL.
:mod:`.loss` tries what cannot be seen from names. While a run goes on, :mod:`.passes` sees what TRL makes of a
generation batch, and :mod:`.step` that the selection acts in each step.
"""

from .loss import check_loss
from .names import check_attributes, check_class, inherited
from .passes import OLD, REFERENCE, Passes
from .step import Watch
from .table import UnknownTRL

__all__ = [
    "OLD", "REFERENCE", "Passes", "UnknownTRL", "Watch", "check_attributes", "check_class", "check_loss", "inherited",
]  # fmt: skip
