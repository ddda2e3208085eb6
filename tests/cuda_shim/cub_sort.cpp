// Does with the standard library what csrc/cuda/cub_sort.cu does with CUB.
#include "cuda/segment_sort.h"

#include <algorithm>
#include <numeric>

namespace d3s {

SortedEntries sort_by_cub(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                          int64_t n, int bits, Device&) {
  const uint64_t used = bits < 64 ? (uint64_t{1} << bits) - 1 : ~uint64_t{0};
  std::iota(indices_spare, indices_spare + n, 0u);
  std::stable_sort(indices_spare, indices_spare + n,
                   [&](uint32_t a, uint32_t b) { return (entries[a] & used) < (entries[b] & used); });
  for (int64_t i = 0; i < n; ++i) entries_spare[i] = entries[indices_spare[i]];
  for (int64_t i = 0; i < n; ++i) indices_spare[i] = indices[indices_spare[i]];
  return {entries_spare, indices_spare};
}

}  // namespace d3s
