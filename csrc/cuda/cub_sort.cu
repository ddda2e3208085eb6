// CUB's radix sort, which is stable. It takes several launches, but no host sync. The sort has its own file, since
// compiling it takes longer than compiling all our kernels.
#include "segment_sort.h"

#include <cub/device/device_radix_sort.cuh>

#include "cuda.h"

namespace d3s {

SortedEntries sort_by_cub(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                          int64_t n, int bits, Device& device) {
  cub::DoubleBuffer<uint64_t> keys(entries, entries_spare);
  cub::DoubleBuffer<uint32_t> values(indices, indices_spare);
  const auto stream = static_cast<cudaStream_t>(device.stream);
  const auto sort = [&](void* room, size_t& bytes) {
    require_success(cub::DeviceRadixSort::SortPairs(room, bytes, keys, values, n, 0, bits, stream), "sort");
  };
  require_success(cudaSetDevice(device.index), "cudaSetDevice");
  size_t bytes = 0;
  sort(nullptr, bytes);
  sort(device.scratch(static_cast<int64_t>(bytes)), bytes);
  return {keys.Current(), values.Current()};
}

}  // namespace d3s
