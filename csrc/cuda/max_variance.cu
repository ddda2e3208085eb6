// max_variance_select: of each segment the k values with the largest variance. Sort, try every split, mark both ends.
//
// A segment of up to 4,096 values takes one launch, in which a warp (small segments) or a block sorts it in shared
// memory. Longer segments of known length are sorted together, by CUB; then a block finds the split of each.
//
//   launch                          kernel              reads               -> writes
//   max_variance_select             select_segments     values, mask        -> out (small segments, then larger ones)
//   max_variance_select (keys)      make_entries        values, mask        -> entries, indices
//   sort (CUB's own launches)       sort_entries        entries, indices    -> sorted
//   max_variance_select (splits)    find_sorted_ends    sorted              -> ends
//   max_variance_select (mask)      write_sorted_mask   sorted, ends        -> out
#include <cfloat>

#include "../core/order_key.h"
#include "../core/split_scan.h"
#include "../ops/rollouts.h"
#include "collective.h"
#include "segment_sort.h"
#include "size_class.h"

namespace d3s {
namespace {

// One integer to sort by: a value's order key in the high bits, its index in the low ones, so that ties go to the lower
// index. Unusable values come last.
using Entry = unsigned long long;
constexpr uint32_t kUnusable = UINT32_MAX;

D3S_HOST_DEVICE Entry entry(uint32_t key, int64_t index) { return Entry{key} << 32 | static_cast<uint32_t>(index); }
D3S_HOST_DEVICE uint32_t key_of(Entry e) { return static_cast<uint32_t>(e >> 32); }

template <class T>
__device__ uint32_t usable_key(const T* values, const bool* mask, int64_t i) {
  const float value = to_float(values[i]);
  const bool finite = fabsf(value) <= FLT_MAX;
  return finite && (!mask || mask[i]) ? order_key(value) : kUnusable;
}

// ---- splits ------------------------------------------------------------------------------------------------------

// How many of the kept k come from the low end of n sorted keys, n > k > 1. `at(i)` is the i-th key.
//
// Split i has the first i and the last k - i keys; split i + 1 has key i in place of key n - k + i. So the moments of
// all splits are a running sum of such exchanges. Each thread tries a stretch of the splits.
template <class Keys, class Group>
__device__ int best_split(const Keys& at, int n, int k, const Group& group) {
  const double shift = order_key_value(at(n / 2)), count = k;
  const auto value = [&](int i) { return static_cast<double>(order_key_value(at(i))) - shift; };
  const auto exchange = [&](Moments& moments, int split) {
    const double in = value(split), out = value(n - k + split);
    moments.sum += in - out;
    moments.square += in * in - out * out;
  };
  const int each = k / group.size + 1, first = min(group.rank * each, k + 1), last = min(first + each, k + 1);

  Moments high, own;
  for (int i = first; i < min(last, k); ++i) {
    high.add(value(n - k + i));
    exchange(own, i);
  }
  const Moments start = {group.reduce(high.sum, Sum()) + group.exclusive_sum(own.sum),
                         group.reduce(high.square, Sum()) + group.exclusive_sum(own.square)};
  const auto for_splits = [&](const auto& body) {
    Moments moments = start;
    for (int i = first; i < last; ++i) {
      body(i, split_spread(moments, Moments(), count));
      if (i < k) exchange(moments, i);
    }
  };
  double best = -HUGE_VAL;
  for_splits([&](int, double spread) { best = spread > best ? spread : best; });
  const double equal = equal_spread(group.reduce(best, Max()));
  int chosen = 0;
  for_splits([&](int i, double spread) { chosen = spread >= equal ? i : chosen; });
  return group.reduce(chosen, Max());
}

// Which of the sorted entries are kept: of the usable ones, which come first, the first `low` and the last `high`.
struct Ends {
  int64_t low, high, usable;

  D3S_HOST_DEVICE bool keeps(int64_t rank) const { return rank < low || (rank >= usable - high && rank < usable); }
};

template <class Keys, class Group>
__device__ Ends find_ends(const Keys& at, int usable, int64_t keep, const Group& group) {
  if (usable <= keep) return {usable, 0, usable};
  const int k = static_cast<int>(keep);
  if (k <= 1) return {k, 0, usable};  // a single value has no variance: keep the lowest
  const int low = best_split(at, usable, k, group);
  return {low, k - low, usable};
}

// ---- in one launch -----------------------------------------------------------------------------------------------

// Sorts n entries, for any n. Every exchange puts the smaller entry first, so that padding with the largest entry would
// never move; it is left out.
template <class Group>
__device__ void bitonic_sort(Entry* entries, int n, const Group& group) {
  const auto order = [&](int a, int b) {
    if (b >= n) return;
    const Entry first = entries[a], second = entries[b];
    if (second < first) entries[a] = second, entries[b] = first;
  };
  int log_padded = 0;
  while (log_padded < 31 && int64_t{1} << log_padded < n) ++log_padded;
  const int pairs = log_padded > 0 ? 1 << (log_padded - 1) : 0;
  for (int log_half = 0; log_half < log_padded; ++log_half) {
    for (int i = group.rank; i < pairs; i += group.size) {  // compares with the second half in reverse
      const int begin = i >> log_half << log_half, place = i - begin;
      order(2 * begin + place, 2 * begin + (2 << log_half) - 1 - place);
    }
    group.sync();
    for (int log_stride = log_half - 1; log_stride >= 0; --log_stride) {
      for (int i = group.rank; i < pairs; i += group.size) {
        const int begin = i >> log_stride << log_stride, a = begin + i;
        order(a, a + (1 << log_stride));
      }
      group.sync();
    }
  }
}

// Selects in one segment. `entries` has room for n.
template <class T, class Group>
__device__ void select_segment(const T* values, const bool* mask, int n, int64_t k, Entry* entries, const Group& group,
                               bool* out) {
  int usable = 0;
  for (int i = group.rank; i < n; i += group.size) {
    const uint32_t key = usable_key(values, mask, i);
    entries[i] = entry(key, i);
    usable += key != kUnusable;
  }
  usable = group.reduce(usable, Sum());
  group.sync();
  bitonic_sort(entries, n, group);
  const auto at = [&](int i) { return key_of(entries[i]); };
  const Ends ends = find_ends(at, usable, k, group);
  for (int rank = group.rank; rank < n; rank += group.size) {
    const auto index = static_cast<uint32_t>(entries[rank]);
    // Unchecked offsets may let segments overlap, and so overwrite each other's entries in global memory.
    if (index < static_cast<uint32_t>(n)) out[index] = ends.keeps(rank);
  }
}

constexpr int kBlockThreads = 512;  // eight of 4,096 entries each; more threads would have too few registers

template <class Group>
constexpr int kMostThreads = std::is_same_v<Group, BlockGroup> ? kBlockThreads : Group::kMostThreads;

template <class T, class Group>
__global__ void __launch_bounds__(kMostThreads<Group>, 1)
    select_segments(const T* values, const bool* mask, const __grid_constant__ Segments segments,
                    const __grid_constant__ Keep keep, const __grid_constant__ SizeClass sizes, Entry* spill,
                    bool* out) {
  auto* shared = dynamic_shared<unsigned char>();
  const Group group(shared);
  const int place = static_cast<int>(threadIdx.x) / group.size;
  const int64_t segment = int64_t{blockIdx.x} * (static_cast<int>(blockDim.x) / group.size) + place;
  if (segment >= segments.count) return;
  const int64_t begin = segments.begin(segment), n = segments.end(segment) - begin;
  if (!sizes.has(n)) return;
  const auto select = [&](Entry* entries) {
    select_segment(values + begin, mask ? mask + begin : nullptr, static_cast<int>(n), keep.of(n), entries, group,
                   out + begin);
  };
  // Two calls, so that the compiler knows in which one the entries are in shared memory.
  if (n <= sizes.capacity)
    select(reinterpret_cast<Entry*>(shared + Group::kSharedBytes) + place * sizes.capacity);
  else
    select(spill + begin);
}

// ---- long segments -----------------------------------------------------------------------------------------------

// Writes for each value an entry, with its segment in the high bits and its key in the low ones, and its index.
template <class T>
__global__ void make_entries(const T* values, const bool* mask, int64_t n, const __grid_constant__ Segments segments,
                             uint64_t* entries, uint32_t* indices) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  entries[i] = static_cast<uint64_t>(segments.find(i)) << 32 | usable_key(values, mask, i);
  indices[i] = static_cast<uint32_t>(i);
}

// How many of n sorted keys are usable. The usable ones come first.
template <class Keys>
__device__ int count_usable(const Keys& at, int n) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (at(middle) == kUnusable)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

__global__ void __launch_bounds__(BlockGroup::kMostThreads)
    find_sorted_ends(SortedEntries sorted, const __grid_constant__ Segments segments, const __grid_constant__ Keep keep,
                     Ends* ends) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  const int64_t begin = segments.begin(blockIdx.x);
  const int n = static_cast<int>(segments.end(blockIdx.x) - begin);
  const auto at = [&](int i) { return static_cast<uint32_t>(sorted.entries[begin + i]); };
  const Ends found = find_ends(at, count_usable(at, n), keep.of(n), block);
  if (block.rank == 0) ends[blockIdx.x] = found;
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
  launch("max_variance_select (keys)", make_entries<T>, ceil_div(n, kThreads), kThreads, 0, device,
         static_cast<const T*>(values.values), values.mask, n, segments, entries, indices);
  int bits = 32;
  while (segments.count > int64_t{1} << (bits - 32)) ++bits;
  const SortedEntries sorted = sort_entries(entries, entries + n, indices, indices + n, n, bits, device);
  launch("max_variance_select (splits)", find_sorted_ends, segments.count, BlockGroup::kMostThreads,
         BlockGroup::kSharedBytes, device, sorted, segments, keep, ends);
  launch("max_variance_select (mask)", write_sorted_mask, ceil_div(n, kThreads), kThreads, 0, device, sorted, n,
         segments, static_cast<const Ends*>(ends), out);
}

// ---- which kernels, and how many threads -------------------------------------------------------------------------

constexpr int64_t kWarpSegment = 128;    // up to this length a warp is faster than a block with its barriers
constexpr int64_t kBlockSegment = 4096;  // 32 KB of entries, which fit in the default shared memory

int threads_for(int64_t length) { return length <= 512 ? 128 : length <= 1024 ? 256 : kBlockThreads; }

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
    // A segment longer than the caller said, or than fits in shared memory, is sorted in global memory: slower, but
    // correct.
    const bool may_spill = segments.ragged() && (longest < n || n > kBlockSegment);
    Entry* spill = may_spill ? device.scratch_of<Entry>(n) : nullptr;
    const auto run = [&](auto kernel, int64_t per_block, int threads, size_t group_bytes, const SizeClass& sizes) {
      launch("max_variance_select", kernel, ceil_div(segments.count, per_block), threads,
             group_bytes + per_block * sizes.capacity * sizeof(Entry), device, static_cast<const T*>(values.values),
             values.mask, segments, keep, sizes, spill, out);
    };
    const int64_t in_warp = longest < kWarpSegment ? longest : kWarpSegment;
    const int64_t in_block = longest < kBlockSegment ? longest : kBlockSegment;
    const bool small_only = known && longest <= kWarpSegment;
    if (longest <= kWarpSegment || !known)
      run(select_segments<T, WarpGroup>, WarpGroup::kMostThreads / kWarp, WarpGroup::kMostThreads,
          WarpGroup::kSharedBytes, {0, small_only ? INT64_MAX : kWarpSegment, in_warp});
    if (longest > kWarpSegment)
      run(select_segments<T, BlockGroup>, 1, threads_for(in_block), BlockGroup::kSharedBytes,
          {known ? 0 : kWarpSegment + 1, INT64_MAX, in_block});
  });
}

}  // namespace d3s
