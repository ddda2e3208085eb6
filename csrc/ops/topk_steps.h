// Top-K selection in steps, for a segment that lies on several ranks: between the steps, counts are added up over them.
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
D3S_KERNEL(void make_order_keys(const Scores& scores, int64_t total, uint32_t* keys, Device& device))

// counts[segment][bin]: how many keys of a segment have this digit, among those that have the digits found before.
D3S_KERNEL(void count_digit(const SegmentedKeys& keys, const KeySearch* searches, const Digit& digit, int64_t* counts,
                            Device& device))

// One digit more, by the counts of all ranks. At the first digit the quota says how many are kept.
D3S_KERNEL(void choose_digit(KeySearch* searches, int64_t segments, const int64_t* counts, const Digit& digit,
                             const Quota& quota, Device& device))

struct KeyMaskOutputs {
  bool* mask = nullptr;
  int64_t* zeros = nullptr;   // of each segment: kept by their rank, then dropped for being 0
  int64_t* lowest = nullptr;  // likewise: the lowest key that is kept, UINT32_MAX where none is
};

// Keeps what is above the key that was found, and of what equals it the first `ties` of each segment.
D3S_KERNEL(void mask_from_key(const SegmentedKeys& keys, const KeySearch* searches, const int64_t* ties,
                              bool drop_zeros, const KeyMaskOutputs& outputs, Device& device))

}  // namespace d3s
