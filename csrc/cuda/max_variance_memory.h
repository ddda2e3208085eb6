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

// How many of the kept k come from the low end of n sorted keys, n > k > 1. `at(i)` is the i-th key.
//
// Split i has the first i and the last k - i keys; split i + 1 has key i in place of key n - k + i. So the moments of
// all splits are a running sum of such exchanges. Each thread tries a stretch of the splits.
template <class Keys, class Group>
__device__ int best_split(const Keys& at, int n, int k, const Group& group) {
  [[maybe_unused]] constexpr int kTurns = kUnrolled<Group>;
  const double shift = order_key_value(at(n / 2)), count = k;
  const auto value = [&](int i) { return static_cast<double>(order_key_value(at(i))) - shift; };
  const auto exchange = [&](Moments& moments, int split) {
    const double in = value(split), out = value(n - k + split);
    moments.sum += in - out;
    moments.square += in * in - out * out;
  };
  const int each = k / group.size + 1, first = min(group.rank * each, k + 1), last = min(first + each, k + 1);

  Moments high, own;
#pragma unroll kTurns
  for (int i = first; i < min(last, k); ++i) {
    high.add(value(n - k + i));
    exchange(own, i);
  }
  const Moments start = {group.reduce(high.sum, Sum()) + group.exclusive_sum(own.sum),
                         group.reduce(high.square, Sum()) + group.exclusive_sum(own.square)};
  const auto for_splits = [&](const auto& body) {
    Moments moments = start;
#pragma unroll kTurns
    for (int i = first; i < last; ++i) {
      body(i, split_spread(moments, Moments(), count));
      if (i < k) exchange(moments, i);
    }
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
