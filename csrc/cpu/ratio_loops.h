// Loops over the tokens of one sequence. There is one table of these loops for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/exact_sum.h"
#include "../core/ratio.h"

namespace d3s {

// The mask and group ids of n neighbouring tokens. Both may be null. A token is present if it is unmasked and, if there
// are ids, in a group.
struct TokenStretch {
  const bool* mask;
  const int8_t* ids;
  int64_t n;  // below 2^31
};

struct RatioLoops {
  // Adds the terms a[i] - b[i], or a[i] where b is null, of the tokens of each group to sums[group].
  void (*sum)(const float* a, const float* b, const TokenStretch& tokens, int groups, ExactSum* sums);
  // out[i] = numbers[group] for a token in a group, else `none`.
  void (*assign)(const TokenStretch& tokens, int groups, const float* numbers, float none, float* out);
  // out[i] = e^(a[i] - b[i]), or e^(means[i] + a[i] - b[i]) if `means` is not null, with the exponent clamped to the
  // bounds; kNoRatio for tokens that are not present. `means` may be `out`.
  void (*exponentiate)(const float* a, const float* b, const TokenStretch& tokens, const float* means,
                       const LogBounds& bounds, float* out);
  // out[i] = the gradient of a log-ratio; 0 for tokens that are not present.
  void (*gradients)(const float* grad, const float* ratio, const TokenStretch& tokens, const RatioLimits& limits,
                    float* out);
};

const RatioLoops& ratio_loops();  // those of simd_level()

}  // namespace d3s
