// Top-K selection, implemented in cpu/ and cuda/. ops/topk_mask.cpp has checked the arguments. Nothing here depends on
// torch.
#pragma once

#include <cstdint>

#include "../core/order_key.h"
#include "../core/quota.h"
#include "../core/segments.h"
#include "device.h"
#include "keep.h"

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

// How many values to keep: a fixed number, or a share of the values that are present.
struct Quota {
  bool is_number = false;
  Keep number;
  double ratio = 0;
  double slack = kDoubleSlack;
  bool drop_zeros = false;         // if true, zeros among the values to keep are dropped
  const float* ratio32 = nullptr;  // if set, kernels read the ratio here, on the device
  const double* ratio64 = nullptr;

  D3S_HOST_DEVICE double value() const { return ratio32 ? *ratio32 : ratio64 ? *ratio64 : ratio; }

  // Returns how many of `present` values are kept. A ratio on the device may be unchecked: if it is not in (0, 1],
  // nothing is kept.
  D3S_HOST_DEVICE int64_t of(int64_t present) const {
    if (is_number) {
      const int64_t wanted = number.of(present);
      return wanted < present ? wanted : present;
    }
    const double share = value();
    return share > 0 && share <= 1 && present > 0 ? keep_from_ratio(share, present, slack) : 0;
  }
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
