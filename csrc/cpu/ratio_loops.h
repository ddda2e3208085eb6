// Loops over the tokens of one sequence. There is one table of these loops for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/exact_sum.h"
#include "../core/ratio.h"

namespace d3s {

// The mask and group ids of n neighbouring tokens. `mask` and `ids` may be null. A token is present if it is unmasked
// and, if there are ids, in a group.
struct TokenStretch {
  const bool* mask;
  const int8_t* ids;
  int64_t n;  // below 2^31
};

struct RatioLoops {
  // For each present token i, adds a[i] - b[i] to sums[group of i]. If b is null, adds a[i].
  void (*sum)(const float* a, const float* b, const TokenStretch& tokens, int groups, ExactSum* sums);
  // out[i] = numbers[group of i] if token i is present, else `none`.
  void (*assign)(const TokenStretch& tokens, int groups, const float* numbers, float none, float* out);
  // out[i] = e^(a[i] - b[i]), or e^(means[i] + a[i] - b[i]) if `means` is not null. The exponent is clamped to the
  // bounds. For a token that is not present, out[i] = kNoRatio. `means` and `out` may be the same array.
  void (*exponentiate)(const float* a, const float* b, const TokenStretch& tokens, const float* means,
                       const LogBounds& bounds, float* out);
  // out[i] = the gradient of the log-ratio of token i, or 0 if the token is not present.
  void (*gradients)(const float* grad, const float* ratio, const TokenStretch& tokens, const RatioLimits& limits,
                    float* out);
};

const RatioLoops& ratio_loops();  // returns the table for simd_level()

}  // namespace d3s
