// Finds the k values with the largest variance in a group whose values are in the registers of a few lanes of a warp.
//
// Only keys are sorted, by shuffles. Moving indices too would triple the work: an exchange of keys is one shuffle and
// one minimum; an exchange of keys with indices would be two shuffles, two comparisons and two selections. The best
// split of the sorted keys gives two cuts. A value is kept if its key is below the first cut, or not below the second
// cut; ties are decided by counting equal keys.
//
// The groups of a warp may differ in length. Every step runs for all groups, even if only some of them need the step.
#pragma once

#include <cfloat>

#include "../core/order_key.h"
#include "../core/split_scan.h"
#include "collective.h"

namespace d3s {

// The key of a value that is masked out or not finite. It sorts after all other keys.
constexpr uint32_t kUnusable = UINT32_MAX;

D3S_HOST_DEVICE uint32_t usable_key(float value, bool wanted) {
  return wanted && fabsf(value) <= FLT_MAX ? order_key(value) : kUnusable;
}

template <class T>
__device__ uint32_t usable_key(const T* values, const bool* mask, int64_t i) {
  const bool wanted = !mask || mask[i];  // loaded without waiting for the load of the value
  return usable_key(to_float(values[i]), wanted);
}

// The number of keys in a lane. With 4 keys, a warp holds two groups of 64 values, and half of the sort's steps move
// nothing between lanes. With 2 keys, a group would take a third more instructions. With 8 keys, half of the schedulers
// would have no warp if there are 1,024 groups.
constexpr int kPerLane = 4;

// Of the first `usable` sorted entries, the first `low` and the last `high` are kept.
struct Ends {
  int64_t low, high, usable;

  D3S_HOST_DEVICE bool keeps(int64_t rank) const { return rank < low || (rank >= usable - high && rank < usable); }
};

// The kLanes neighbouring lanes that hold a group. All lanes of the warp take part in every call. Before the sort, key
// r of a lane belongs to the value at index `rank + r * kLanes`, so that neighbouring lanes load neighbouring values.
// After the sort, key r is at position `rank * kPerLane + r` of the sorted keys.
template <int kLanes>
struct Lanes {
  static constexpr int kCapacity = kLanes * kPerLane;

  int rank, first;  // `first` is the lane with rank 0 in this lane's group

  __device__ Lanes() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    rank = lane % kLanes, first = lane - rank;
  }

  // ---- communication ---------------------------------------------------------------------------------------------

  // Returns one bit for each lane of the warp. The bits of other groups are 0.
  __device__ unsigned ballot(bool predicate) const {
    return __ballot_sync(kAllLanes, predicate) & (kAllLanes >> (kWarp - kLanes) << first);
  }

  // Returns the sum over the lanes before this lane if kBefore is true, else over the lanes after this lane.
  template <bool kBefore>
  __device__ double sum_of_others(double value) const {
    double sum = 0.0;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {  // `value` is the sum over an aligned block of `step` lanes
      const double other = __shfl_xor_sync(kAllLanes, value, step);
      if (((rank & step) != 0) == kBefore) sum += other;
      value += other;
    }
    return sum;
  }

  __device__ double largest(double value) const {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) value = Max()(value, __shfl_xor_sync(kAllLanes, value, step));
    return value;
  }

  // Returns the sorted key at position `place`, which must be the same for all lanes of the group. Positions from
  // kCapacity on wrap around to the start of the group.
  __device__ uint32_t at(const uint32_t (&sorted)[kPerLane], int place) const {
    const bool odd = place & 1, upper = place & 2;
    const uint32_t lower = odd ? sorted[1] : sorted[0], higher = odd ? sorted[3] : sorted[2];
    return __shfl_sync(kAllLanes, upper ? higher : lower, place / kPerLane, kLanes);
  }

  // Sets `keys` to the sorted keys that are `distance` positions after the lane's own keys. `distance` must be the same
  // for all lanes of the group.
  __device__ void ahead(const uint32_t (&sorted)[kPerLane], unsigned distance, uint32_t (&keys)[kPerLane]) const {
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) keys[r] = sorted[r];
#pragma unroll
    for (unsigned turn = 1; turn < kPerLane; turn *= 2) {
      uint32_t turned[kPerLane];
#pragma unroll
      for (int r = 0; r < kPerLane; ++r) turned[r] = distance & turn ? keys[(r + turn) % kPerLane] : keys[r];
#pragma unroll
      for (int r = 0; r < kPerLane; ++r) keys[r] = turned[r];
    }
#pragma unroll
    for (int r = 0; r < kPerLane; ++r)
      keys[r] = __shfl_sync(kAllLanes, keys[r], rank + static_cast<int>((distance + r) / kPerLane), kLanes);
  }

  // ---- sort ------------------------------------------------------------------------------------------------------

  // Compares the keys at positions i and i ^ flip, for each position i, and puts the smaller key first.
  __device__ void exchange(uint32_t (&keys)[kPerLane], int flip, int highest_bit) const {
    uint32_t others[kPerLane];
    const int lanes = flip / kPerLane;
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      const uint32_t other = keys[r ^ (flip % kPerLane)];
      others[r] = lanes > 0 ? __shfl_xor_sync(kAllLanes, other, lanes) : other;
    }
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      const bool second = lanes > 0 ? (rank & highest_bit / kPerLane) != 0 : (r & highest_bit) != 0;
      keys[r] = second ? max(keys[r], others[r]) : min(keys[r], others[r]);
    }
  }

  __device__ void sort(uint32_t (&keys)[kPerLane]) const {
#pragma unroll
    for (int half = 1; half < kCapacity; half *= 2) {  // merges two sorted halves, the second half in reverse
      exchange(keys, 2 * half - 1, half);
#pragma unroll
      for (int stride = half / 2; stride > 0; stride /= 2) exchange(keys, stride, stride);
    }
  }

  // ---- splits ----------------------------------------------------------------------------------------------------

  // Returns how many of the k kept keys come from the low end of n sorted keys, if n > k > 1. A lane tries split i for
  // each position i of its own keys. Split i has the keys at positions below i. For each position from i to k - 1,
  // split i also has the position's partner: the key that is n - k positions later.
  __device__ int best_split(const uint32_t (&sorted)[kPerLane], int n, int k) const {
    const double shift = order_key_value(at(sorted, n / 2)), count = k;
    uint32_t partners[kPerLane];
    ahead(sorted, static_cast<unsigned>(n - k), partners);

    const int place = rank * kPerLane;
    Moments low[kPerLane + 1], high[kPerLane + 1];  // low[r]: over keys before r; high[r]: over partners from r on
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      low[r + 1] = low[r];
      low[r + 1].add(place + r < k ? order_key_value(sorted[r]) - shift : 0.0);
    }
#pragma unroll
    for (int r = kPerLane - 1; r >= 0; --r) {
      high[r] = high[r + 1];
      high[r].add(place + r < k ? order_key_value(partners[r]) - shift : 0.0);
    }
    Moments others;
    others.sum = sum_of_others<true>(low[kPerLane].sum) + sum_of_others<false>(high[0].sum);
    others.square = sum_of_others<true>(low[kPerLane].square) + sum_of_others<false>(high[0].square);

    double spread[kPerLane], best = -HUGE_VAL;
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      const Moments own = {low[r].sum + high[r].sum, low[r].square + high[r].square};
      spread[r] = place + r <= k ? split_spread(others, own, count) : -HUGE_VAL;
      best = Max()(best, spread[r]);
    }
    const double equal = equal_spread(largest(best));
    int chosen = 0;
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      const int last = kWarp - 1 - __clz(static_cast<int>(ballot(spread[r] >= equal))) - first;
      chosen = max(chosen, last * kPerLane + r);
    }
    return chosen;
  }

  __device__ Ends find_ends(const uint32_t (&sorted)[kPerLane], int usable, int64_t keep) const {
    const int k = static_cast<int>(min(keep, static_cast<int64_t>(kCapacity)));
    const int split = best_split(sorted, usable, k);
    if (usable <= k) return {usable, 0, usable};
    const int low = k <= 1 ? k : split;  // a single value has no variance: keep the lowest
    return {low, k - low, usable};
  }

  // ---- marks -----------------------------------------------------------------------------------------------------

  // Marks the `number` smallest keys. Among equal keys, lower indices come first.
  __device__ void mark_first(const uint32_t (&keys)[kPerLane], const uint32_t (&sorted)[kPerLane], int number,
                             bool (&marks)[kPerLane]) const {
    const uint32_t next = at(sorted, number), cut = number < kCapacity ? next : kUnusable;
    unsigned equal[kPerLane];
    int left = number;  // how many of the keys equal to the cut are still to be marked
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      equal[r] = ballot(keys[r] == cut);
      left -= __popc(ballot(keys[r] < cut));
    }
    const unsigned before = (1u << (first + rank)) - 1;
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      marks[r] = keys[r] < cut || (keys[r] == cut && __popc(equal[r] & before) < left);
      left -= __popc(equal[r]);
    }
  }

  // Marks the `keep` keys with the largest variance.
  __device__ void select(const uint32_t (&keys)[kPerLane], int64_t keep, bool (&marks)[kPerLane]) const {
    uint32_t sorted[kPerLane];
    int usable = 0;
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) {
      sorted[r] = keys[r];
      usable += __popc(ballot(keys[r] != kUnusable));
    }
    sort(sorted);
    const Ends ends = find_ends(sorted, usable, keep);
    bool from_low[kPerLane], not_from_high[kPerLane];
    mark_first(keys, sorted, static_cast<int>(ends.low), from_low);
    mark_first(keys, sorted, static_cast<int>(ends.usable - ends.high), not_from_high);
#pragma unroll
    for (int r = 0; r < kPerLane; ++r) marks[r] = keys[r] != kUnusable && (from_low[r] || !not_from_high[r]);
  }
};

}  // namespace d3s
