// Writes the mask of a row of keys, once the k-th largest is known: it keeps the larger keys and the first few ties,
// which are the keys that equal the k-th.
#pragma once

#include "key_search.h"
#include "vectors.h"

namespace d3s {

// Which keys of a segment to keep: all keys above `key`, and all ties or the first `ties` of them.
struct Cut {
  uint32_t key;
  int ties;
  bool all_ties;
};

// How many of the top k are dropped because they are 0, and the lowest key that is kept.
struct Kept {
  uint32_t zeros;
  uint32_t lowest;
};

// The cut after a search. If all keys with the digits found are kept, it is at the lowest possible key with these
// digits. If no key is kept, it is above all keys.
D3S_HOST_DEVICE Cut cut_at(const Found<int>& found) {
  if (found.k == 0) return {UINT32_MAX, 0, true};
  return {found.prefix << found.shift, found.left, found.keeps_all()};
}

// Writes `count` and `threshold` of a segment. It keeps k keys, minus the dropped zeros.
D3S_HOST_DEVICE void write_selected(const SelectionOutputs& outputs, int64_t segment, int64_t k, const Kept& kept) {
  const int64_t count = k - kept.zeros;
  if (outputs.count) outputs.count[segment] = static_cast<int32_t>(count);
  if (outputs.threshold) outputs.threshold[segment] = count > 0 ? order_key_value(kept.lowest) : INFINITY;
}

// The mask of a row of keys, in fours: groups of four neighbours. A four begins where the mask's address is a multiple
// of 4, so that it is stored as one word. The first and the last four may be incomplete.
class MaskRow {
 public:
  __device__ MaskRow(bool* mask, int count)
      : lead_(static_cast<int>(reinterpret_cast<uintptr_t>(mask) & 3)), end_(lead_ + count), mask_(mask - lead_) {}

  __device__ int lead() const { return lead_; }  // how many places of the first four are before the row
  __device__ int fours() const { return (end_ + 3) / 4; }

  // Stores the bytes of the word whose places are in the row.
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
  int lead_, end_;  // the row's first place, and the first place after it
  bool* mask_;
};

// A row of keys in memory. Padded keys are written by the kernel itself: they are aligned, and the places of the first
// and last four that are outside of the row have absent keys.
template <bool kPadded>
class KeyRow : public MaskRow {
 public:
  using Keys = std::conditional_t<kPadded, uint32_t, const uint32_t>;

  // `keys` points to the row's first key, or for padded keys to the first four.
  __device__ KeyRow(Keys* keys, bool* mask, int count) : MaskRow(mask, count), keys_(kPadded ? keys : keys - lead()) {}

  // Stores a four of padded keys.
  __device__ void set(int four, const uint4& keys) const { *reinterpret_cast<uint4*>(keys_ + 4 * four) = keys; }

  // Calls body(four, keys) for the thread's fours in the warp's stretch of the row. All lanes of a warp call it
  // together, equally often; past the end of the row, keys are absent.
  template <class Body>
  __device__ __forceinline__ void for_stretch(const BlockGroup& block, const Body& body) const {
    const int lane = block.rank % kWarp;
    int from, to;
    block.warp_stretch(0, fours(), from, to);
#pragma unroll 1
    for (int four = from + lane; four - lane < to; four += kWarp) body(four, four < to ? load(four) : uint4{});
  }

  // Stores a word of bytes(keys) for each four of the stretch.
  template <class Bytes>
  __device__ __forceinline__ void store_stretch(const BlockGroup& block, const Bytes& bytes) const {
    int from, to;
    block.warp_stretch(0, fours(), from, to);
#pragma unroll 2
    for (int four = from + block.rank % kWarp; four < to; four += kWarp) store(four, bytes(load(four)));
  }

 private:
  // Loads a four; kAbsent for places outside of the row.
  __device__ uint4 load(int four) const {
    const uint32_t* at = keys_ + 4 * four;
    if constexpr (kPadded) return *reinterpret_cast<const uint4*>(at);
    if (whole(four) && misalignment(at) == 0) return *reinterpret_cast<const uint4*>(at);
    return make_uint4(key(4 * four), key(4 * four + 1), key(4 * four + 2), key(4 * four + 3));
  }
  __device__ uint32_t key(int place) const { return has(place) ? keys_[place] : kAbsent; }

  Keys* keys_;
};

// One byte for each of four keys: 1 if the key has the property, else 0.
template <class Property>
__device__ __forceinline__ uint32_t bytes_of(const uint4& keys, const Property& property) {
  return (property(keys.x) ? 1u : 0u) | (property(keys.y) ? 0x100u : 0u) | (property(keys.z) ? 0x10000u : 0u) |
         (property(keys.w) ? 0x1000000u : 0u);
}

// The sum of `own`, which is 0 to 4, over the lanes before this one. `all` gets the sum over all lanes.
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

// `ties` has a byte for each of four keys that are ties. Returns the bytes of those that are among the first `wanted`
// ties of the warp's stretch. `tie` counts the ties of the stretch before these fours, and moves on past them.
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

// Takes the keys that are at least `floor`, except zeros if they are dropped.
class Taker {
 public:
  // `floor` is above 0, so absent keys are not taken.
  __device__ Taker(uint32_t floor, const Quota& quota) : floor_(floor), drop_(quota.drop_zeros && floor <= kZeroKey) {}

  // The bytes of the keys that are taken. The height key - floor_ is at most UINT32_MAX - floor_ if the key is taken.
  // If it is not taken, the height wraps around and is larger. So the lowest height belongs to the lowest taken key.
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

// Writes the mask of a row, and returns what the thread has kept. If only some ties are kept, ties are counted first.
// Each warp has a stretch, so that ties are in the order of their index. In each stretch but one, either all ties are
// kept or none.
template <class Row, class Group>
__device__ Kept write_mask(const Row& row, const Cut& cut, const Quota& quota, const Group& block) {
  const auto is_tie = [&](uint32_t key) { return key == cut.key; };
  bool all = cut.all_ties;  // of the warp's stretch
  int wanted = 0;           // else, how many ties of the stretch are kept
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
  } else {  // a loop of its own, in which most warps are: it has half of the instructions
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

// Writes false to the mask of a row.
__device__ inline void write_nothing(bool* mask, int count, const BlockGroup& block) {
  const MaskRow row(mask, count);
#pragma unroll 1
  for (int four = block.rank; four < row.fours(); four += block.size) row.store(four, 0);
}

}  // namespace d3s
