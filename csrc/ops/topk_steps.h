// Top-K selection in steps, for a segment that lies on several ranks: between the steps, the ranks add up their counts.
// cpu/topk_steps.cpp, cuda/topk_steps.cu. Arguments come checked, from ops/topk_steps.cpp. Nothing here knows torch.
#pragma once

#include "../core/key_search.h"
#include "topk_mask.h"

namespace d3s {

struct SegmentedKeys {
  const uint32_t* keys = nullptr;
  int64_t total = 0;
  Segments segments;
};

// The order keys of all scores.
void make_order_keys(const Scores& scores, int64_t total, uint32_t* keys, Device& device);

// counts[segment][bin]: how many keys of the segment start with the digits found so far and have `bin` as this digit.
void count_digit(const SegmentedKeys& keys, const KeySearch* searches, const Digit& digit, int64_t* counts,
                 Device& device);

// Finds one more digit from the counts of all ranks. At the first digit, the quota decides how many keys to keep.
void choose_digit(KeySearch* searches, int64_t segments, const int64_t* counts, const Digit& digit, const Quota& quota,
                  Device& device);

struct KeyMaskOutputs {
  bool* mask = nullptr;
  int64_t* zeros = nullptr;   // of each segment: how many of the top k are dropped because they are 0
  int64_t* lowest = nullptr;  // of each segment: the lowest key that is kept, UINT32_MAX if none is
};

// Keeps all keys above the k-th largest and, in each segment, the first `ties` keys that equal it.
void mask_from_key(const SegmentedKeys& keys, const KeySearch* searches, const int64_t* ties, bool drop_zeros,
                   const KeyMaskOutputs& outputs, Device& device);

}  // namespace d3s
