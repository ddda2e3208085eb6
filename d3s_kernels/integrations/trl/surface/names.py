"""Compares TRL with the table of what this integration relies on, when a trainer is made."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import trl
import trl.trainer.utils as trl_utils
from packaging.version import Version

from ..._gradient import DENOMINATORS
from .table import ATTRIBUTES, FUNCTIONS, HEAD, LOSS_MAY_READ, LOSS_READS, METHODS, Relied, UnknownTRL


def check_class(trainer: type, ours: type, loss_type: str) -> None:
    """Checks methods and functions, what the loss reads, and that the denominator of its type is known.

    Args:
        trainer: the class of the trainer that is made.
        ours: the class among its bases whose own bases are checked.
        loss_type: the option.

    Raises:
        UnknownTRL: one is not there, has other parameters, or the loss reads a name that is not in the table.
        ValueError: the type of the loss is none of ``_gradient.DENOMINATORS``.
    """
    for relied in METHODS:
        found = inherited(trainer, ours, relied.name)
        if found is None:
            raise UnknownTRL(f"GRPOTrainer.{relied.name}: is not in TRL {trl.__version__}; {relied.why}")
        _check_parameters(relied, found)
    for relied in FUNCTIONS:
        _check_parameters(relied, _function(relied))
    _check_head()
    _check_what_is_read(inherited(trainer, ours, "_compute_loss"))
    if loss_type not in DENOMINATORS:
        raise ValueError(f"loss_type: got {loss_type!r}; takes {' or '.join(map(repr, sorted(DENOMINATORS)))}")


def check_attributes(trainer: Any) -> None:
    """Checks the attributes of a trainer that was made.

    Raises:
        UnknownTRL: one is not there.
    """
    for name, why in ATTRIBUTES.items():
        if not hasattr(trainer, name):
            raise UnknownTRL(f"GRPOTrainer.{name}: a trainer of TRL {trl.__version__} has no such attribute; {why}")


def inherited(trainer: type, ours: type, name: str) -> Callable[..., Any] | None:
    """The method that ``super().name`` is in a method of ``ours``."""
    above = trainer.__mro__[trainer.__mro__.index(ours) + 1 :]
    return next((vars(base)[name] for base in above if name in vars(base)), None)


def place(function: Any) -> str:
    """A function's name, file and line, for an error."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    at = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(plain, '__qualname__', repr(plain))}{at}"


def _function(relied: Relied) -> Any:
    module, *names = relied.name.removeprefix("trl.trainer.").split(".")
    found: Any = importlib.import_module(f"trl.trainer.{module}")
    for name in names:
        if not hasattr(found, name):
            raise UnknownTRL(f"{relied.name}: is not in TRL {trl.__version__}; {relied.why}")
        found = getattr(found, name)
    return found


def _check_parameters(relied: Relied, found: Any) -> None:
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    given = inspect.signature(found).parameters.values()
    parameters = " ".join(marks.get(parameter.kind, "") + parameter.name for parameter in given)
    if parameters != relied.parameters:
        raise UnknownTRL(
            f"{relied.name}: got {place(found)} with the parameters ({parameters.replace(' ', ', ')}); takes "
            f"({relied.parameters.replace(' ', ', ')}): {relied.why}"
        )


def _check_head() -> None:
    """TRL's models have to look the head up in the module where it is replaced."""
    looked_up = set(_names(trl_utils.add_fused_lm_head.__code__))
    for relied in HEAD:
        if Version(trl.__version__) < Version(relied.since):
            continue
        if trl_utils._ChunkedLogProbFunction is not None:  # else there is no Triton, and TRL's head was not made
            _check_parameters(relied, _function(relied))
        name = relied.name.removeprefix("trl.trainer.utils.").split(".")[0]
        if name not in looked_up:
            raise UnknownTRL(
                f"{relied.name}: {place(trl_utils.add_fused_lm_head)} does not look it up; it is {relied.why}"
            )


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function and those within it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _check_what_is_read(loss: Any) -> None:
    found = _read_by(loss)
    unknown = sorted(found - LOSS_READS.keys() - set(LOSS_MAY_READ.split()))
    if unknown:
        raise UnknownTRL(
            f"{place(loss)} reads {', '.join(unknown)}, which is not known: it may bring a term of the loss that the "
            "selection of tokens does not cover"
        )
    for name, why in LOSS_READS.items():
        if name not in found:
            raise UnknownTRL(f"{place(loss)} does not read {name}, where this integration hands over {why}")


def _read_by(loss: Any) -> set[str]:
    """``self.<name>``, ``self.args.<name>`` and ``inputs.<field>``, as far as the function's source has them."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(loss)))
    except (OSError, TypeError) as error:
        raise UnknownTRL(f"{place(loss)} has no source, so that nobody can see what it reads") from error
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name("self"), attr=name):
                found.add(f"self.{name}")
            case ast.Attribute(value=ast.Attribute(value=ast.Name("self"), attr="args"), attr=name):
                found.add(f"self.args.{name}")
            case (
                ast.Subscript(value=ast.Name("inputs"), slice=ast.Constant(value=name))
                | ast.Call(
                    func=ast.Attribute(value=ast.Name("inputs"), attr="get"), args=[ast.Constant(value=name), *_]
                )
                | ast.Compare(left=ast.Constant(value=name), comparators=[ast.Name("inputs")])
            ):
                found.add(f"inputs.{name!s}")
            case ast.Call(func=ast.Name("getattr"), args=[ast.Name("self"), ast.Constant(value=name), *_]):
                found.add(f"self.{name!s}")
    return found
