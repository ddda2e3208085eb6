// The kernels of importance_ratio, entropy_groups and adaptive_clip, implemented in cpu/ and cuda/. ops/ratios.cpp has
// checked the arguments. Nothing here depends on torch.
#pragma once

#include <cstdint>

#include "../core/exact_sum.h"
#include "../core/ratio.h"
#include "../core/segments.h"
#include "device.h"

namespace d3s {

constexpr int kMostGroups = 16;  // the maximum number of groups in a sequence

// Tells which tokens share a mean: either all tokens of a sequence, or the tokens of one group of the sequence.
struct TokenGroups {
  // Two special values instead of a token's group: kNone means that the token is in no group, and kBad means that its
  // id is too large (ids on a GPU may be unchecked).
  static constexpr int kNone = -1, kBad = kMostGroups;

  Segments sequences;
  int64_t tokens = 0;
  const bool* mask = nullptr;
  const int8_t* ids = nullptr;  // each token's group; below 0: in no group; if null, each sequence is one group
  int each = 1;                 // the maximum number of groups in a sequence
};

// The exponent of a ratio: the token's log-ratio, the mean log-ratio of its group, or the sum of both.
enum class RatioForm { kToken, kMean, kMeanAndToken };

constexpr float kNoClip = 0.f;  // the clip range of tokens that are masked out or in no group

void importance_ratios(const float* logprob, const float* old_logprob, const TokenGroups& groups, RatioForm form,
                       const LogBounds& bounds, float* out, Device& device);

struct RatioGradient {
  const float* grad;
  const float* ratio;
  TokenGroups groups;
  RatioLimits limits;
};

void importance_ratio_gradients(const RatioGradient& gradient, float* out, Device& device);

// For each token, writes `scale` times the mean of `values` over the token's group.
void scaled_group_means(const float* values, const TokenGroups& groups, float scale, float* out, Device& device);

// above[quantile][token] tells whether the token's entropy is above the quantile.
struct QuantileMasks {
  const float* entropy;
  const bool* mask;
  const bool* above;
  int64_t tokens;
  int quantiles;

  D3S_HOST_DEVICE bool has(int64_t i) const { return (!mask || mask[i]) && entropy[i] == entropy[i]; }
};

// Writes the group of each token: the number of quantiles below the token's entropy, or -1 if the token is masked out
// or its entropy is NaN.
void group_by_quantiles(const QuantileMasks& masks, int8_t* out, Device& device);

}  // namespace d3s
