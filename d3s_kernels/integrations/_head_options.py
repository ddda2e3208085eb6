"""The options of our LM head, with the same names and defaults for every trainer that uses it."""
# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..selection.options import one_of, option

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


def dtype_of_logits(logits_dtype: LogitsDtype, products: torch.dtype) -> torch.dtype:
    """Returns the dtype that the option means, for a head whose matrix products have the dtype ``products``."""
    return {"float32": torch.float32, "auto": products}[logits_dtype]
