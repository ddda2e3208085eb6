"""The examples in the docstrings of the public names give the results that they show."""

import doctest
import inspect
from operator import attrgetter

import pytest

import d3s_kernels
from d3s_kernels import distributed
from d3s_kernels.off_policy import importance_ratio
from d3s_kernels.selection import loss_weights, metrics, options, rollouts, selection

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
DOCUMENTED = [
    name
    for name in d3s_kernels.__all__
    if inspect.isfunction(getattr(d3s_kernels, name)) or name in ("DownSamplingSchedule", "PlanSampler", "Selection")
]
ACROSS_RANKS = [f"distributed.{name}" for name in distributed.__all__ if inspect.isfunction(getattr(distributed, name))]
FOR_TRAINERS = [
    metrics.selection_metrics, options.rollouts_of, rollouts.choose_rollouts, selection.in_groups,
    importance_ratio.espo_terms, loss_weights.gradient_weights,
]  # fmt: skip
WITH_EXAMPLES = {name: attrgetter(name)(d3s_kernels) for name in [*DOCUMENTED, *ACROSS_RANKS]}
WITH_EXAMPLES |= {function.__name__: function for function in FOR_TRAINERS}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(WITH_EXAMPLES[name], name)
    assert sum(len(test.examples) for test in tests) > 0, f"{name} has no example"
    report: list[str] = []
    for test in tests:
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("name", ["Budget", "RolloutPlan", "TokenSelection", "build_info"])
def test_every_other_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(d3s_kernels, name))
