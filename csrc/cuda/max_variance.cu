// max_variance_select: selects from each segment the k values that together have the largest variance. The kernels sort
// the values, try every split (the first i and the last k - i values), and mark the values of the best split.
//
// If the host knows a bound on the lengths, the bound decides how segments are sorted. Up to 128 values, some lanes of
// a warp sort each segment in registers. Up to 4,096 values, a block sorts each segment in shared memory. Each of these
// two ways takes a single launch. Beyond 4,096 values, all segments are sorted together (segment_sort.h), and then
// blocks try the splits (max_variance_stretches.h). Without a bound, warps handle segments of up to 128 values, and
// blocks handle longer segments.
//
//   launch                          kernel              reads               -> writes
//   max_variance_select (groups)    select_groups       values, mask        -> out
//   max_variance_select             select_segments     values, mask        -> out (beyond 128 values)
//   max_variance_select (keys)      make_entries        values, mask        -> entries, indices
//   sort (its own launches)         sort_entries        entries, indices    -> sorted
//   max_variance_select (sums)      sum_stretches       sorted              -> sums, ends[].usable
//   max_variance_select (splits)    find_sorted_ends    sorted, sums        -> spreads, best, ends
//   max_variance_select (mask)      write_sorted_mask   sorted, ends        -> out
#include "../ops/rollouts.h"
#include "max_variance_memory.h"
#include "max_variance_stretches.h"
#include "max_variance_warp.h"
#include "note_faults.h"
#include "segment_sort.h"
#include "size_class.h"

namespace d3s {
namespace {

// ---- in shared memory --------------------------------------------------------------------------------------------

constexpr int kBlockThreads = 512;  // each has 8 of 4,096 entries; more threads would have too few registers

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    select_segments(const T* values, const bool* mask, const __grid_constant__ Segments segments,
                    const __grid_constant__ Keep keep, const __grid_constant__ SizeClass sizes, Entry* spill, bool* out,
                    const __grid_constant__ Faults faults) {
  note_keep(keep, faults);
  note_offsets(segments, faults);
  auto* shared = dynamic_shared<unsigned char>();
  const SplitBlock block(shared);
  const int64_t begin = segments.begin(blockIdx.x), n = segments.end(blockIdx.x) - begin;
  if (!sizes.has(n)) return;
  const auto select = [&](Entry* entries) {
    select_segment(values + begin, mask ? mask + begin : nullptr, static_cast<int>(n), keep.of(n), entries, block,
                   out + begin);
  };
  // There are two calls, so that the compiler knows that the first call's entries are in shared memory.
  if (n <= sizes.holds)
    select(reinterpret_cast<Entry*>(shared + SplitBlock::kSharedBytes));
  else
    select(spill + begin);
}

// ---- in registers ------------------------------------------------------------------------------------------------

constexpr int kGroupThreads = 4 * kWarp;

// Handles those groups of a warp that are longer than the caller declared, one group after the other.
template <class T>
__device__ void select_longer(const T* values, const bool* mask, int64_t begin, int64_t n, int64_t k, int lanes,
                              int64_t holds, Entry* spill, bool* out) {
#pragma unroll 1
  for (int lane = 0; lane < kWarp; lane += lanes) {
    const int64_t from = __shfl_sync(kAllLanes, begin, lane), length = __shfl_sync(kAllLanes, n, lane);
    const int64_t number = __shfl_sync(kAllLanes, k, lane);
    if (length > holds)
      select_segment(values + from, mask ? mask + from : nullptr, static_cast<int>(length), number, spill + from,
                     WarpGroup(nullptr), out + from);
  }
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kGroupThreads, 1)
    select_groups(const T* values, const bool* mask, const __grid_constant__ Segments segments,
                  const __grid_constant__ Keep keep, const __grid_constant__ SizeClass sizes, Entry* spill, bool* out,
                  const __grid_constant__ Faults faults) {
  note_keep(keep, faults);
  note_offsets(segments, faults);
  const Lanes<kLanes> lanes;
  const int64_t group = (int64_t{blockIdx.x} * kGroupThreads + threadIdx.x) / kLanes;
  const int64_t read = min(group, segments.count - 1), begin = segments.begin(read);
  int64_t length = segments.end(read) - begin;
  // A lane without a group also takes part in the shuffles, but has no usable values.
  if (group >= segments.count || !sizes.has(length)) length = 0;
  const int64_t k = keep.of(length);
  const int n = length <= lanes.kCapacity ? static_cast<int>(length) : 0;
  T value[kPerLane] = {};
  bool wanted[kPerLane], marks[kPerLane];
  uint32_t keys[kPerLane];
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) {
    const int index = lanes.rank + r * kLanes;
    wanted[r] = index < n;
    if (wanted[r]) value[r] = values[begin + index];
  }
  if (mask) {
#pragma unroll
    for (int r = 0; r < kPerLane; ++r)
      if (wanted[r]) wanted[r] = mask[begin + lanes.rank + r * kLanes];
  }
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) keys[r] = usable_key(to_float(value[r]), wanted[r]);
  lanes.select(keys, k, marks);
#pragma unroll
  for (int r = 0; r < kPerLane; ++r) {
    const int index = lanes.rank + r * kLanes;
    if (index < n) out[begin + index] = marks[r];
  }
  if (spill && __any_sync(kAllLanes, length > lanes.kCapacity))
    select_longer(values, mask, begin, length, k, kLanes, lanes.kCapacity, spill, out);
}

// ---- long segments -----------------------------------------------------------------------------------------------

// Writes the index and the entry of each value. The entry has the segment in its high bits, and the value's key in its
// low bits. If there is only one segment, CUB sorts by the key's bits only, in as many launches as for 32-bit keys.
// This kernel also sets `finished` to 0, which saves a launch.
template <class T>
__global__ void make_entries(const T* values, const bool* mask, int64_t n, const __grid_constant__ Segments segments,
                             uint64_t* entries, uint32_t* indices, uint32_t* finished) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t s = i; s < segments.count; s += int64_t{gridDim.x} * blockDim.x) finished[s] = 0;
  if (i >= n) return;
  entries[i] = static_cast<uint64_t>(segments.find(i)) << 32 | usable_key(values, mask, i);
  indices[i] = static_cast<uint32_t>(i);
}

__global__ void write_sorted_mask(SortedEntries sorted, int64_t n, const __grid_constant__ Segments segments,
                                  const Ends* ends, bool* out) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int64_t segment = static_cast<int64_t>(sorted.entries[i] >> 32);
  out[sorted.indices[i]] = ends[segment].keeps(static_cast<int>(i - segments.begin(segment)));
}

template <class T>
void select_sorted(const SegmentedValues& values, const Keep& keep, bool* out, Device& device) {
  const Segments& segments = values.segments;
  const int64_t n = values.total;
  constexpr int kThreads = 256;
  auto* entries = device.scratch_of<uint64_t>(2 * n);
  auto* indices = device.scratch_of<uint32_t>(2 * n);
  auto* ends = device.scratch_of<Ends>(segments.count);
  auto* finished = device.scratch_of<uint32_t>(segments.count);
  launch("max_variance_select (keys)", make_entries<T>, ceil_div(n, kThreads), kThreads, 0, device,
         static_cast<const T*>(values.values), values.mask, n, segments, entries, indices, finished);
  int bits = 32;
  while (segments.count > int64_t{1} << (bits - 32)) ++bits;
  const SortedEntries sorted = sort_entries(entries, entries + n, indices, indices + n, n, bits, device);
  auto* unused = sorted.entries == entries ? entries + n : entries;  // free after the sort; will hold the spreads
  static_assert(sizeof *unused == sizeof(double));
  const int64_t blocks = segments.count + ceil_div(n, kRound);
  const SortedSegments all = {sorted,
                              segments,
                              keep,
                              ends,
                              finished,
                              device.scratch_of<SplitSums>(blocks),
                              device.scratch_of<double>(blocks),
                              reinterpret_cast<double*>(unused)};
  launch("max_variance_select (sums)", sum_stretches, blocks, kStretchThreads, SplitBlock::kSharedBytes, device, all,
         device.faults);
  launch("max_variance_select (splits)", find_sorted_ends, blocks, kStretchThreads, SplitBlock::kSharedBytes, device,
         all);
  launch("max_variance_select (mask)", write_sorted_mask, ceil_div(n, kThreads), kThreads, 0, device, sorted, n,
         segments, static_cast<const Ends*>(ends), out);
}

// ---- which kernels, and how many threads -------------------------------------------------------------------------

constexpr int64_t kWarpSegment = 32 * kPerLane;
// The longest segment that a block sorts. Its 32 KB of entries fit in the default amount of shared memory. For 16,384
// entries, a block would need 105 steps of some 2,000 cycles each. A sort by many blocks takes much less time.
constexpr int64_t kBlockSegment = 4096;

int threads_for(int64_t length) { return length <= 512 ? 128 : length <= 1024 ? 256 : kBlockThreads; }

// Calls `body` with the smallest number of lanes that can hold `length` values.
template <int kLanes = 2, class Body>
void with_lanes_for(int64_t length, const Body& body) {
  if constexpr (kLanes < kWarp) {
    if (length > kLanes * kPerLane) return with_lanes_for<2 * kLanes>(length, body);
  }
  body(std::integral_constant<int, kLanes>());
}

}  // namespace

void max_variance_mask(const SegmentedValues& values, const Keep& keep, bool* out, Device& device) {
  const Segments& segments = values.segments;
  const int64_t n = values.total, longest = values.longest;
  if (n > int64_t{1} << 30)
    throw std::invalid_argument("values: got " + std::to_string(n) + " of them; takes at most 2^30 on a GPU");
  if (segments.ragged()) clear(out, 0, n, device);  // values that bad offsets leave out are not selected
  if (segments.count == 0) return;
  const bool known = lengths_are_bounded(segments, longest, n);
  dispatch_float(values.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (longest > kBlockSegment && known) {
      select_sorted<T>(values, keep, out, device);
      return;
    }
    // A segment that is longer than the caller declared, or that does not fit in shared memory, is sorted in global
    // memory. This is slower, but correct.
    const bool may_spill = segments.ragged() && (longest < n || n > kBlockSegment);
    Entry* spill = may_spill ? device.scratch_of<Entry>(n) : nullptr;
    const auto run = [&](const char* name, auto kernel, int64_t blocks, int threads, size_t shared_bytes,
                         const SizeClass& sizes) {
      launch(name, kernel, blocks, threads, shared_bytes, device, static_cast<const T*>(values.values), values.mask,
             segments, keep, sizes, spill, out, device.faults);
    };
    const bool small_only = known && longest <= kWarpSegment;
    if (small_only || !known)
      with_lanes_for(longest, [&](auto lanes) {
        const int64_t per_block = kGroupThreads / lanes(), holds = lanes() * kPerLane;
        run("max_variance_select (groups)", select_groups<T, lanes()>, ceil_div(segments.count, per_block),
            kGroupThreads, 0, {0, small_only ? INT64_MAX : kWarpSegment, holds});
      });
    if (longest > kWarpSegment) {
      const int64_t in_block = longest < kBlockSegment ? longest : kBlockSegment;
      run("max_variance_select", select_segments<T>, segments.count, threads_for(in_block),
          SplitBlock::kSharedBytes + in_block * sizeof(Entry), {known ? 0 : kWarpSegment + 1, INT64_MAX, in_block});
    }
  });
}

}  // namespace d3s
