// Searches for the k-th largest key of a segment, for all kernels of top-K selection. To find the next digit of the
// key, the search makes a histogram of this digit over all keys that have the digits found so far. Counts are integers,
// so the order of atomic additions does not matter. In shared memory, each lane makes a plain atomic addition, since
// one instruction (ATOMS.POPC.INC) then counts all lanes with the same bin.
#pragma once

#include "../core/key_search.h"
#include "../ops/topk_mask.h"
#include "collective.h"

namespace d3s {

// The 32 bits of a key are cut into three digits, of 11, 11 and 10 bits. So a search takes three passes, and a
// histogram takes 8 KB.
constexpr int kDigits = 3;
constexpr int kBins = 1 << Digit::kMostBits;
D3S_HOST_DEVICE constexpr Digit digit_of(int number) {
  return {number == 0 ? 21 : number == 1 ? 10 : 0, number == 2 ? 10 : 11};
}

// The state of a search. The digits found so far are the bits of the key from bit `shift` upwards. Count is int for the
// keys of one GPU, and int64_t for the keys of all ranks.
template <class Count>
struct Found {
  uint32_t prefix = 0;  // the digits found so far
  Count left = 0;       // the rank of the k-th largest key among the keys with these digits; the largest key has rank 1
  Count k = 0;          // how many keys to keep; if 0, there is nothing to search
  Count equal = 0;      // how many keys have these digits
  int shift = 0;

  // Returns whether all keys with these digits are kept. If so, no further digit has to be found.
  D3S_HOST_DEVICE bool keeps_all() const { return left == equal; }
};

// Shared memory for a block's search.
template <class Count>
struct FoundRoom {
  Found<Count> found;
  Count of_warps[kWarp];
};

// The layout of the first part of a block's shared memory.
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

// Counts the first digits of all keys, including kAbsent, which has the first digit 0. If a digit has at least 10 bits,
// no other key has the first digit 0: a key with this digit would stand for a NaN.
__device__ __forceinline__ void count_first_digits(uint32_t* histogram, const uint4& keys,
                                                   int shift = digit_of(0).shift) {
  for (const uint32_t key : {keys.x, keys.y, keys.z, keys.w}) atomicAdd(&histogram[key >> shift], 1u);
}

// Counts the next digit of the keys that have the digits found so far. `lowest`, the lowest possible key with these
// digits, must be above 0. All other keys are counted in an extra bin after the last bin, since a branch for each key
// would take twice as long. The minimum comes before the shift, since a difference and a minimum together take one
// instruction.
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

// Returns the sum over the lanes of a warp. For int, this takes one instruction.
__device__ inline int warp_sum(int value) {
  return static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(value)));
}
__device__ inline int64_t warp_sum(int64_t value) { return warp_reduce(value, Sum()); }

// Returns this lane's share of the sum of `count` bins. Histograms of uint32_t are written by these kernels, so their
// bins are aligned, and `count` is a multiple of 4. Neighbouring lanes read neighbouring bins, so that no two lanes
// read from the same bank.
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

// Finds one more digit, from the counts of the digit's bins. start(sum of all counts) returns the state of the search
// before this digit. All threads of the block must call this, after a barrier. Each warp adds up some of the bins; the
// first warp has the highest bins. If the caller of an op passes in counts that contradict the search, no key is kept.
// If kClear is true, the counts are set to 0 after use.
template <bool kClear = false, class Bin, class Count, class Start>
__device__ Found<Count> find_digit(Bin* counts, const Digit& digit, const BlockGroup& block, FoundRoom<Count>& room,
                                   const Start& start) {
  const int warp = block.rank / kWarp, lane = block.rank % kWarp;
  const int each = max(digit.bins() >> (31 - __clz(block.warps())), 1);  // the number of bins of a warp
  const int low = digit.bins() - (warp + 1) * each;  // the warp's lowest bin; negative if the warp has no bins
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
#pragma unroll 4  // there is no early exit, so that loads do not wait for each other
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

// Finds the first digit. From the number of keys that are not kAbsent, the quota computes how many keys to keep. If the
// counts include kAbsent, `absent` must be the count of the lowest bin, which has no other keys.
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
