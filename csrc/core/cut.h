// The results of two steps in a segment: the search for the k-th largest key, and writing the mask. A CPU counts with
// int64_t. A GPU counts with 32 bits, since its segments have fewer than 2^31 keys.
#pragma once

#include <cstdint>

namespace d3s {

// Decides which keys of a segment are kept: all keys above `key`, and either all keys that equal `key` (the ties), or
// only the first `ties` of these equal keys.
template <class Count>
struct CutOf {
  uint32_t key;
  Count ties;
  bool all_ties;
};

// The result of writing a mask.
template <class Count>
struct KeptOf {
  Count zeros;      // how many of the k largest keys are dropped because their score is 0
  uint32_t lowest;  // the lowest key that is kept; UINT32_MAX if none is
};

}  // namespace d3s
