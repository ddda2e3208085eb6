// An importance ratio is e^x, where the log-ratio x is clamped first. Its derivative by x is the ratio itself between
// the bounds, and 0 at a bound or beyond it.
#pragma once

#include <cmath>

#include "exponential.h"
#include "macros.h"

namespace d3s {

struct LogBounds {
  float low, high;
};

// The ratios at the bounds.
struct RatioLimits {
  float lowest, highest;
};

namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge them

constexpr float kNoRatio = 1.f;  // of tokens that do not count

D3S_HOST_DEVICE float bounded_ratio(float x, const LogBounds& bounds) {
  return exponential(x < bounds.low ? bounds.low : x > bounds.high ? bounds.high : x);  // NaN stays
}

// With an infinite bound no gradient is set to 0, not even of a ratio of 0 or infinity: no ratio is <= -1 or >= NaN.
D3S_HOST_DEVICE RatioLimits limits_of(const LogBounds& bounds) {
  return {bounds.low == -INFINITY ? -1.f : exponential(bounds.low),
          bounds.high == INFINITY ? NAN : exponential(bounds.high)};
}

// A gradient of 0 stays 0, whatever the ratio is: 0 * inf would be NaN.
D3S_HOST_DEVICE float ratio_gradient(float grad, float ratio, const RatioLimits& limits) {
  const bool limited = ratio <= limits.lowest || ratio >= limits.highest;
  return limited ? 0.f : grad == 0.f ? grad : grad * ratio;
}

}  // namespace
}  // namespace d3s
