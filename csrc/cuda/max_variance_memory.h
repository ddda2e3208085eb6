// The subset of a segment with the largest variance, where its sorted keys lie in shared or global memory.
#pragma once

#include "max_variance_warp.h"

namespace d3s {

// One integer to sort by: a value's order key in the high bits, its index in the low ones, so that ties go to the lower
// index. Unusable values come last.
using Entry = unsigned long long;

D3S_HOST_DEVICE Entry entry(uint32_t key, int64_t index) { return Entry{key} << 32 | static_cast<uint32_t>(index); }
D3S_HOST_DEVICE uint32_t key_of(Entry e) { return static_cast<uint32_t>(e >> 32); }

// A warp does this for the rare segment that is longer than the caller said: its code is kept small.
template <class Group>
constexpr int kUnrolled = std::is_same_v<Group, WarpGroup> ? 1 : 4;

// ---- splits ------------------------------------------------------------------------------------------------------

// Splits of a thread in a round.
template <class Group>
constexpr int kSplits = std::is_same_v<Group, WarpGroup> ? 1 : 4;

// How many of the kept k come from the low end of n sorted keys, n > k > 1. `at(i)` is the i-th key.
//
// Split i has the first i and the last k - i keys; split i + 1 has key i in place of key n - k + i. So the moments of
// all splits are a running sum of such exchanges. The group takes them in rounds, in which each thread tries a few
// neighbouring splits: then the loads of a warp are of neighbours too.
template <class Keys, class Group>
__device__ int best_split(const Keys& at, int n, int k, const Group& group) {
  [[maybe_unused]] constexpr int kTurns = kUnrolled<Group>, kEach = kSplits<Group>;
  const float shift = order_key_value(at(n / 2));
  const double count = k;
  const auto shifted = [&](float value) { return static_cast<double>(value) - shift; };
  const auto exchange = [&](Moments& moments, float to, float from) {
    const double in = shifted(to), out = shifted(from);
    moments.sum += in - out;
    moments.square += in * in - out * out;
  };
  Moments high;
#pragma unroll kTurns
  for (int i = group.rank; i < k; i += group.size) high.add(shifted(order_key_value(at(n - k + i))));
  const Moments last_k = {group.reduce(high.sum, Sum()), group.reduce(high.square, Sum())};

  const auto for_splits = [&](const auto& body) {
    Moments start = last_k;  // of the round
    for (int from = 0; from < k; from += group.size * kEach) {
      const int first = from + group.rank * kEach;
      float in[kEach], out[kEach];  // beyond k an exchange of the same values
      Moments moved, all;
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const bool exchanged = first + r < k;
        in[r] = exchanged ? order_key_value(at(first + r)) : shift;
        out[r] = exchanged ? order_key_value(at(n - k + first + r)) : shift;
        exchange(moved, in[r], out[r]);
      }
      Moments own = {start.sum + group.exclusive_sum(moved.sum, all.sum),
                     start.square + group.exclusive_sum(moved.square, all.square)};
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        if (first + r < k) body(first + r, split_spread(own, Moments(), count));
        exchange(own, in[r], out[r]);
      }
      start = {start.sum + all.sum, start.square + all.square};
    }
    body(k, split_spread(start, Moments(), count));
  };
  double best = -HUGE_VAL;
  for_splits([&](int, double spread) { best = spread > best ? spread : best; });
  const double equal = equal_spread(group.reduce(best, Max()));
  int chosen = 0;
  for_splits([&](int i, double spread) { chosen = spread >= equal ? i : chosen; });
  return group.reduce(chosen, Max());
}

template <class Keys, class Group>
__device__ Ends find_ends(const Keys& at, int usable, int64_t keep, const Group& group) {
  if (usable <= keep) return {usable, 0, usable};
  const int k = static_cast<int>(keep);
  if (k <= 1) return {k, 0, usable};  // a single value has no variance: keep the lowest
  const int low = best_split(at, usable, k, group);
  return {low, k - low, usable};
}

// ---- sort and mark -----------------------------------------------------------------------------------------------

// Sorts n entries, for any n. Every exchange puts the smaller entry first, so that padding with the largest entry would
// never move; it is left out.
template <class Group>
__device__ void bitonic_sort(Entry* entries, int n, const Group& group) {
  [[maybe_unused]] constexpr int kTurns = kUnrolled<Group>;
  const auto order = [&](int a, int b) {
    if (b >= n) return;
    const Entry first = entries[a], second = entries[b];
    if (second < first) entries[a] = second, entries[b] = first;
  };
  int log_padded = 0;
  while (log_padded < 31 && int64_t{1} << log_padded < n) ++log_padded;
  const int pairs = log_padded > 0 ? 1 << (log_padded - 1) : 0;
  for (int log_half = 0; log_half < log_padded; ++log_half) {
#pragma unroll kTurns
    for (int i = group.rank; i < pairs; i += group.size) {  // compares with the second half in reverse
      const int begin = i >> log_half << log_half, place = i - begin;
      order(2 * begin + place, 2 * begin + (2 << log_half) - 1 - place);
    }
    group.sync();
    for (int log_stride = log_half - 1; log_stride >= 0; --log_stride) {
#pragma unroll kTurns
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
  [[maybe_unused]] constexpr int kTurns = kUnrolled<Group>;
  int usable = 0;
#pragma unroll kTurns
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
#pragma unroll kTurns
  for (int rank = group.rank; rank < n; rank += group.size) {
    const auto index = static_cast<uint32_t>(entries[rank]);
    // Unchecked offsets may let segments overlap, and so overwrite each other's entries in global memory.
    if (index < static_cast<uint32_t>(n)) out[index] = ends.keeps(rank);
  }
}

}  // namespace d3s
