// Sorts entries in shared or global memory with the threads of one warp or of one block.
#pragma once

#include "collective.h"

namespace d3s {

// An entry has a key in the high bits and an index in the low bits. So among equal keys, lower indices come first.
using Entry = unsigned long long;

// The unroll factor of the loops below. A warp sorts here only if a segment is longer than the caller declared. This is
// rare, so for a warp, small code is preferred to fast code.
template <class Group>
constexpr int kUnrolled = std::is_same_v<Group, WarpGroup> ? 1 : 4;

// Sorts n entries. n need not be a power of two. Padding with the largest possible value would never move, since every
// exchange puts the smaller entry first. So the padding is not stored.
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
    for (int i = group.rank; i < pairs; i += group.size) {  // compares each first half with its reversed second half
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

}  // namespace d3s
