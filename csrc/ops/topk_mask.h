// Top-K selection, implemented in cpu/ and cuda/. ops/topk_mask.cpp has checked the arguments. Nothing here depends on
// torch.
#pragma once

#include <cstdint>

#include "../core/order_key.h"
#include "../core/quota.h"
#include "../core/segments.h"
#include "device.h"

namespace d3s {

// The scores to select from. A score is either a given value or, for a token with advantage A and entropy H, |A| * H.
// |A| * H is computed while the keys are made, and is never stored.
struct Scores {
  enum class Advantages { kNone, kOne, kPerSequence, kPerToken };

  const void* values = nullptr;    // one value for each position: a score, or an entropy
  const uint32_t* keys = nullptr;  // if set, the order keys exist already and `values` is not read
  FloatType type = FloatType::kFloat32;
  Advantages kind = Advantages::kNone;
  const float* advantages = nullptr;
  Segments sequences;  // used if there is one advantage for each sequence
  const bool* mask = nullptr;
};

struct SelectionOutputs {
  bool* mask = nullptr;
  int32_t* count = nullptr;    // the number of kept values in each segment; may be null
  float* threshold = nullptr;  // the lowest kept score in each segment, +inf if none is kept; may be null
};

// Selects the top values of each segment. `values` is the total number of values. `longest`, a bound on the length of a
// segment, is only a hint, and may be wrong.
void select_top(const Scores& scores, const Quota& quota, const Segments& segments, int64_t values, int64_t longest,
                const SelectionOutputs& outputs, Device& device);

}  // namespace d3s
