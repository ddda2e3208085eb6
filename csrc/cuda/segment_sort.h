// Sorts the values of long segments. It is the only kernel that comes from another library.
#pragma once

#include <cstdint>

#include "../ops/device.h"

namespace d3s {

// Sorts `n` entries and their indices by the lowest `bits` bits of the entry. The sort is stable. It may overwrite all
// four arrays, and returns the two arrays that have the result.
struct SortedEntries {
  const uint64_t* entries;
  const uint32_t* indices;
};
SortedEntries sort_entries(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                           int64_t n, int bits, Device& device);

}  // namespace d3s
