"""The options of our LM head, with the same names and defaults for every trainer that uses it."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ..selection.options import one_of, option, whole

LogitsDtype = Literal["float32", "auto"]


@dataclass
class HeadOptions:
    """The options of our LM head. A selection does not use these options. A trainer that uses its own head does not
    have them. ``docs/lm-head.md`` says when to choose which value.
    """

    logits_dtype: LogitsDtype = option(
        "float32",
        "To which dtype our LM head rounds logits. 'float32': log-probabilities are more exact than those of the "
        "trainer's own head, where its products are in half precision. 'auto': the dtype of the model's own logits, "
        "which is the dtype of the products; this is faster. For products in float32, both are the same.",
        one_of(*get_args(LogitsDtype)),
    )

    keep_logits_bytes: int = option(
        0,
        "How many bytes of the logits of a micro-batch our LM head keeps from its forward, so that its backward does "
        "not compute them again. The trainer does not know how much memory is free beside the activations, so it keeps "
        "none unless this number is given.",
        whole(0),
    )

    def head_arguments(self, products: torch.dtype) -> dict[str, Any]:
        """Returns the options as arguments of our head, whose matrix products have the dtype ``products``."""
        logits_dtype = {"float32": torch.float32, "auto": products}[self.logits_dtype]
        return {"logits_dtype": logits_dtype, "keep_logits_bytes": self.keep_logits_bytes}
