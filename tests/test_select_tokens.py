"""select_tokens and select_tokens_from_logits: topk_mask of |A| * H or another score, with count and threshold."""

import pytest
import torch
from helpers import (
    INF,
    NAN,
    LogitsCase,
    Segmented,
    assert_entropy,
    assert_identical,
    assert_same_bits,
    awkward,
    cut,
    logits_cases,
    random_generator,
    random_logits,
    ratios,
    seeds,
    segmented,
    slow,
    unwritten,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from d3s_kernels import TokenSelection, entropy, reference, select_tokens, select_tokens_from_logits, topk_mask

scopes = st.sampled_from(["batch", "sequence"])
topk_rules = st.sampled_from(["advantage_entropy", "entropy", "advantage", "random"])


def check(found: TokenSelection, expected: reference.TokenSelection) -> None:
    assert isinstance(found, TokenSelection)
    for name in expected._fields:
        assert_identical(getattr(found, name), getattr(expected, name))


@st.composite
def advantages(draw: st.DrawFn, case: Segmented) -> Tensor:
    """One advantage for each token, for each sequence, or for all."""
    shape = draw(st.sampled_from([case.values.shape, case.segments, ()]))
    count = torch.Size(shape).numel()
    return torch.tensor(draw(st.lists(awkward, min_size=count, max_size=count)), dtype=torch.float32).view(shape)


@given(st.data(), segmented(awkward), ratios(), topk_rules, scopes, st.booleans(), seeds)
def test_any_arguments(
    data: st.DataObject, case: Segmented, ratio: float | Tensor, rule: str, scope: str, drop_zeros: bool, seed: int
) -> None:
    def generator() -> torch.Generator | None:
        return random_generator(seed) if rule == "random" else None

    arguments = (case.values, data.draw(advantages(case)), ratio)
    options = {"rule": rule, "mask": case.mask, "offsets": case.offsets, "scope": scope, "drop_zeros": drop_zeros}
    check(
        select_tokens(*arguments, generator=generator(), **options),
        reference.select_tokens(*arguments, generator=generator(), **options),
    )


@given(st.data(), logits_cases(special=(INF, -INF, NAN)), ratios(), scopes, st.booleans())
def test_from_any_logits(
    data: st.DataObject, case: LogitsCase, ratio: float | Tensor, scope: str, drop_zeros: bool
) -> None:
    logits = case.logits if case.logits.dim() > 1 else case.logits.unsqueeze(0)
    tokens = logits.shape[:-1]
    mask = torch.rand(tokens) < 0.7 if data.draw(st.booleans()) else None
    each = torch.randn(data.draw(st.sampled_from([tokens, tokens[:-1], ()])))
    options = {"mask": mask, "scope": scope, "drop_zeros": drop_zeros}
    found = select_tokens_from_logits(logits, each, ratio, temperature=0.7, **options)
    assert_entropy(found.entropy, reference.entropy(logits, temperature=0.7, mask=mask))
    check(found, reference.select_tokens(found.entropy, each, ratio, **options))


def test_from_ragged_logits_at_a_temperature_of_each_token() -> None:
    logits, offsets, temperature = random_logits(60, 200), cut(60, 5), 0.5 + torch.rand(60)
    each, mask = torch.randn(5), torch.rand(60) < 0.8
    for scope in ("batch", "sequence"):
        options = {"mask": mask, "offsets": offsets, "scope": scope}
        found = select_tokens_from_logits(logits, each, 0.3, temperature=temperature, **options)
        assert_same_bits(found.entropy, entropy(logits, temperature=temperature, mask=mask))
        check(found, reference.select_tokens(found.entropy, each, 0.3, **options))


# ---- the score -------------------------------------------------------------------------------------------------------


def test_the_score_is_the_product_in_float32() -> None:
    """Scores that tie when rounded to half precision are told apart. The sign of the advantage does not matter."""
    values = torch.full((2, 2), 1.0, dtype=torch.bfloat16)
    each = torch.tensor([[1.0, -1.0 - 2**-20], [1.0 + 2**-20, 0.5]])
    assert select_tokens(values, each, 0.25).mask.tolist() == [[False, True], [False, False]]
    assert select_tokens(values, each, 0.5).mask.tolist() == [[False, True], [True, False]]


def test_advantages_of_a_sequence_count_for_all_its_tokens() -> None:
    values, each = torch.rand(5, 40), torch.randn(5)
    expected = select_tokens(values, each.unsqueeze(-1).expand(5, 40), 0.2)
    check(select_tokens(values, each, 0.2), expected)
    ragged = select_tokens(values.flatten(), each, 0.2, offsets=torch.arange(0, 201, 40))
    assert_identical(ragged.mask.view(5, 40), expected.mask)


@pytest.mark.parametrize("short", range(4))
def test_a_sequence_of_one_token_has_its_own_advantage(short: int) -> None:
    """At any position beside longer sequences, it uses its own advantage and not that of a neighbour."""
    lengths = torch.full((4,), 3)
    lengths[short] = 1
    offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    each = torch.full((4,), 2.0)
    each[short] = 1.0
    highest = torch.ones(10, dtype=torch.bool)
    highest[offsets[short]] = False
    assert_identical(select_tokens(torch.ones(10), each, 0.9, offsets=offsets).mask, highest)
    assert_identical(select_tokens(torch.ones(10), 3 - each, 0.1, offsets=offsets).mask, ~highest)


def test_as_many_advantages_as_tokens_are_for_the_tokens() -> None:
    values, offsets = torch.ones(3), torch.tensor([0, 0, 1, 3])  # three sequences, three tokens
    found = select_tokens(values, torch.tensor([3.0, 1.0, 2.0]), 0.3, offsets=offsets)
    assert found.mask.tolist() == [True, False, False]


def test_half_precision_advantages() -> None:
    values, each = torch.rand(4, 30), torch.randn(4).bfloat16()
    check(select_tokens(values, each, 0.2), select_tokens(values, each.float(), 0.2))


def test_infinity_times_zero_is_no_score() -> None:
    found = select_tokens(torch.tensor([INF, 0.0, 1.0, INF]), torch.tensor([0.0, INF, 1.0, 1.0]), 1.0)
    assert found.mask.tolist() == [False, False, True, True]


# ---- other rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_entropy_alone(scope: str) -> None:
    """Advantages are ignored, even NaN or of a wrong shape."""
    values, mask = torch.rand(6, 50), torch.rand(6, 50) < 0.8
    found = select_tokens(values, None, 0.2, rule="entropy", mask=mask, scope=scope)
    check(found, select_tokens(values, torch.tensor(1.0), 0.2, mask=mask, scope=scope))
    check(select_tokens(values, torch.full((3,), NAN), 0.2, rule="entropy", mask=mask, scope=scope), found)


def test_the_advantage_alone() -> None:
    """All tokens of a sequence tie, so the first ones are kept, whatever their entropy."""
    values, each = torch.rand(3, 10), torch.tensor([1.0, -2.0, 0.5])
    values[1, 0] = NAN
    found = select_tokens(values, each, 0.2, rule="advantage")
    assert found.mask.nonzero().tolist() == [[1, i] for i in range(6)]
    assert (found.count, found.threshold) == (6, 2.0)
    assert found.entropy is values
    first_two = torch.arange(10) < 2
    assert_identical(select_tokens(values, each, 0.2, rule="advantage", scope="sequence").mask, first_two.expand(3, 10))


def test_random_tokens_are_spread_evenly() -> None:
    """Half of 200,000 tokens are drawn: each tenth of the batch gets 10,000, with a standard deviation below 100."""
    found = select_tokens(torch.zeros(200_000), None, 0.5, rule="random")
    assert found.count == 100_000
    assert ((found.mask.view(10, -1).sum(-1) - 10_000).abs() < 600).all()


def test_random_tokens_follow_their_generator() -> None:
    values, mask = torch.zeros(8, 100), torch.rand(8, 100) < 0.7
    for scope in ("batch", "sequence"):
        one, same, other = (
            select_tokens(values, None, 0.3, rule="random", mask=mask, scope=scope, generator=random_generator(seed))
            for seed in (1, 1, 2)
        )
        assert_identical(one.mask, same.mask)
        assert not torch.equal(one.mask, other.mask)
        assert not one.mask[~mask].any()


# ---- TRL's quantile --------------------------------------------------------------------------------------------------


@given(segmented(awkward), ratios())
def test_any_quantile(case: Segmented, ratio: float | Tensor) -> None:
    options = {"rule": "entropy_quantile", "mask": case.mask}
    check(
        select_tokens(case.values, None, ratio, **options), reference.select_tokens(case.values, None, ratio, **options)
    )


def test_the_quantile_of_few_tokens_by_hand() -> None:
    """For 1, 2, 3, 5 the quantile 0.75 is a quarter of the way from 3 to 5, and 0.5 is halfway between 2 and 3."""
    values = torch.tensor([[5.0, 1.0, 9.0], [9.0, 3.0, 2.0]])
    mask = values != 9
    found = select_tokens(values, None, 0.25, rule="entropy_quantile", mask=mask)
    assert (found.threshold, found.count) == (3.5, 1)
    assert found.mask.tolist() == [[True, False, False], [False, False, False]]
    assert select_tokens(values, None, 0.5, rule="entropy_quantile", mask=mask).threshold == 2.5


@pytest.mark.slow_elsewhere("what torch's quantile does wrong, whoever serves the ops")
def test_the_faults_of_the_quantile() -> None:
    """Ties keep more than the share, one NaN keeps nothing, and up to torch 2.13 it refuses more than 2^24 tokens. The
    rule "entropy" has none of these faults.
    """

    def counts(values: Tensor) -> tuple[int, int]:
        return tuple(int(select_tokens(values, None, 0.2, rule=rule).count) for rule in ("entropy_quantile", "entropy"))

    assert counts(torch.ones(100)) == (100, 20)
    assert counts(torch.cat([torch.rand(100), torch.tensor([NAN])])) == (0, 20)
    if torch.__version__ < "2.14":
        with pytest.raises(RuntimeError, match="too large"):
            select_tokens(torch.zeros(2**24 + 1), None, 0.2, rule="entropy_quantile")


# ---- scope -----------------------------------------------------------------------------------------------------------


def test_within_a_sequence_only_entropy_decides() -> None:
    """|A| is constant in a sequence, so with scope "sequence" it only scales the threshold (exactly, as a power of
    2)."""
    values, each = torch.rand(6, 50), torch.tensor([1.0, -2.0, 0.5, -4.0, 8.0, -0.25])
    found = select_tokens(values, each, 0.1, scope="sequence")
    assert_identical(found.mask, topk_mask(values, 0.1))
    assert found.count.tolist() == [5] * 6
    assert_identical(found.threshold, values.topk(5).values[:, -1] * each.abs())


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("ragged", [True, False])
def test_shapes_of_count_and_threshold(scope: str, ragged: bool) -> None:
    values, offsets = (torch.rand(24), torch.tensor([0, 10, 24])) if ragged else (torch.rand(2, 3, 4), None)
    found = select_tokens(values, torch.tensor(1.0), 0.5, offsets=offsets, scope=scope)
    expected = () if scope == "batch" else (2,) if ragged else (2, 3)
    assert found.count.shape == found.threshold.shape == expected
    assert (found.count.dtype, found.threshold.dtype) == (torch.int32, torch.float32)


def test_one_sequence_alone_is_its_own_batch() -> None:
    values = torch.rand(77)
    check(
        select_tokens(values, torch.tensor(-2.0), 0.3, scope="sequence"),
        select_tokens(values, torch.tensor(-2.0), 0.3, scope="batch"),
    )


def test_the_threshold_is_the_lowest_kept_score() -> None:
    values, each = torch.rand(8, 100), torch.randn(8)
    found = select_tokens(values, each, 0.2)
    scores = each.abs().unsqueeze(-1) * values
    assert found.threshold == scores[found.mask].min()
    assert (scores[~found.mask] <= found.threshold).all()
    assert found.count == found.mask.sum() == 160


# ---- awkward batches -------------------------------------------------------------------------------------------------


def test_groups_without_a_spread_have_nothing_to_keep() -> None:
    """All advantages of such a group are 0: its tokens are taken last, or never with drop_zeros."""
    values, each = torch.rand(20, 50) + 0.1, torch.zeros(20)
    each[3] = 1.5  # 50 of 1000 tokens have a score
    found = select_tokens(values, each, 0.2)
    assert found.count == 200
    assert found.mask[3].all()
    assert found.threshold == 0
    dropped = select_tokens(values, each, 0.2, drop_zeros=True)
    assert_identical(dropped.mask, (each != 0).unsqueeze(-1).expand(20, 50))
    assert dropped.count == 50
    assert dropped.threshold == (values[3] * 1.5).min()


def test_equal_scores_keep_exactly_the_share() -> None:
    found = select_tokens(torch.ones(10, 100), torch.ones(10), 0.2)
    assert_identical(found.mask.flatten(), torch.arange(1000) < 200)


def test_one_nan_costs_one_token() -> None:
    values = torch.rand(1001)
    values[500] = NAN
    found = select_tokens(values, torch.tensor(1.0), 0.2)
    assert found.count == 200
    assert_identical(values[found.mask].sort().values, values[~values.isnan()].sort().values[-200:])


def test_padding_never_counts() -> None:
    values, mask = torch.rand(4, 100), torch.arange(100) < torch.tensor([[100], [10], [0], [55]])
    values[~mask] = 1e9
    pooled = select_tokens(values, torch.ones(4), 0.2, mask=mask)
    assert pooled.count == 33  # of 165
    assert not pooled.mask[~mask].any()
    assert select_tokens(values, torch.ones(4), 0.2, mask=mask, scope="sequence").count.tolist() == [20, 2, 0, 11]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 5)])
@pytest.mark.parametrize(
    ("rule", "scope"),
    [
        *((rule, scope) for rule in ("advantage_entropy", "entropy", "random") for scope in ("batch", "sequence")),
        ("entropy_quantile", "batch"),
    ],
)
def test_nothing_to_keep(shape: tuple[int, ...], rule: str, scope: str) -> None:
    """A rank without tokens, or one whose tokens are all masked."""
    options = {"rule": rule, "scope": scope, "mask": torch.zeros(shape).bool()}
    found = select_tokens(torch.rand(shape), torch.tensor(1.0), 0.2, **options)
    assert found.mask.shape == shape
    assert not found.mask.any()
    assert (found.count == 0).all()
    assert (found.threshold == INF).all()


def test_logits_of_masked_tokens_are_not_read() -> None:
    logits, mask = random_logits(3, 8, 500), torch.rand(3, 8) < 0.5
    clean = select_tokens_from_logits(logits, torch.ones(3), 0.5, mask=mask)
    logits[~mask] = NAN
    check(select_tokens_from_logits(logits, torch.ones(3), 0.5, mask=mask), clean)
    assert (clean.entropy[~mask] == 0).all()


def test_logits_of_a_masked_vocabulary() -> None:
    """With -inf logits, an entropy of NaN would lose the token."""
    logits = torch.cat([random_logits(4, 10, 300), torch.full((4, 10, 20), -INF)], -1)
    found = select_tokens_from_logits(logits, torch.ones(4), 0.2)
    assert found.count == 8
    assert_entropy(found.entropy, reference.entropy(logits))


@pytest.mark.parametrize(
    ("scope", "shape"),
    [
        ("batch", (2, 70_000)),
        slow("batch", (70_000, 2), shows="as many sequences pooled"),
        ("sequence", (2, 70_000)),
        slow("sequence", (70_000, 2), shows="more sequences than 16 bits count"),
    ],
)
def test_long_batches(shape: tuple[int, int], scope: str) -> None:
    values, each, mask = torch.rand(shape), torch.randn(shape[0]), torch.rand(shape) < 0.9
    options = {"mask": mask, "scope": scope}
    check(select_tokens(values, each, 0.1, **options), reference.select_tokens(values, each, 0.1, **options))


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_long_ragged_batch(per: str) -> None:
    """The pieces in which a long pooled batch is processed begin and end inside sequences."""
    offsets = cut(300_000, 40)
    values, each = torch.rand(300_000), torch.randn(300_000 if per == "token" else 40)
    for scope in ("batch", "sequence"):
        options = {"offsets": offsets, "scope": scope}
        check(select_tokens(values, each, 0.1, **options), reference.select_tokens(values, each, 0.1, **options))


def test_selections_have_no_gradient() -> None:
    logits = random_logits(2, 5, 30).requires_grad_()
    for tensor in select_tokens_from_logits(logits, torch.ones(2, requires_grad=True), 0.5):
        assert not tensor.requires_grad
    row_entropy = entropy(logits)
    for rule in ("advantage_entropy", "entropy", "advantage", "random", "entropy_quantile"):
        found = select_tokens(row_entropy, torch.ones(2, requires_grad=True), 0.5, rule=rule)
        assert not any(tensor.requires_grad for tensor in (found.mask, found.count, found.threshold))
    row_entropy[found.mask].sum().backward()  # the mask can be used in a loss
    assert logits.grad is not None


def test_the_inputs_are_not_written() -> None:
    inputs = [random_logits(2, 6, 30), torch.randn(2), torch.rand(2, 6) < 0.8]
    with unwritten(*inputs):
        select_tokens_from_logits(*inputs[:2], 0.3, mask=inputs[2], drop_zeros=True)
