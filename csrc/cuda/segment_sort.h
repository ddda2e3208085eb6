// Sorts values of long segments: the one place where a library works for us.
#pragma once

#include <cstdint>

#include "../ops/device.h"

namespace d3s {

// Sorts `n` entries and their indices by the lowest `bits` of the entry, equal ones in their order. May use all four
// arrays as it likes; returns where the result is.
struct SortedEntries {
  const uint64_t* entries;
  const uint32_t* indices;
};
SortedEntries sort_entries(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                           int64_t n, int bits, Device& device);

}  // namespace d3s
