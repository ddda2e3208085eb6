// Top-K selection as each back-end implements it: cpu/topk_mask.cpp, cuda/topk_mask.cu. Arguments come checked, from
// ops/topk_mask.cpp. Nothing here knows torch.
#pragma once

#include <cstdint>

#include "../core/order_key.h"
#include "../core/quota.h"
#include "../core/segments.h"
#include "device.h"
#include "keep.h"

namespace d3s {

// Plain scores, or |A| * H of every token: computed as keys are made, never stored.
struct Scores {
  enum class Advantages { kNone, kOne, kPerSequence, kPerToken };

  const void* values = nullptr;    // one for each position: scores, or entropies
  const uint32_t* keys = nullptr;  // instead: the order keys themselves, which came with the entropies
  FloatType type = FloatType::kFloat32;
  Advantages kind = Advantages::kNone;
  const float* advantages = nullptr;
  Segments sequences;  // what an advantage per sequence belongs to
  const bool* mask = nullptr;
};

// How many to keep: a number, or a share of what is there.
struct Quota {
  bool is_number = false;
  Keep number;
  double ratio = 0;
  double slack = kDoubleSlack;
  const float* ratio32 = nullptr;  // a ratio that is on the device
  const double* ratio64 = nullptr;

  // A ratio on the device that was not checked and is not good keeps nothing.
  D3S_HOST_DEVICE int64_t of(int64_t present) const {
    if (is_number) {
      const int64_t wanted = number.of(present);
      return wanted < present ? wanted : present;
    }
    const double share = ratio32 ? *ratio32 : ratio64 ? *ratio64 : ratio;
    return share > 0 && share <= 1 && present > 0 ? keep_from_ratio(share, present, slack) : 0;
  }
};

struct SelectionOutputs {
  bool* mask = nullptr;
  int32_t* count = nullptr;    // of each segment, or null
  float* threshold = nullptr;  // likewise: the lowest kept score, +inf where none is kept
};

// `longest` bounds a segment's length as far as is known, else it is the number of all values; it is a hint.
D3S_KERNEL(void select_top(const Scores& scores, const Quota& quota, bool drop_zeros, const Segments& segments,
                           int64_t values, int64_t longest, const SelectionOutputs& outputs, Device& device))

}  // namespace d3s
