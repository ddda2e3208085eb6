// Top-K selection in steps, for segments that are spread over several ranks. Between the steps, the ranks add up their
// counts. cpu/ and cuda/ implement the steps. ops/topk_steps.cpp has checked the arguments. Nothing here depends on
// torch.
#pragma once

#include "../core/key_search.h"
#include "topk_mask.h"

namespace d3s {

struct SegmentedKeys {
  const uint32_t* keys = nullptr;
  int64_t total = 0;
  Segments segments;
};

void make_order_keys(const Scores& scores, int64_t total, uint32_t* keys, Device& device);

// counts[segment][bin] = the number of keys in the segment that start with the digits found so far, and whose next
// digit, `digit`, has the value `bin`.
void count_digit(const SegmentedKeys& keys, const KeySearch* searches, const Digit& digit, int64_t* counts,
                 Device& device);

// Finds the next digit of each search, from the counts added up over all ranks. At the first digit, also computes from
// the quota how many keys to keep.
void choose_digit(KeySearch* searches, int64_t segments, const int64_t* counts, const Digit& digit, const Quota& quota,
                  Device& device);

struct KeyMaskOutputs {
  bool* mask = nullptr;
  int64_t* zeros = nullptr;   // for each segment: how many of the k largest keys are dropped because their score is 0
  int64_t* lowest = nullptr;  // for each segment: the lowest key that is kept, UINT32_MAX if none is kept
};

// In each segment, keeps all keys above the k-th largest key, and the first ties[segment] of the keys that equal the
// k-th largest key.
void mask_from_key(const SegmentedKeys& keys, const KeySearch* searches, const int64_t* ties, const Quota& quota,
                   const KeyMaskOutputs& outputs, Device& device);

}  // namespace d3s
