// The search for the k-th largest key of a segment, as all kernels of top-K selection make it: a histogram of the next
// digit, over the keys that have the digits found so far, gives that digit. All counts are integers, so the order in
// which atomics add them does not matter. Increments of a histogram in shared memory are left to the hardware
// (ATOMS.POPC.INC), which adds lanes with the same bin at once.
#pragma once

#include "../core/key_search.h"
#include "../ops/topk_mask.h"
#include "collective.h"

namespace d3s {

// The 32 bits of a key in three digits: tables of 8 KB, and three passes.
constexpr int kDigits = 3;
constexpr int kBins = 1 << Digit::kMostBits;
D3S_HOST_DEVICE Digit digit_of(int number) { return {number == 0 ? 21 : number == 1 ? 10 : 0, number == 2 ? 10 : 11}; }

// How far a search has come: `equal` keys have the digits that are found, which are all bits from `shift` on. Count is
// int for the keys of one GPU, and int64_t for those of all ranks.
template <class Count>
struct Found {
  uint32_t prefix = 0;  // these digits
  Count left = 0;       // the k-th key's place among the keys with these digits; the largest has place 1
  Count k = 0;          // how many keys to keep; 0: there is nothing to search
  Count equal = 0;
  int shift = 0;

  // Whether all these keys are kept, so that no further digit has to be found.
  D3S_HOST_DEVICE bool keeps_all() const { return left == equal; }
};

// The start of a block's shared memory.
struct SearchRoom {
  alignas(16) uint32_t histogram[kBins];
  Found<int> found;
  alignas(16) unsigned char group[BlockGroup::kSharedBytes];
};

__device__ inline void clear_histogram(SearchRoom& room, const BlockGroup& block) {
#pragma unroll 1
  for (int i = block.rank; i < kBins / 4; i += block.size) reinterpret_cast<uint4*>(room.histogram)[i] = uint4{};
  block.sync();
}

// Counts a key that has the digits found so far.
__device__ __forceinline__ void count_key(uint32_t* histogram, uint32_t key, const Digit& digit, uint32_t prefix) {
  if (key != kAbsent && digit.follows(key, prefix)) atomicAdd(&histogram[digit.bin_of(key)], 1u);
}

template <class Count>
__device__ void add_histogram(const uint32_t* histogram, int bins, Count* total, const BlockGroup& block) {
  for (int i = block.rank; i < bins; i += block.size)
    if (histogram[i] > 0) atomicAdd(&total[i], Count{histogram[i]});
}

// Finds one more digit from the counts of its bins; start(sum of all counts) is the search so far. All threads of the
// block must call it; each has some bins, and the first has the highest. Counts that do not fit the search, which only
// a caller's own can be, end it: it keeps nothing.
template <class Bin, class Count, class Start>
__device__ Found<Count> find_digit(const Bin* counts, const Digit& digit, const BlockGroup& block, Found<Count>& shared,
                                   const Start& start) {
  const int bins = digit.bins(), each = max(bins >> (31 - __clz(block.size)), 1);
  const int from = block.rank * each, to = min(from + each, bins);
  Count own = 0, total;
  for (int i = from; i < to; ++i) own += static_cast<Count>(counts[bins - 1 - i]);
  if (block.rank == 0) shared = {};
  Count above = block.exclusive_sum(own, total);
  const Found<Count> before = start(total);
  if (before.k == 0) return {};
  if (above < before.left && before.left <= above + own)
    for (int i = from; i < to; ++i) {
      const int bin = bins - 1 - i;
      const auto here = static_cast<Count>(counts[bin]);
      if (above + here >= before.left) {
        shared = {before.prefix << digit.bits | static_cast<uint32_t>(bin), before.left - above, before.k, here,
                  digit.shift};
        break;
      }
      above += here;
    }
  block.sync();
  return shared;  // between this read and the next call's write, every caller has a barrier
}

// The first digit: the quota decides how many of the present keys to keep.
template <class Bin, class Count>
__device__ Found<Count> find_first_digit(const Bin* counts, const Digit& digit, const Quota& quota,
                                         const BlockGroup& block, Found<Count>& shared) {
  return find_digit(counts, digit, block, shared, [&](Count present) {
    const auto k = static_cast<Count>(quota.of(present));
    return Found<Count>{0, k, k};
  });
}

template <class Bin, class Count>
__device__ Found<Count> find_next_digit(const Bin* counts, const Digit& digit, const Found<Count>& before,
                                        const BlockGroup& block, Found<Count>& shared) {
  return find_digit(counts, digit, block, shared, [&](Count) { return before; });
}

}  // namespace d3s
