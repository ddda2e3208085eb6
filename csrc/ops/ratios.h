// importance_ratio, entropy_groups and adaptive_clip, as each back-end implements them: cpu/ratios.cpp, cuda/ratios.cu.
// Arguments come checked, from ops/ratios.cpp. Nothing here knows torch.
#pragma once

#include <cstdint>

#include "../core/exact_sum.h"
#include "../core/ratio.h"
#include "../core/segments.h"
#include "device.h"

namespace d3s {

constexpr int kMostGroups = 16;  // in a sequence

// Which tokens share a mean: all tokens of a sequence, or those of one group in it.
struct TokenGroups {
  // In place of a token's group: kNone if it is in no group, kBad if its id is too large (ids on a GPU may be
  // unchecked).
  static constexpr int kNone = -1, kBad = kMostGroups;

  Segments sequences;
  int64_t tokens = 0;
  const bool* mask = nullptr;
  const int8_t* ids = nullptr;  // below 0: in no group; null: a sequence is one group
  int each = 1;                 // groups of a sequence, at most
};

// The exponent of a ratio: the token's log-ratio, the mean log-ratio of its group, or the sum of both.
enum class RatioForm { kToken, kMean, kMeanAndToken };

constexpr float kNoClip = 0.f;  // the clip range of tokens in no group

void importance_ratios(const float* logprob, const float* old_logprob, const TokenGroups& groups, RatioForm form,
                       const LogBounds& bounds, float* out, Device& device);

struct RatioGradient {
  const float* grad;
  const float* ratio;
  TokenGroups groups;
  RatioLimits limits;
};

void importance_ratio_gradients(const RatioGradient& gradient, float* out, Device& device);

// Writes for each token `scale` times the mean of its group.
void scaled_group_means(const float* values, const TokenGroups& groups, float scale, float* out, Device& device);

// Which tokens are above each quantile: `above` is [quantiles][tokens].
struct QuantileMasks {
  const float* entropy;
  const bool* mask;
  const bool* above;
  int64_t tokens;
  int quantiles;

  D3S_HOST_DEVICE bool has(int64_t i) const { return (!mask || mask[i]) && entropy[i] == entropy[i]; }
};

// The group of a token is the number of quantiles below it; -1 if the token is masked out or its entropy is NaN.
void group_by_quantiles(const QuantileMasks& masks, int8_t* out, Device& device);

}  // namespace d3s
