"""Objects that each combine several arguments of an op's schema, for example the ids and the offsets of supports.

A schema can contain only tensors, numbers and flags. Kernels in Python take these objects instead of the separate
arguments. The files ``csrc/ops/*_argument*.h`` have such objects for C++.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor


class NumberOrTensor(NamedTuple):
    """A value that is given either as a number or as a tensor. If there is a tensor, ``number`` is only a default."""

    number: Any = None
    tensor: Tensor | None = None

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> NumberOrTensor:
        """Applies ``change`` to a tensor with one value for each row. A number or a 0-d tensor stays as it is."""
        if self.tensor is None or self.tensor.dim() == 0:
            return self
        return NumberOrTensor(self.number, change(self.tensor))


class SegmentArguments(NamedTuple):
    """The segments of a tensor, and whether all segments are pooled into one."""

    offsets: Tensor | None = None  # None: each row is a segment
    max_segment: int | None = None
    pooled: bool = False

    def number_in(self, values: Tensor) -> int:
        """Returns the number of segments of ``values`` before they are pooled."""
        return math.prod(values.shape[:-1]) if self.offsets is None else self.offsets.shape[0] - 1

    def shape_in(self, values: Tensor) -> Sequence[int]:
        """Returns the shape of a result that has one element for each segment. If all segments are pooled, the shape is
        ``()``.
        """
        return () if self.pooled else values.shape[:-1] if self.offsets is None else (self.number_in(values),)


SegmentFields = tuple[Tensor | None, int | None, bool]
"""The fields of SegmentArguments as a plain tuple. Public functions use it, since making a named tuple would take 0.3
us: 6 % of the time of a call.
"""


class SupportArguments(NamedTuple):
    """The supports of rows: the support of row i is ids[offsets[i]:offsets[i + 1]], which may be empty."""

    ids: Tensor
    offsets: Tensor
    include_label: bool = False  # whether a label that is not among the ids of its row joins the row's support


class OptionalSupports(NamedTuple):
    """Optional supports: ids and offsets, either both or neither. The other fields say how labels outside of a support,
    and rows without a support, are handled.
    """

    ids: Tensor | None = None
    offsets: Tensor | None = None
    include_label: bool = False
    max_dense_rows: int | None = None  # the caller's bound on the number of rows without a support

    @property
    def given(self) -> bool:
        return self.ids is not None or self.offsets is not None or self.max_dense_rows is not None

    @property
    def may_be_dense(self) -> bool:
        """Whether there may be rows without a support."""
        return self.max_dense_rows != 0

    @property
    def required(self) -> SupportArguments:
        """The arguments of ops that compute only the rows with a support."""
        assert self.ids is not None
        assert self.offsets is not None
        return SupportArguments(self.ids, self.offsets, self.include_label)


class GradientArguments(NamedTuple):
    """The gradients of the results, the logits, and the other tensors from which the gradient of the logits is
    computed.
    """

    grad_logprob: Tensor | None
    grad_entropy: Tensor | None
    logits: Tensor
    labels: Tensor | None
    entropy: Tensor
    row_max: Tensor
    log_sum: Tensor


class Tile(NamedTuple):
    """Says which ids the columns of the logits belong to. If ``first_token`` is None, the columns are the whole
    vocabulary. Otherwise they are consecutive ids from ``first_token`` on.
    """

    first_token: int | None = None

    def column(self, tokens: Tensor) -> Tensor:
        return tokens - (self.first_token or 0)

    def token(self, column: int) -> int:
        return (self.first_token or 0) + column


class ShardArguments(NamedTuple):
    """The arguments of an op for a vocabulary shard: the shard's first id, and the name of the process group whose
    ranks share the vocabulary. Without a group, the shard is the whole vocabulary.
    """

    first_token: int = 0
    group_name: str | None = None


NOTHING, ONE, NO_SUPPORTS = NumberOrTensor(), NumberOrTensor(1.0), OptionalSupports()
ROWS, POOL = SegmentArguments(), SegmentArguments(pooled=True)
ALL_TOKENS, NO_GROUP = Tile(), ShardArguments()


def of_schema(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that it can be called with the arguments of its op's schema. Each parameter of the kernel is
    made from one or more of these arguments. The type of the parameter's default determines which arguments these are;
    without a default, the parameter's annotation does.
    """
    names: list[str] = []
    defaults: list[Any] = []
    parts: list[tuple[Callable[..., Any] | None, int, slice]] = []
    for name, parameter in signature(kernel).parameters.items():
        make, arguments = _made_of(name, parameter)
        parts.append((make, len(names), slice(len(names), len(names) + len(arguments))))
        names += arguments
        defaults += arguments.values()
    required = defaults.count(Parameter.empty)

    @wraps(kernel)
    def call(*given: Any, **named: Any) -> Any:
        if named:
            left = names[len(given) :]
            if unknown := named.keys() - set(left):
                raise TypeError(f"{kernel.__name__}: got {', '.join(unknown)}; takes {', '.join(left)} by name")
            given = *given, *map(named.get, left, defaults[len(given) :])
        values = (*given, *defaults[len(given) :])
        if any(value is Parameter.empty for value in values[:required]):
            raise TypeError(f"{kernel.__name__}: got {len(given)} arguments; takes at least {required}")
        return kernel(*[values[place] if make is None else make(*values[all_of]) for make, place, all_of in parts])

    return call


def _made_of(name: str, parameter: Parameter) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Returns two results. The first is the function that makes this parameter of a kernel, or None if the parameter is
    a single argument of the schema. The second has the names and the defaults of the schema's arguments.
    """
    default = parameter.default
    if parameter.annotation in (GradientArguments, GradientArguments.__name__):
        return GradientArguments, dict.fromkeys(GradientArguments._fields, Parameter.empty)
    if parameter.annotation in (SupportArguments, SupportArguments.__name__):
        required = dict.fromkeys(("support_ids", "support_offsets"), Parameter.empty)
        return SupportArguments, {**required, "include_label": False}
    if isinstance(default, NumberOrTensor):
        return NumberOrTensor, {name: default.number, f"{name}_tensor": default.tensor}
    if isinstance(default, (SegmentArguments, Tile, ShardArguments)):
        return type(default), default._asdict()
    if isinstance(default, OptionalSupports):
        names = "support_ids", "support_offsets", "include_label", "max_dense_rows"
        return OptionalSupports, dict(zip(names, default, strict=True))
    return None, {name: default}
