// Loops over the tokens of one sequence, one table of them for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/exact_sum.h"
#include "../core/ratio.h"
#include "simd_level.h"

namespace d3s {

// Some tokens: which of them count, and their groups. Both `mask` and `ids` may be null.
struct TokenStretch {
  const bool* mask;
  const int8_t* ids;
  int64_t n;  // below 2^31
};

struct RatioLoops {
  // Adds the terms a[i] - b[i], or a[i] where b is null, of the tokens of each group to sums[group].
  void (*sum)(const float* a, const float* b, const TokenStretch& tokens, int groups, ExactSum* sums);
  // out[i] = numbers[group] for the tokens of each group, `none` for those of no group.
  void (*assign)(const TokenStretch& tokens, int groups, const float* numbers, float none, float* out);
  // out[i] = e^(a[i] - b[i]) within the bounds, or e^(means[i] + a[i] - b[i]) if `means` is not null; kNoRatio for
  // tokens that do not count. `means` may be `out`.
  void (*exponentiate)(const float* a, const float* b, const TokenStretch& tokens, const float* means,
                       const LogBounds& bounds, float* out);
  // out[i] = the gradient of a log-ratio, 0 for tokens that do not count.
  void (*gradients)(const float* grad, const float* ratio, const TokenStretch& tokens, const RatioLimits& limits,
                    float* out);
};

D3S_DECLARE_VARIANTS(RatioLoops, ratio_loops)

}  // namespace d3s
