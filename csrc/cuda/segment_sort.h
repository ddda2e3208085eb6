// Sorts entries of 64 bits: the values of long segments by their keys, or the places of support logits by their ids.
#pragma once

#include <cstdint>

#include "../ops/device.h"

namespace d3s {

struct SortedEntries {
  const uint64_t* entries;
  const uint32_t* indices;
};

// Sorts `n` entries by their lowest `bits` bits, and moves the indices with the entries. The higher bits of the entries
// must be 0, and `indices` must be 0, 1, ... The sort is stable. The function may overwrite all four arrays, and
// returns the two arrays that contain the result.
SortedEntries sort_entries(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                           int64_t n, int bits, Device& device);

// Does the same as sort_entries(), but always with CUB.
SortedEntries sort_by_cub(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                          int64_t n, int bits, Device& device);

}  // namespace d3s
