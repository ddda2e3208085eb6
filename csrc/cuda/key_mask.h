// Writes the mask of a row of keys, after the search for the k-th largest key. All larger keys are kept. The keys that
// equal the k-th largest key are called ties. Only as many ties as needed are kept: those with the lowest indices.
#pragma once

#include "../core/cut.h"
#include "key_search.h"
#include "vectors.h"

namespace d3s {

using Cut = CutOf<int>;
using Kept = KeptOf<uint32_t>;

// Returns the cut after a search. If all keys with the digits found so far are kept, the key of the cut is the lowest
// possible key with these digits. If no key is kept, the key of the cut is above all keys.
D3S_HOST_DEVICE Cut cut_at(const Found<int>& found) {
  if (found.k == 0) return {UINT32_MAX, 0, true};
  return {found.prefix << found.shift, found.left, found.keeps_all()};
}

// Writes `count` and `threshold` of a segment. `count` is k minus the number of dropped zeros.
D3S_HOST_DEVICE void write_selected(const SelectionOutputs& outputs, int64_t segment, int64_t k, const Kept& kept) {
  const int64_t count = k - kept.zeros;
  if (outputs.count) outputs.count[segment] = static_cast<int32_t>(count);
  if (outputs.threshold) outputs.threshold[segment] = count > 0 ? order_key_value(kept.lowest) : INFINITY;
}

// The mask of a row of keys. The row is cut into vectors of four neighbouring keys, called `four` in names. A vector
// begins where the mask's address is a multiple of 4, so that its four mask bytes are stored as one word. The first and
// the last vector may be partly outside of the row. Positions count from the start of the first vector.
class MaskRow {
 public:
  __device__ MaskRow(bool* mask, int count)
      : lead_(static_cast<int>(reinterpret_cast<uintptr_t>(mask) & 3)), end_(lead_ + count), mask_(mask - lead_) {}

  __device__ int lead() const { return lead_; }  // how many positions of the first vector are before the row
  __device__ int fours() const { return (end_ + 3) / 4; }

  // Stores the mask of a vector: a word of four bytes. Bytes outside of the row are not stored.
  __device__ void store(int four, uint32_t word) const {
    if (whole(four))
      store_whole(four, word);
    else
      for (int place = 4 * four; place < 4 * four + 4; ++place, word >>= 8)
        if (has(place)) mask_[place] = word & 1;
  }

 protected:
  __device__ bool has(int place) const { return place >= lead_ && place < end_; }
  __device__ bool whole(int four) const { return four >= (lead_ > 0 ? 1 : 0) && four < end_ / 4; }
  __device__ void store_whole(int four, uint32_t word) const { reinterpret_cast<uint32_t*>(mask_)[four] = word; }

 private:
  int lead_, end_;  // the row's first position, and the first position after the row
  bool* mask_;
};

// A row of keys in memory. Padded keys were written by the kernel itself: their vectors are aligned, and positions
// outside of the row have the key kAbsent.
template <bool kPadded>
class KeyRow : public MaskRow {
 public:
  using Keys = std::conditional_t<kPadded, uint32_t, const uint32_t>;

  // `keys` points to the row's first key. If the keys are padded, `keys` points to the row's first vector instead.
  __device__ KeyRow(Keys* keys, bool* mask, int count) : MaskRow(mask, count), keys_(kPadded ? keys : keys - lead()) {}

  // Stores a vector of padded keys.
  __device__ void set(int four, const uint4& keys) const { *reinterpret_cast<uint4*>(keys_ + 4 * four) = keys; }

  // Calls body(four, keys) for the thread's vectors in the warp's stretch of the row; `four` is the index of the
  // vector. All lanes of a warp call `body` together and equally often. Past the end of the stretch, keys are kAbsent.
  template <class Body>
  __device__ __forceinline__ void for_stretch(const BlockGroup& block, const Body& body) const {
    const int lane = block.rank % kWarp;
    int from, to;
    block.warp_stretch(0, fours(), from, to);
#pragma unroll 1
    for (int four = from + lane; four - lane < to; four += kWarp) body(four, four < to ? load(four) : uint4{});
  }

  // For each of the thread's vectors in the stretch, stores the word bytes(keys) as the vector's mask.
  template <class Bytes>
  __device__ __forceinline__ void store_stretch(const BlockGroup& block, const Bytes& bytes) const {
    int from, to;
    block.warp_stretch(0, fours(), from, to);
#pragma unroll 2
    for (int four = from + block.rank % kWarp; four < to; four += kWarp) store(four, bytes(load(four)));
  }

 private:
  // Loads a vector. Keys at positions outside of the row are kAbsent.
  __device__ uint4 load(int four) const {
    const uint32_t* at = keys_ + 4 * four;
    if constexpr (kPadded) return *reinterpret_cast<const uint4*>(at);
    if (whole(four) && misalignment(at) == 0) return *reinterpret_cast<const uint4*>(at);
    return make_uint4(key(4 * four), key(4 * four + 1), key(4 * four + 2), key(4 * four + 3));
  }
  __device__ uint32_t key(int place) const { return has(place) ? keys_[place] : kAbsent; }

  Keys* keys_;
};

// Returns a word with one byte for each of four keys: 1 if the key has the property, else 0.
template <class Property>
__device__ __forceinline__ uint32_t bytes_of(const uint4& keys, const Property& property) {
  return (property(keys.x) ? 1u : 0u) | (property(keys.y) ? 0x100u : 0u) | (property(keys.z) ? 0x10000u : 0u) |
         (property(keys.w) ? 0x1000000u : 0u);
}

// Returns the sum of `own` over the lanes before this lane, and sets `all` to the sum over all lanes. `own` must be 0
// to 4.
__device__ __forceinline__ int before_lane(int own, int& all) {
  const unsigned below = (1u << threadIdx.x % kWarp) - 1;
  int before = 0;
  all = 0;
#pragma unroll
  for (int bit = 0; bit < 3; ++bit) {
    const unsigned lanes = __ballot_sync(kAllLanes, own >> bit & 1);
    before += __popc(lanes & below) << bit;
    all += __popc(lanes) << bit;
  }
  return before;
}

// Returns which of this lane's four keys are among the first `wanted` ties of the warp's stretch. `ties` says which of
// the four keys are ties. `ties` and the result have one byte, 0 or 1, for each key. `tie`, the number of ties in the
// stretch before the warp's current vectors, is increased by the number of ties in these vectors.
__device__ inline uint32_t first_ties(uint32_t ties, int& tie, int wanted) {
  int all;
  const int before = before_lane(__popc(ties), all);
  int left = wanted - tie - before;
  tie += all;
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = ties & 0x1u << 8 * i;
    if (byte && left-- > 0) kept |= byte;
  }
  return kept;
}

// Takes (keeps) all keys that are at least `floor`. If zeros are dropped, they are counted instead of taken.
class Taker {
 public:
  // `floor` must be above 0, so that kAbsent is not taken.
  __device__ Taker(uint32_t floor, const Quota& quota) : floor_(floor), drop_(quota.drop_zeros && floor <= kZeroKey) {}

  // Returns a word with one byte for each key: 1 if the key is taken, else 0. The height of a key is key - floor_. The
  // height of a taken key is at most UINT32_MAX - floor_. For keys below floor_, the subtraction wraps around to a
  // larger height. So the lowest height belongs to the lowest taken key.
  __device__ __forceinline__ uint32_t take(const uint4& keys) {
    uint4 heights = make_uint4(keys.x - floor_, keys.y - floor_, keys.z - floor_, keys.w - floor_);
    if (drop_)
      for (uint32_t* height : {&heights.x, &heights.y, &heights.z, &heights.w})
        if (*height == kZeroKey - floor_) {
          *height = UINT32_MAX;  // not taken
          ++zeros_;
        }
    lowest_ = min(min(lowest_, min(heights.x, heights.y)), min(heights.z, heights.w));
    return bytes_of(heights, [&](uint32_t height) { return height <= UINT32_MAX - floor_; });
  }

  __device__ Kept kept() const { return {zeros_, lowest_ <= UINT32_MAX - floor_ ? floor_ + lowest_ : UINT32_MAX}; }

 private:
  uint32_t floor_;
  bool drop_;
  uint32_t zeros_ = 0, lowest_ = UINT32_MAX;
};

// Writes the mask of a row. Returns the result for this thread's keys. If only some of the ties are kept, the ties are
// counted first. Each warp has one stretch of the row, so all ties of earlier warps have lower indices. In at most one
// stretch, only some of the ties are kept.
template <class Row, class Group>
__device__ Kept write_mask(const Row& row, const Cut& cut, const Quota& quota, const Group& block) {
  const auto is_tie = [&](uint32_t key) { return key == cut.key; };
  bool all = cut.all_ties;  // whether all ties of the warp's stretch are kept
  int wanted = 0;           // if not all: how many ties of the stretch are kept
  if (!cut.all_ties) {
    int ties = 0;
    row.for_stretch(block, [&](int, const uint4& keys) { ties += __popc(bytes_of(keys, is_tie)); });
    wanted = cut.ties - block.sum_before_warp(ties);
    all = wanted >= warp_sum(ties);
  }
  Taker taker(all || cut.key == UINT32_MAX ? max(cut.key, 1u) : cut.key + 1, quota);
  const bool some = !all && wanted > 0, dropped = quota.drop_zeros && cut.key == kZeroKey;
  int tie = 0, added = 0;
  if (some) {
    row.for_stretch(block, [&](int four, const uint4& keys) {
      const uint32_t first = first_ties(bytes_of(keys, is_tie), tie, wanted);
      added += __popc(first);
      row.store(four, taker.take(keys) | (dropped ? 0 : first));
    });
  } else {  // most warps run this separate loop, which has half as many instructions
    row.store_stretch(block, [&](const uint4& keys) { return taker.take(keys); });
  }
  Kept kept = taker.kept();
  if (dropped) kept.zeros += added;
  if (added > 0 && !dropped) kept.lowest = cut.key;
  return kept;
}

template <class Group>
__device__ Kept sum_of(const Kept& own, const Group& block) {
  return {block.reduce(own.zeros, Sum()), block.reduce(own.lowest, Min())};
}

// Sets the whole mask of a row to false.
__device__ inline void write_nothing(bool* mask, int count, const BlockGroup& block) {
  const MaskRow row(mask, count);
#pragma unroll 1
  for (int four = block.rank; four < row.fours(); four += block.size) row.store(four, 0);
}

}  // namespace d3s
