"""The softmax state (m, S, T) in Triton. Special values give the same results as in ``csrc/core/softmax_state.h``.

The order of sums does not depend on the layout that Triton chooses: a lane adds its elements one after the other, in
the order of the code, and lanes are reduced in one dimension. So a row's result is bitwise equal at any address.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.44269504088896340736)
MINUS_INFINITY = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the maximum of no logits: not -inf, since -inf - -inf would be NaN
# A logit of -inf has the distance d = -inf, and 2^d is 0. The product d * 2^d would be NaN, so max(d, LOWEST_DISTANCE)
# * 2^d is computed instead. This is 0 for every d below LOWEST_DISTANCE, since 2^-200 is 0 in float32. A NaN logit
# still makes the sums NaN, since its 2^d is NaN.
LOWEST_DISTANCE = tl.constexpr(-200.0)


@triton.jit
def add(m, s, scaled_t, z, scale):
    """Adds the elements of the tuple ``z`` to the lanes' states. ``scale`` = log2(e) / temperature turns distances into
    exponents of 2; ``scaled_t`` is T * ``scale``.
    """
    top = m
    for i in tl.static_range(len(z)):
        top = tl.maximum(top, z[i])
    move = (m - top) * scale
    factor = tl.exp2(move)
    scaled_t = factor * tl.fma(tl.where(factor > 0, move, 0.0), s, scaled_t)  # a move of -inf times 0 would be NaN
    s = factor * s
    for i in tl.static_range(len(z)):
        distance = (z[i] - top) * scale
        e = tl.exp2(distance)
        s += e
        scaled_t = tl.fma(tl.maximum(distance, LOWEST_DISTANCE), e, scaled_t)
    return top, s, scaled_t


@triton.jit
def merge_lanes(m, s, scaled_t, scale):
    """Merges the states of all lanes into one state (m, S, T) of scalars."""
    top = tl.max(m, 0)
    s, t = rebase(m, s, tl.div_rn(scaled_t, s * 0.0 + scale), top, scale)
    return top, tl.sum(s, 0), tl.sum(t, 0)


@triton.jit
def rebase(m, s, t, top, scale):
    """Returns (S, T) of a state after its maximum is raised from m to ``top``."""
    move = m - top
    factor = tl.exp2(move * scale)
    return factor * s, factor * tl.fma(tl.where(factor > 0, move, 0.0), s, t)


@triton.jit
def merge(m, s, t, other_m, other_s, other_t, scale):
    """Merges the states of two parts of a row."""
    top = tl.maximum(m, other_m)
    s, t = rebase(m, s, t, top, scale)
    other_s, other_t = rebase(other_m, other_s, other_t, top, scale)
    return top, s + other_s, t + other_t


@triton.jit
def finish(s, t, temperature):
    """Returns the entropy and log S."""
    undefined = (s < 0.5) | (t != t)  # only -inf logits, or no logits; or a NaN or +inf logit
    s = tl.where(undefined, float("nan"), s)
    log_sum = tl.log(s)
    mean = tl.div_rn(t, temperature * s)
    entropy = log_sum - tl.where(mean > -1e-30, 0.0, mean)  # removes terms of -inf logits; NaN stays NaN
    return tl.where(entropy < 0, 0.0, entropy), log_sum


@triton.jit
def exponential(x):
    """Computes e^x within one unit in the last place, as in ``csrc/core/exponential.h``. The device's own function is
    too inaccurate for 1 - p.
    """
    inside = tl.where(x < -104.0, -104.0, tl.where(x > 89.0, 89.0, x))
    total = inside * 1.44269504 + 12582912.0
    n = total - 12582912.0
    r = (inside - n * 0.693145752) - n * 1.42860677e-6
    q = r * 1.374611515e-3 + 8.371827193e-3
    q = q * r + 4.166996479e-2
    q = q * r + 1.666648984e-1
    q = q * r + 4.999998510e-1
    e = (r * r * q + r) + 1.0
    power = n.to(tl.int32)
    half = power >> 1
    return e * power_of_two(half) * power_of_two(power - half)


@triton.jit
def power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


# ---- loads: each lane loads a vector of the row. The result is a tuple of columns [lanes, 1]. -----------------------


@triton.jit
def load_columns(row, begin, end, LANES: tl.constexpr, VECTOR: tl.constexpr, STEP: tl.constexpr, EDGE: tl.constexpr):
    """Loads one vector for each lane, as float32 columns. With EDGE, elements from ``end`` on are -inf."""
    lane = tl.arange(0, LANES)[:, None] * VECTOR
    if STEP == VECTOR:  # aligned: one wide load for each vector, and one thread holds all elements of the vector
        places = begin + lane + tl.arange(0, VECTOR)[None, :]
        return _split_columns(_load(row, places, end, EDGE))
    else:
        columns = ()
        for i in tl.static_range(VECTOR):
            columns = columns + (_load(row, begin + lane + i, end, EDGE),)  # type: ignore[assignment]
        return columns


@triton.jit
def _load(row, places, end, EDGE: tl.constexpr):
    if EDGE:
        return tl.load(row + places, mask=places < end, other=MINUS_INFINITY).to(tl.float32)
    else:
        return tl.load(row + places).to(tl.float32)


@triton.jit
def _split_columns(z):
    evens, odds = _halves(z)
    c0, c2 = _halves(evens)
    c1, c3 = _halves(odds)
    if z.shape[1] == 4:
        return c0, c1, c2, c3
    else:
        c0, c4 = _halves(c0)
        c1, c5 = _halves(c1)
        c2, c6 = _halves(c2)
        c3, c7 = _halves(c3)
        return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def _halves(z):
    """Returns the even columns and the odd columns."""
    return tl.split(tl.reshape(z, [z.shape[0], z.shape[1] // 2, 2]))
