"""What every back-end gives for values that nobody has checked, as on a GPU: NaN or nothing where they are wrong, the
right results elsewhere, and no access out of bounds. Each check takes ``call(op, *arguments)``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

import torch
from helpers import INF, NAN, assert_same_bits, random_logits
from torch import Tensor

Call = Callable[..., Any]


def labels(call: Call) -> None:
    """A label that is no token makes its row NaN, but the gradient only where the log-probability has one."""
    ones = torch.ones(3)
    for label in (-1, -99, -101, 50, 2**31, 2**31 - 100, -(2**63)):
        logits, given = random_logits(3, 50), torch.tensor([3, label, -100])
        logprob, *statistics = call("logprob_entropy", logits, given)
        assert logprob.isnan().tolist() == [False, True, False]
        assert logprob[2] == 0
        assert not torch.stack(statistics).isnan().any()
        for incoming, bad in ((ones, True), (0 * ones, False)):
            slope = call("logprob_entropy_backward", incoming, ones, logits, given, *statistics)
            assert slope.isnan().all(1).tolist() == slope.isnan().any(1).tolist() == [False, bad, False]
        in_place = logits.clone()  # with a first token, the size of the vocabulary is not known
        call("logprob_entropy_backward_", ones, ones, in_place, given, *statistics, 0)
        assert in_place.isnan().all(1).tolist() == in_place.isnan().any(1).tolist() == [False, label < 0, False]


def temperatures(call: Call) -> None:
    logits, given = random_logits(3, 50), torch.tensor([3, 4, 5])
    for wrong in (0.0, -1.0, 1e-16, 1e16, INF, NAN):
        of_rows = torch.tensor([1.0, wrong, 1.0])
        for heat, bad in ((of_rows, [False, True, False]), (torch.tensor(wrong), [True] * 3)):
            logprob, *statistics = call("logprob_entropy", logits, given, 1.0, heat)
            assert logprob.isnan().tolist() == statistics[0].isnan().tolist() == bad
            slope = call("logprob_entropy_backward", *torch.ones(2, 3), logits, given, *statistics, 1.0, heat)
            assert slope.isnan().all(1).tolist() == bad


def rows(call: Call) -> None:
    """A row that does not exist has a gradient of NaN, if one comes in."""
    kept, targets, incoming = random_logits(3, 50), torch.tensor([3, 4, -100, 4]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    _, *statistics = call("logprob_entropy", kept[[2, 1, 0, 1]], targets)
    of_three, of_none = [False, True, False, False], [True, True, True, False]
    for wrong, some, bad in (
        (-1, kept, of_three),
        (3, kept, of_three),
        (2**40, kept, of_three),
        (0, kept[:0], of_none),
    ):
        slope, places = torch.full((4, 50), 7.0), torch.tensor([2, wrong, 0, wrong])
        call("logprob_entropy_backward_rows_", incoming, incoming, some, targets, *statistics, places, slope)
        assert slope.isnan().all(1).tolist() == slope.isnan().any(1).tolist() == bad
        assert not slope[3].any()


def quotas(call: Call) -> None:
    """Nothing is selected."""
    scores, one = torch.rand(3, 9), torch.tensor(1.0)
    for ratio in (0.0, -1.0, 1.5, INF, NAN):
        for dtype in (torch.float32, torch.float64):
            given = scores, one, None, torch.tensor(ratio, dtype=dtype)
            chosen, counts, thresholds = call("select_tokens", *given, pooled=False)
            assert not chosen.any()
            assert not counts.any()
            assert (thresholds == INF).all()
    for keep in (0, -1, -(2**63)):
        for pooled in (False, True):
            assert not call("topk_mask", scores, k_tensor=torch.tensor(keep), pooled=pooled).any()
            assert not call("max_variance_select", scores, None, torch.tensor(keep), pooled=pooled).any()


def groups(call: Call) -> None:
    """A bad group gives NaN. It changes neither the sums of the next sequence nor the memory after the last one's."""
    values, few = torch.rand(4, 4), [[0, 15, 16, 127], [0, 0, 3, 3], [-1, -128, 3, 3], [0, 16, 3, 64]]
    ids = torch.tensor(few, dtype=torch.int8)
    good = ids < 16
    calls = [lambda of: call("adaptive_clip", values, of, None, None, 9)]
    for way in ("self", "old"):
        calls.append(
            lambda of, way=way: call("importance_ratio", values, 0 * values, None, of, None, "entropy_group", way)
        )
    for of_groups in calls:
        found, clean = of_groups(ids), of_groups(ids.where(good, -1))
        assert_same_bits(found[good], clean[good])
        assert torch.equal(found.isnan(), ~good)


def spans(call: Call) -> None:
    """NaN in the rows of bad spans."""
    given = [[3, 4], [-1], [50, 3], [7, 2**31 - 1], [5, 6], [5], [8], [1, 2, 9], [-(2**31), 2]]
    targets, logits = torch.tensor([3, 3, 3, 7, 9, 9, -100, 2, -7]), random_logits(9, 50)
    ids = torch.tensor(list(chain(*given)), dtype=torch.int32)
    offsets = torch.tensor([0, *accumulate(map(len, given))])

    def results(cuts: Tensor, heat: Tensor | None = None, include: bool = False, ids: Tensor = ids) -> list[Tensor]:
        """The results and the gradient, of the dense rows and then of the others among them."""
        n, ones = len(cuts) - 1, torch.ones(len(cuts) - 1)
        of_rows, supports = (logits[:n], targets[:n]), (ids, cuts, include)
        dense, _ = call("support_rows", logits[:n], ids, cuts)
        found = call("logprob_entropy", *of_rows, 1.0, heat, dense)
        call("support_logprob_entropy_", *found, *of_rows, *supports, 1.0, heat)
        slope = call("logprob_entropy_backward", ones, ones, *of_rows, *found[1:], 1.0, heat, dense)
        call("support_logprob_entropy_backward_", ones, ones, *of_rows, *found[1:], slope, *supports, 1.0, heat)
        return [*found, slope]

    def undefined(cuts: Tensor, include: bool = False) -> list[list[bool]]:
        logprob, entropy, *_, slope = results(cuts, include=include)
        assert torch.equal(slope.isnan().all(1), slope.isnan().any(1))
        return [part.isnan().tolist() for part in (logprob, entropy, slope[:, 0])]

    bad, lacking = [False, True, True, True, False, False, False, False, True], [4, 5]
    logprob, entropy, slope = undefined(offsets)
    assert entropy == bad
    assert logprob == slope == [is_bad or row in lacking for row, is_bad in enumerate(bad)]
    logprob, entropy, slope = undefined(offsets, include=True)
    assert logprob == entropy == slope == bad
    heat = torch.tensor([1.0, NAN, 0.0, -1.0])
    logprob = results(torch.arange(5), heat, ids=ids[[0, 0, 0, 5]])[0]
    assert logprob.isnan().tolist() == [False, True, True, True]
    for cuts in (-torch.arange(10), 1000 * torch.arange(10), torch.full((10,), -(2**62)), torch.arange(10, 0, -1)):
        assert all(undefined(cuts)[0][row] for row in range(1, 9) if targets[row] != -100)


OF_TRITON = (labels, temperatures, rows, quotas)  # which has no kernels for the others
ALL = (*OF_TRITON, groups, spans)
