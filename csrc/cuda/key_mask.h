// Writes the mask of a stretch of keys, once the k-th largest is known: it keeps the larger keys and the first few
// ties, which are the keys that equal the k-th.
#pragma once

#include "collective.h"
#include "score_keys.h"

namespace d3s {

// What to keep of a segment: every key above `key`, and all ties or the first `ties` of them.
struct Cut {
  uint32_t key;
  int64_t ties;
  bool all_ties;
};

// How many of the top k are dropped because they are 0, and the lowest key that is kept.
struct Kept {
  uint32_t zeros;
  uint32_t lowest;
};

// Calls body(position, key) for the thread's share of [begin, end).
template <class Keys, class Body>
__device__ void for_keys(Keys& keys, int64_t begin, int64_t end, const BlockGroup& block, const Body& body) {
  for (int64_t first = begin + block.rank; first < end; first += kKeysInFlight * block.size) {
    uint32_t batch[kKeysInFlight];
    const int count = wanted(first, block.size, end);
    keys.load(first, block.size, count, batch);
#pragma unroll
    for (int i = 0; i < kKeysInFlight; ++i)
      if (i < count) body(first + i * block.size, batch[i]);
  }
}

// Writes the mask of [begin, end), before which the segment has `ties_before` ties. Each warp has a stretch, so that
// ties are counted in the order of their index.
template <class Keys>
__device__ Kept write_mask(Keys& keys, int64_t begin, int64_t end, const Cut& cut, int64_t ties_before, bool drop_zeros,
                           bool* mask, const BlockGroup& block) {
  const int lane = block.rank % kWarp;
  int64_t from, to;
  block.warp_stretch(begin, end, from, to);
  // Calls body(position, key) for the warp's stretch: the lanes of a call have neighbouring positions, in their order.
  // Past the end of the stretch, the key is kAbsent.
  const auto for_stretch = [&](const auto& body) {
    for (int64_t first = from; first < to; first += kKeysInFlight * kWarp) {
      uint32_t batch[kKeysInFlight];
      const int count = wanted(first + lane, kWarp, to);
      keys.load(first + lane, kWarp, count, batch);
#pragma unroll
      for (int i = 0; i < kKeysInFlight; ++i) body(first + i * kWarp + lane, i < count ? batch[i] : kAbsent);
    }
  };
  int64_t tie = ties_before;
  if (!cut.all_ties) {
    int64_t own = 0;
    for_stretch([&](int64_t, uint32_t key) { own += key == cut.key; });
    tie += block.sum_before_warp(own);
  }
  Kept kept = {0, UINT32_MAX};
  for_stretch([&](int64_t position, uint32_t key) {
    bool take = key > cut.key || (key == cut.key && cut.all_ties);
    if (!cut.all_ties) {  // kAbsent, past the end, is never a tie
      const unsigned equal = __ballot_sync(kAllLanes, key == cut.key);
      const int64_t number = tie + __popc(equal & ((1u << lane) - 1));
      take = take || (key == cut.key && number < cut.ties);
      tie += __popc(equal);
    }
    if (take && drop_zeros && key == kZeroKey) {
      take = false;
      ++kept.zeros;
    }
    if (take && key < kept.lowest) kept.lowest = key;
    if (position < to) mask[position] = take;
  });
  kept.zeros = block.reduce(kept.zeros, Sum());
  kept.lowest = block.reduce(kept.lowest, Min());
  return kept;
}

__device__ inline void write_nothing(int64_t begin, int64_t end, bool* mask, const BlockGroup& block) {
  for (int64_t i = begin + block.rank; i < end; i += block.size) mask[i] = false;
}

}  // namespace d3s
