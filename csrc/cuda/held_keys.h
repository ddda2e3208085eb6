// Holds the keys of a segment in the registers of a block or of a warp. Only the histograms are in shared memory.
#pragma once

#include "key_mask.h"
#include "score_keys.h"

namespace d3s {

// A row of keys in registers. Each thread holds kHeld vectors of four keys, and each warp holds kHeld * kWarp
// consecutive vectors.
template <int kHeld>
class HeldRow : public MaskRow {
 public:
  __device__ HeldRow(bool* mask, int count) : MaskRow(mask, count) {}

  // Loads the row's keys. The row's first vector begins at position `origin` of the scores.
  template <bool kLookUp, bool kAtOnce, class Group>
  __device__ void load(ScoreKeys<kLookUp, kAtOnce> source, int origin, int begin, int end, const Group& group) {
    source.load(origin + 4 * first(group), 4 * kWarp, begin, end, keys_);
  }

  // Calls body(four, keys) for each of the thread's vectors of four keys; `four` is the vector's index in the row. Past
  // the end of the row, keys are kAbsent.
  template <class Group, class Body>
  __device__ __forceinline__ void for_stretch(const Group& group, const Body& body) const {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) body(first(group) + j * kWarp, keys_[j]);
  }

  // For each of the thread's vectors, stores the word bytes(keys) as the vector's mask.
  template <class Group, class Bytes>
  __device__ __forceinline__ void store_stretch(const Group& group, const Bytes& bytes) const {
    const int own = first(group);
    if (whole(own) && whole(own + (kHeld - 1) * kWarp)) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) store_whole(own + j * kWarp, bytes(keys_[j]));
    } else {
      for_stretch(group, [&](int four, const uint4& keys) { store(four, bytes(keys)); });
    }
  }

 private:
  template <class Group>
  __device__ static int first(const Group& group) {
    return group.rank / kWarp * (kHeld * kWarp) + group.rank % kWarp;
  }

  uint4 keys_[kHeld];
};

// The number of bits in a digit if kWarps warps search together. There are eight bins for each thread. Fewer warps have
// fewer bins, so their search takes more digits. For any number of warps, adding up the bins takes no longer than
// counting the keys.
template <int kWarps>
constexpr int kDigitBits = 1 + kDigitBits<kWarps / 2>;
template <>
constexpr int kDigitBits<1> = 8;

// Shared memory for a search by kWarps warps.
template <int kWarps>
struct HeldRoom {
  static constexpr int kBits = kDigitBits<kWarps>, kBins = 1 << kBits;

  alignas(16) uint32_t histogram[kBins + 1];  // count_any_keys() uses the last bin
  alignas(16) int of_warps[kWarps];
  int lowest;  // the count of the lowest bin
  Found<int> found;
  alignas(16) unsigned char group[kWarps > 1 ? BlockGroup::kSharedBytes : 1];
};

// Finds one more digit, like find_digit() in key_search.h, and sets all counts to 0. start(sum of all counts, count of
// the lowest bin) returns the state of the search before this digit. `prefix` is the prefix of the keys in the lowest
// bin.
template <int kWarps, class Group, class Start>
__device__ __forceinline__ Found<int> find_digit(HeldRoom<kWarps>& room, int shift, uint32_t prefix, const Group& group,
                                                 const Start& start) {
  constexpr int kBins = HeldRoom<kWarps>::kBins, kEach = kBins / (kWarps * kWarp);  // bins of a thread
  static_assert(kEach % 4 == 0, "a thread reads fours of bins");
  const int warp = group.rank / kWarp;
  const int top = kBins - kEach * group.rank;  // the thread's bins are below `top`

  int up_to[kEach];  // up_to[i] is the sum of the thread's i + 1 highest bins
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    uint4& four = *reinterpret_cast<uint4*>(room.histogram + top - 4 - i);
    up_to[i] = four.w, up_to[i + 1] = four.z, up_to[i + 2] = four.y, up_to[i + 3] = four.x;
    four = {};
  }
  if (group.rank == group.size - 1) room.lowest = up_to[kEach - 1];
#pragma unroll
  for (int i = 1; i < kEach; ++i) up_to[i] += up_to[i - 1];
  const int own = up_to[kEach - 1], up_to_lane = warp_inclusive_sum(own);
  if (group.rank % kWarp == kWarp - 1) room.of_warps[warp] = up_to_lane;
  if (group.rank == 0) room.found = {};
  group.sync();
  int all = 0, above = up_to_lane - own;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int of_warp = room.of_warps[i];
    all += of_warp;
    if (i < warp) above += of_warp;
  }
  const Found<int> before = start(all, room.lowest);
  const int wanted = before.left - above;  // the rank of the k-th largest key in the thread's bins, if it is there
  if (wanted > 0 && wanted <= own) {
    int bin = top - 1, larger = 0, upto = own;
#pragma unroll
    for (int i = 0; i < kEach - 1; ++i) {
      const bool past = up_to[i] < wanted;
      if (past) --bin, larger = up_to[i];
    }
#pragma unroll
    for (int i = kEach - 2; i >= 0; --i)
      if (up_to[i] >= wanted) upto = up_to[i];
    room.found = {prefix + static_cast<uint32_t>(bin), wanted - larger, before.k, upto - larger, shift};
  }
  group.sync();
  return room.found;  // between this read and the next call's write, every caller has a barrier
}

}  // namespace d3s
