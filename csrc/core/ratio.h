// An importance ratio is e^x, where x is the log-ratio clamped to two bounds. The derivative of the ratio with respect
// to the log-ratio is the ratio itself between the bounds, and 0 at or beyond a bound.
#pragma once

#include <cmath>

#include "exponential.h"
#include "macros.h"

namespace d3s {

struct LogBounds {
  float low, high;
};

struct RatioLimits {
  float lowest, highest;
};

namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

constexpr float kNoRatio = 1.f;  // the ratio of tokens that are masked out or in no group

D3S_HOST_DEVICE float bounded_ratio(float x, const LogBounds& bounds) {
  return exponential(x < bounds.low ? bounds.low : x > bounds.high ? bounds.high : x);  // NaN stays NaN
}

// Returns the ratios at the bounds, but -1 or NaN for an infinite bound. No ratio is <= -1 or >= NaN, so an infinite
// bound sets no gradient to 0, even where the ratio is 0 or infinite.
D3S_HOST_DEVICE RatioLimits limits_of(const LogBounds& bounds) {
  return {bounds.low == -INFINITY ? -1.f : exponential(bounds.low),
          bounds.high == INFINITY ? NAN : exponential(bounds.high)};
}

// Returns the gradient of the log-ratio. It is 0 if `grad` is 0, even for an infinite ratio (0 * inf is NaN).
D3S_HOST_DEVICE float ratio_gradient(float grad, float ratio, const RatioLimits& limits) {
  const bool limited = ratio <= limits.lowest || ratio >= limits.highest;
  return limited ? 0.f : grad == 0.f ? grad : grad * ratio;
}

}  // namespace
}  // namespace d3s
