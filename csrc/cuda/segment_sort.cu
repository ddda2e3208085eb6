// Sorts entries. The kernels of this file sort up to 65,536 entries, in at most three launches. More entries are sorted
// by CUB, which takes twelve launches.
//
//   launch         kernel        reads      -> writes
//   sort (runs)    sort_runs     entries    -> runs: each block sorts 256 entries
//   sort (merge)   merge_runs    runs       -> longer runs; finally the sorted entries and their indices
#include "segment_sort.h"

#include <utility>

#include "bitonic_sort.h"

namespace d3s {
namespace {

// During the sort, an entry has its index in the low bits. So no two entries are equal, and the sort is stable.
constexpr int kIndexBits = 16;
constexpr int64_t kMostOwnEntries = int64_t{1} << kIndexBits;
constexpr int kRun = 256;    // entries in a run, and threads of the block that sorts them
constexpr int kMerged = 16;  // runs that are merged into one run; 256 runs need two launches
constexpr int kMergeThreads = 256;

// Sorts the 32 entries of a warp. Each lane has one entry.
__device__ __forceinline__ Entry warp_sorted(Entry own) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int run = 2; run <= kWarp; run *= 2)
#pragma unroll
    for (int stride = run / 2; stride > 0; stride /= 2) {  // every second run is sorted in descending order
      const Entry other = __shfl_xor_sync(kAllLanes, own, stride);
      const bool smaller = !(lane & run) == !(lane & stride);  // whether this lane keeps the smaller entry
      own = (other < own) == smaller ? other : own;
    }
  return own;
}

// Each warp sorts 32 entries. Then each thread finds, by binary searches, how many entries of each warp are smaller
// than its own entry. The sum of these numbers is the position of its own entry. The searches go step by step together.
// Past the end, entries have the largest possible value.
__global__ void __launch_bounds__(kRun) sort_runs(const uint64_t* entries, int n, Entry* runs) {
  Entry* of_warps = dynamic_shared<Entry>();
  const int begin = static_cast<int>(blockIdx.x) * kRun, rank = static_cast<int>(threadIdx.x), i = begin + rank;
  const Entry own = warp_sorted(i < n ? Entry{entries[i]} << kIndexBits | static_cast<Entry>(i) : ~Entry{0});
  of_warps[rank] = own;
  __syncthreads();
  int before[kRun / kWarp] = {};
#pragma unroll
  for (int left = kWarp; left > 0; left /= 2) {  // steps of 16, 8, 4, 2, 1 and 1 again
    const int step = left > 1 ? left / 2 : 1;
#pragma unroll
    for (int warp = 0; warp < kRun / kWarp; ++warp)
      if (of_warps[warp * kWarp + before[warp] + step - 1] < own) before[warp] += step;
  }
  int place = 0;
#pragma unroll
  for (const int of_warp : before) place += of_warp;
  if (place < min(kRun, n - begin)) runs[begin + place] = own;
}

// Each thread finds, by binary searches, how many entries of each run are smaller than its own entry. The sum of these
// numbers is the position of its own entry. The searches in kMerged runs go step by step together, so that kMerged
// loads are in flight. A thread needs 74 registers for this. nvcc uses this many registers only because the launch
// bounds ask for no more than three blocks.
template <bool kLast>
__global__ void __launch_bounds__(kMergeThreads, 3)
    merge_runs(const Entry* runs, int n, int length, Entry* merged, uint64_t* entries, uint32_t* indices) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  const Entry own = runs[i];
  const int first = i / (kMerged * length) * (kMerged * length);
  int at[kMerged];
#pragma unroll
  for (int r = 0; r < kMerged; ++r) at[r] = first + r * length;
  // The steps are length / 2, length / 4, ..., 1, and again 1. Their sum is `length`, which is a power of two.
#pragma unroll 1
  for (int left = length; left > 0; left /= 2) {
    const int step = left > 1 ? left / 2 : 1;
    Entry tried[kMerged];
#pragma unroll
    for (int r = 0; r < kMerged; ++r) tried[r] = runs[min(at[r] + step, n) - 1];
#pragma unroll
    for (int r = 0; r < kMerged; ++r)
      if (at[r] + step <= n && tried[r] < own) at[r] += step;
  }
  int place = first;
#pragma unroll
  for (int r = 0; r < kMerged; ++r) place += at[r] - (first + r * length);
  if (kLast) {
    entries[place] = own >> kIndexBits;
    indices[place] = static_cast<uint32_t>(own) & ((1u << kIndexBits) - 1);
  } else {
    merged[place] = own;
  }
}

}  // namespace

SortedEntries sort_entries(uint64_t* entries, uint64_t* entries_spare, uint32_t* indices, uint32_t* indices_spare,
                           int64_t n, int bits, Device& device) {
  if (n > kMostOwnEntries || bits > 64 - kIndexBits)
    return sort_by_cub(entries, entries_spare, indices, indices_spare, n, bits, device);
  static_assert(sizeof(Entry) == sizeof(uint64_t));
  auto *from = reinterpret_cast<Entry*>(entries_spare), *to = reinterpret_cast<Entry*>(entries);
  const int count = static_cast<int>(n);
  launch("sort (runs)", sort_runs, ceil_div(n, kRun), kRun, kRun * sizeof(Entry), device, entries, count, from);
  int length = kRun;
  for (; kMerged * length < count; length *= kMerged, std::swap(from, to))
    launch("sort (merge)", merge_runs<false>, ceil_div(n, kMergeThreads), kMergeThreads, 0, device, from, count, length,
           to, entries, indices);
  auto* sorted = reinterpret_cast<uint64_t*>(to);
  launch("sort (merge)", merge_runs<true>, ceil_div(n, kMergeThreads), kMergeThreads, 0, device, from, count, length,
         to, sorted, indices);
  return {sorted, indices};
}

}  // namespace d3s
