// Where a segment's keys are cut: the result of a search for the k-th largest key, and of writing the mask after it.
// The CPU counts with int64_t. A GPU counts the keys of a segment, of which it has fewer than 2^31, with 32 bits.
#pragma once

#include <cstdint>

namespace d3s {

// Decides which keys of a segment are kept: all keys above `key`, and either all keys that equal it (the ties), or the
// first `ties` of them.
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
