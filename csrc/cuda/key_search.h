// The search for the k-th largest key of a segment, in all kernels of top-K selection. Among the keys that have the
// digits found so far, a histogram of the next digit gives that digit. All counts are integers, so the order in which
// atomics add them does not matter. A histogram in shared memory is incremented by plain atomics: the hardware
// (ATOMS.POPC.INC) adds all lanes with the same bin at once.
#pragma once

#include "../core/key_search.h"
#include "../ops/topk_mask.h"
#include "collective.h"

namespace d3s {

// The 32 bits of a key are three digits. So there are three passes, with tables of 8 KB.
constexpr int kDigits = 3;
constexpr int kBins = 1 << Digit::kMostBits;
D3S_HOST_DEVICE constexpr Digit digit_of(int number) {
  return {number == 0 ? 21 : number == 1 ? 10 : 0, number == 2 ? 10 : 11};
}

// The state of a search. The digits found so far are all bits from `shift` on; `equal` keys have these digits. Count is
// int for the keys of one GPU, and int64_t for the keys of all ranks.
template <class Count>
struct Found {
  uint32_t prefix = 0;  // these digits
  Count left = 0;       // the k-th key's place among the keys with these digits; the largest has place 1
  Count k = 0;          // how many keys to keep; 0: there is nothing to search
  Count equal = 0;
  int shift = 0;

  // Whether all keys with these digits are kept. Then no further digit has to be found.
  D3S_HOST_DEVICE bool keeps_all() const { return left == equal; }
};

// Shared memory for a block's search.
template <class Count>
struct FoundRoom {
  Found<Count> found;
  Count of_warps[kWarp];
};

// The start of a block's shared memory.
struct SearchRoom {
  alignas(16) uint32_t histogram[kBins + 1];  // count_any_keys() uses the last bin
  FoundRoom<int> search;
  alignas(16) unsigned char group[BlockGroup::kSharedBytes];
};

template <class Group>
__device__ void clear_histogram(uint32_t* histogram, const Group& group, int bins = kBins) {
#pragma unroll 1
  for (int i = group.rank; i < bins / 4; i += group.size) reinterpret_cast<uint4*>(histogram)[i] = uint4{};
  group.sync();
}

// Counts a key if it has the digits found so far.
__device__ __forceinline__ void count_key(uint32_t* histogram, uint32_t key, const Digit& digit, uint32_t prefix) {
  if (key != kAbsent && digit.follows(key, prefix)) atomicAdd(&histogram[digit.bin_of(key)], 1u);
}

// Counts the first digit of all keys, also of absent ones. Their digit is 0, which no other key has if the digit has 10
// bits or more: it would be a NaN.
__device__ __forceinline__ void count_first_digits(uint32_t* histogram, const uint4& keys,
                                                   int shift = digit_of(0).shift) {
  for (const uint32_t key : {keys.x, keys.y, keys.z, keys.w}) atomicAdd(&histogram[key >> shift], 1u);
}

// Counts the next digit of the keys that have the digits found so far. `lowest`, above 0, is the lowest possible key
// with these digits. All other keys are counted in an extra bin at the end: a branch for each key would take twice as
// long. The minimum is taken before the shift, since a difference and a minimum are one instruction.
__device__ __forceinline__ void count_any_keys(uint32_t* histogram, const uint4& keys, const Digit& digit,
                                               uint32_t lowest) {
  const uint32_t above = static_cast<uint32_t>(digit.bins()) << digit.shift;
  for (const uint32_t key : {keys.x, keys.y, keys.z, keys.w})
    atomicAdd(&histogram[min(key - lowest, above) >> digit.shift], 1u);
}

template <class Count>
__device__ void add_histogram(const uint32_t* histogram, int bins, Count* total, const BlockGroup& block) {
  for (int i = block.rank; i < bins; i += block.size)
    if (histogram[i] > 0) atomicAdd(&total[i], Count{histogram[i]});
}

// The sums over a warp's lanes: one instruction for int.
__device__ inline int warp_sum(int value) {
  return static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(value)));
}
__device__ inline int64_t warp_sum(int64_t value) { return warp_reduce(value, Sum()); }

// The lane's share of the sum of some bins. Tables of uint32_t come from these kernels, so the bins are aligned and
// their number is a multiple of 4. Lanes read neighbours, so that no two lanes read from the same bank.
__device__ __forceinline__ int add_bins(const uint32_t* bins, int count, int lane) {
  uint32_t sum = 0;
#pragma unroll 1
  for (int i = 4 * lane; i < count; i += 4 * kWarp) {
    const uint4 four = *reinterpret_cast<const uint4*>(bins + i);
    sum += four.x + four.y + four.z + four.w;
  }
  return static_cast<int>(sum);
}
__device__ __forceinline__ int64_t add_bins(const int64_t* bins, int count, int lane) {
  int64_t sum = 0;
#pragma unroll 1
  for (int i = lane; i < count; i += kWarp) sum += bins[i];
  return sum;
}

// Finds one more digit from the counts of its bins. start(sum of all counts) returns the search so far. All threads of
// the block must call this, after a barrier. Each warp adds up some bins; the first warp has the highest bins. Then the
// warp with the k-th key looks for the key's bin. If the counts do not fit the search, nothing is kept; only counts
// passed in by a caller can be wrong. With kClear, the counts are 0 afterwards.
template <bool kClear = false, class Bin, class Count, class Start>
__device__ Found<Count> find_digit(Bin* counts, const Digit& digit, const BlockGroup& block, FoundRoom<Count>& room,
                                   const Start& start) {
  const int warp = block.rank / kWarp, lane = block.rank % kWarp;
  const int each = max(digit.bins() >> (31 - __clz(block.warps())), 1);  // bins of a warp
  const int low = digit.bins() - (warp + 1) * each;                      // the lowest of them; below 0: it has none
  const Count own = warp_sum(low >= 0 ? add_bins(counts + low, each, lane) : Count{0});
  if (lane == 0) room.of_warps[warp] = own;
  if (block.rank == 0) room.found = {};
  block.sync();
  const Count other = lane < block.warps() ? room.of_warps[lane] : Count{0};
  const Found<Count> before = start(warp_sum(other));
  Count above = warp_sum(lane < warp ? other : Count{0});
  if (above < before.left && before.left <= above + own) {
    const int of_lane = max(each / kWarp, 1), top = low + each - lane * of_lane;  // the lane's bins are below `top`
    const int bins = min(of_lane, top - low);
    Count up_to = 0;
#pragma unroll 4
    for (int i = 1; i <= bins; ++i) up_to += static_cast<Count>(counts[top - i]);
    const Count of_these = up_to;
    above += warp_exclusive_sum(up_to);
    if (above < before.left && before.left <= above + of_these) {
#pragma unroll 4  // without an early end, so that loads do not wait for each other
      for (int i = 1; i <= bins; ++i) {
        const auto here = static_cast<Count>(counts[top - i]);
        if (above < before.left && before.left <= above + here)
          room.found = {before.prefix << digit.bits | static_cast<uint32_t>(top - i), before.left - above, before.k,
                        here, digit.shift};
        above += here;
      }
    }
  }
  if constexpr (kClear) {
    __syncwarp();  // no other warp reads these bins from here on
    for (int i = 4 * lane; i < each; i += 4 * kWarp) *reinterpret_cast<uint4*>(counts + low + i) = uint4{};
  }
  block.sync();
  return room.found;  // between this read and the next call's write, every caller has a barrier
}

// Finds the first digit. The quota decides how many of the present keys to keep. If absent keys were counted too,
// `absent` is their number: they are in the lowest bin, which has no other keys.
template <bool kClear = false, class Bin, class Count>
__device__ Found<Count> find_first_digit(Bin* counts, const Digit& digit, const Quota& quota, const BlockGroup& block,
                                         FoundRoom<Count>& room, Count absent = 0) {
  return find_digit<kClear>(counts, digit, block, room, [&](Count all) {
    const auto k = static_cast<Count>(quota.of(all - absent));
    return Found<Count>{0, k, k};
  });
}

template <bool kClear = false, class Bin, class Count>
__device__ Found<Count> find_next_digit(Bin* counts, const Digit& digit, const Found<Count>& before,
                                        const BlockGroup& block, FoundRoom<Count>& room) {
  return find_digit<kClear>(counts, digit, block, room, [&](Count) { return before; });
}

}  // namespace d3s
