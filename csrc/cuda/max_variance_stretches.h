// Finds the best split of each long segment. The sorted keys are in global memory. The splits of a segment are cut into
// stretches, and each stretch gets a block. The length of a stretch depends only on the length of its own segment, so
// that the sums of a segment are bitwise equal in any batch.
#pragma once

#include <cstring>

#include "max_variance_memory.h"
#include "note_faults.h"
#include "segment_sort.h"

namespace d3s {
namespace {

constexpr int kStretchThreads = 256;
constexpr int kRound = kStretchThreads * kSplits<SplitBlock>;  // splits that a block tries at a time
// The stretches of a segment below this length are one round long. For longer segments, a stretch is several rounds. So
// there are at most about 4,000 stretches. More stretches would take too long, since each block adds up the sums of all
// stretches before its own stretch.
constexpr int kMostOfOneRound = 1 << 22;

struct SortedSegments {
  SortedEntries sorted;
  Segments segments;
  Keep keep;
  Ends* ends;          // [segments]
  uint32_t* finished;  // [segments]: how many stretches are finished
  // sums and best are [blocks], indexed by Stretch::slot()
  SplitSums* sums;
  double* best;     // the largest spread of each stretch
  double* spreads;  // [values]: split i is at the segment's i-th value; no segment has more splits than values
};

// The stretch that a block handles. The first blocks handle stretch 0 of each segment; even an empty segment has such a
// block. For later stretches, there is a block for each multiple of kRound among the indices of all sorted values.
// Stretch i of a segment is handled by the block of the i-th such multiple after the segment's first value. There are
// enough of these blocks, since a stretch is at least one round long.
struct Stretch {
  int64_t segment, begin, keep;
  int64_t from = -1;  // the first split of the stretch; -1 if the block has no stretch
  int number, n, length;

  __device__ explicit Stretch(const SortedSegments& all) {
    const Segments& segments = all.segments;
    const int64_t round = static_cast<int64_t>(blockIdx.x) - segments.count;
    if (round < 0)
      segment = blockIdx.x;
    else  // reading the segment from an entry takes less time than a search
      segment = segments.ragged() ? static_cast<int64_t>(all.sorted.entries[round * kRound] >> 32)
                                  : segments.find(round * kRound);
    begin = segments.begin(segment);
    n = static_cast<int>(segments.end(segment) - begin);
    keep = all.keep.of(n);
    length = kRound * (1 + n / kMostOfOneRound);
    number = round < 0 ? 0 : static_cast<int>(round - begin / kRound);
    if (round < 0 || number > 0) from = int64_t{number} * length;
    if (from > keep || from > n) from = -1;
  }
  // Returns the slot for the sums of the segment's i-th stretch.
  __device__ int64_t slot(const SortedSegments& all, int i) const {
    return i == 0 ? segment : all.segments.count + begin / kRound + i;
  }
  __device__ int end(int i, int splits) const {
    const int64_t to = (int64_t{i} + 1) * length;
    return to < splits ? static_cast<int>(to) : splits;
  }
};

struct SortedKeys {
  const uint64_t* entries;
  __device__ uint32_t operator()(int i) const { return static_cast<uint32_t>(entries[i]); }
};

// Returns how many of n sorted keys are usable. Usable keys come first. In each step of the search, every thread tries
// one key. The search takes two steps for 65,536 keys, or one step if all of these are usable.
__device__ inline int count_usable(const SortedKeys& at, int n, const SplitBlock& block) {
  int low = 0, high = n;  // keys before `low` are usable, keys from `high` on are not
  while (low < high) {
    const int step = (high - low + block.size - 1) / block.size;
    const int64_t tried = low + (block.rank + int64_t{1}) * step - 1;  // the last of the thread's `step` keys
    const int before = __syncthreads_count(at(tried < high ? static_cast<int>(tried) : high - 1) != kUnusable);
    const int64_t usable = low + int64_t{before} * step;
    low = usable < high ? static_cast<int>(usable) : high;
    high = low + step - 1 < high ? low + step - 1 : high;
  }
  return low;
}

__global__ void __launch_bounds__(kStretchThreads, 2)
    sum_stretches(const __grid_constant__ SortedSegments all, const __grid_constant__ Faults faults) {
  note_keep(all.keep, faults);
  note_offsets(all.segments, faults);
  const SplitBlock block(dynamic_shared<unsigned char>());
  const Stretch stretch(all);
  if (stretch.from < 0) return;
  const SortedKeys at = {all.sorted.entries + stretch.begin};
  const int usable = count_usable(at, stretch.n, block);
  const bool decided = keeps_lowest(usable, stretch.keep);
  if (block.rank == 0 && stretch.number == 0)
    all.ends[stretch.segment] = decided ? lowest(usable, stretch.keep) : Ends{0, 0, usable};
  if (decided) return;
  const int k = static_cast<int>(stretch.keep);
  const Splits<SortedKeys, SplitBlock> splits(at, usable, k, block);
  const SplitSums sums = sum_of(splits.own_sums(static_cast<int>(stretch.from), stretch.end(stretch.number, k)), block);
  if (block.rank == 0) all.sums[stretch.slot(all, stretch.number)] = sums;
}

// Returns the maximum over all threads' values. The values are compared as integers that sort in the same order, which
// needs less code.
__device__ inline double largest(double own, const SplitBlock& block) {
  const auto flip = [](int64_t bits) { return bits < 0 ? bits ^ INT64_MAX : bits; };
  int64_t bits;
  memcpy(&bits, &own, sizeof bits);
  bits = flip(block.reduce(flip(bits), Max()));
  memcpy(&own, &bits, sizeof bits);
  return own;
}

// Writes the spreads of a stretch's splits, and returns the largest spread.
__device__ inline double find_spreads(const SortedSegments& all, const Stretch& stretch, int stretches, int usable,
                                      const SplitBlock& block) {
  const SortedKeys at = {all.sorted.entries + stretch.begin};
  const int k = static_cast<int>(stretch.keep);
  const Splits<SortedKeys, SplitBlock> splits(at, usable, k, block);
  SplitSums read;  // loaded ahead, so that its first load runs while the keys are loaded
  const auto load = [&](int i) {
    if (i < stretches) read = all.sums[stretch.slot(all, i)];
  };
  load(block.rank);
  const auto share = [&] {  // the moments of the last k keys, plus all exchanges before the stretch
    Moments before;
    for (int i = block.rank; i < stretches; i += block.size) {
      const bool earlier = i < stretch.number;
      before.sum += read.high.sum + (earlier ? read.moved.sum : 0.0);
      before.square += read.high.square + (earlier ? read.moved.square : 0.0);
      load(i + block.size);
    }
    return before;
  };
  double best = -HUGE_VAL;
  splits.for_each(share, static_cast<int>(stretch.from), stretch.end(stretch.number, k + 1), [&](int i, double spread) {
    all.spreads[stretch.begin + i] = spread;
    best = spread > best ? spread : best;
  });
  return largest(best, block);
}

// The block of a segment that finishes last chooses the split of the segment. This block reads only the spreads of one
// stretch: the last stretch with a spread that counts as equal to the best spread.
__global__ void __launch_bounds__(kStretchThreads, 2) find_sorted_ends(const __grid_constant__ SortedSegments all) {
  const SplitBlock block(dynamic_shared<unsigned char>());
  const Stretch stretch(all);
  if (stretch.from < 0) return;
  const int64_t usable = all.ends[stretch.segment].usable;
  if (keeps_lowest(usable, stretch.keep)) return;
  const int k = static_cast<int>(stretch.keep), stretches = k / stretch.length + 1;
  const double own = find_spreads(all, stretch, stretches, static_cast<int>(usable), block);
  bool is_last = false;
  if (block.rank == 0) {
    all.best[stretch.slot(all, stretch.number)] = own;
    __threadfence();  // the spreads and `best` are written before the stretch counts as finished
    is_last = atomicAdd(all.finished + stretch.segment, 1u) == static_cast<uint32_t>(stretches) - 1;
    if (is_last) __threadfence();
  }
  if (!__syncthreads_or(is_last)) return;
  double best = -HUGE_VAL;
  for (int i = block.rank; i < stretches; i += block.size) best = Max()(best, all.best[stretch.slot(all, i)]);
  const double equal = equal_spread(largest(best, block));
  int last = 0, low = 0;
  for (int i = block.rank; i < stretches; i += block.size)
    if (all.best[stretch.slot(all, i)] >= equal) last = i;
  last = block.reduce(last, Max());
  const int end = stretch.end(last, k + 1);
#pragma unroll 4
  for (int i = last * stretch.length + block.rank; i < end; i += block.size)
    if (all.spreads[stretch.begin + i] >= equal) low = i;
  low = block.reduce(low, Max());
  if (block.rank == 0) all.ends[stretch.segment] = {low, k - low, usable};
}

}  // namespace
}  // namespace d3s
