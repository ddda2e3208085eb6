"""The examples in the docstrings of the public names give the results that they show."""

import doctest
import inspect
from operator import attrgetter

import pytest

import d3s_kernels
from d3s_kernels import denominators, distributed, metrics, ratios, selection, selection_options

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
DOCUMENTED = [
    name
    for name in d3s_kernels.__all__
    if inspect.isfunction(getattr(d3s_kernels, name)) or name in ("DownSamplingSchedule", "PlanSampler", "Selection")
]


ACROSS_RANKS = [f"distributed.{name}" for name in distributed.__all__ if inspect.isfunction(getattr(distributed, name))]


def public(name: str) -> object:
    return attrgetter(name)(d3s_kernels)


FOR_TRAINERS = [
    metrics.selection_metrics, selection_options.rollouts_of, selection.choose_rollouts, selection.in_groups,
    ratios.espo_terms, denominators.gradient_weights,
]  # fmt: skip


@pytest.mark.parametrize("documented", FOR_TRAINERS, ids=lambda function: function.__name__)
def test_examples_for_trainers(documented: object) -> None:
    run(documented, documented.__name__)


@pytest.mark.parametrize("name", [*DOCUMENTED, *ACROSS_RANKS])
def test_examples(name: str) -> None:
    run(public(name), name)


def run(documented: object, name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(documented, name)
    assert sum(len(test.examples) for test in tests) > 0, f"{name} has no example"
    report: list[str] = []
    for test in tests:
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("name", [*DOCUMENTED, *ACROSS_RANKS, "Budget", "RolloutPlan", "TokenSelection", "build_info"])
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(public(name))
