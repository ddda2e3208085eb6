// An importance ratio is e^x, where x is the log-ratio clamped to two bounds. Between the bounds, the derivative of the
// ratio with respect to the log-ratio is the ratio itself. At or beyond a bound, the derivative is 0.
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

// Returns the ratios at the two bounds. If the low bound is infinite, returns -1 instead of the ratio; if the high
// bound is infinite, returns NaN instead. No ratio is <= -1 or >= NaN, so an infinite bound never sets a gradient to 0,
// even if the ratio is 0 or infinite.
D3S_HOST_DEVICE RatioLimits limits_of(const LogBounds& bounds) {
  return {bounds.low == -INFINITY ? -1.f : exponential(bounds.low),
          bounds.high == INFINITY ? NAN : exponential(bounds.high)};
}

// Returns the gradient with respect to the log-ratio. If `grad` is 0, the gradient is 0, even if the ratio is infinite
// (0 * inf would be NaN).
D3S_HOST_DEVICE float ratio_gradient(float grad, float ratio, const RatioLimits& limits) {
  const bool limited = ratio <= limits.lowest || ratio >= limits.highest;
  return limited ? 0.f : grad == 0.f ? grad : grad * ratio;
}

}  // namespace
}  // namespace d3s
