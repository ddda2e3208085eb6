// Sorts the values of long segments by their keys, and the places of kept tokens by their tokens.
#pragma once

#include <cstdint>

#include "../ops/device.h"

namespace d3s {

struct SortedEntries {
  const uint64_t* entries;
  const uint32_t* indices;
};

// Sorts `n` entries by their lowest `bits` bits; the higher bits are 0. The sort is stable. On entry, `indices` is 0,
// 1, ... The sort may overwrite all four arrays, and returns the two arrays that have the result.
SortedEntries sort_entries(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                           int64_t n, int bits, Device& device);

// Does the same with CUB, for any number of entries.
SortedEntries sort_by_cub(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                          int64_t n, int bits, Device& device);

}  // namespace d3s
