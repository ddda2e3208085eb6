// max_variance_select marks the k values with the largest variance in each segment. It sorts the values and tries every
// split (core/split_scan.h). For the best split, it marks the values at both ends.
#include <algorithm>
#include <cmath>
#include <utility>

#include "../core/order_key.h"
#include "../core/split_scan.h"
#include "../ops/rollouts.h"
#include "../torch_abi.h"
#include "order_key_loops.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 1024;      // the minimum number of values for a thread
constexpr int64_t kRankSort = 256;    // up to this length, comparing each key with all keys (vectorised) is fastest
constexpr int64_t kRadixSort = 1024;  // from this length on, a radix sort with three passes over the keys is fastest
constexpr int kDigit = 11;            // bits per pass: three passes cover 32 bits, and the tables fit in the L1 cache
constexpr int kPasses = 3;
constexpr uint32_t kBuckets = 1u << kDigit;

constexpr uint32_t kUnusable = UINT32_MAX;  // the key of a value that is masked out or not finite

// The integer that is sorted: a value's order key in the high 32 bits, and the value's index in the low 32 bits. So
// among equal values, lower indices come first.
using Entry = uint64_t;

Entry entry(uint32_t key, int64_t index) { return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(index); }
double value_of(Entry e) { return order_key_value(static_cast<uint32_t>(e >> 32)); }
int64_t index_of(Entry e) { return static_cast<int64_t>(e & 0xffffffffu); }
uint32_t digit_of(Entry e, int pass) { return e >> (32 + pass * kDigit) & (kBuckets - 1); }

// Both sorts below are stable, so equal values stay in the order of their indices.

// Sorts n keys. Unusable keys come last.
void rank_sort(const uint32_t* keys, int64_t n, std::vector<Entry>& sorted) {
  uint32_t place[kRankSort];
  uint8_t taken[kRankSort] = {};  // the number of earlier equal keys; below kRankSort, so 8 bits are enough
  order_key_loops().count_below(keys, n, place);
  for (int64_t i = 0; i < n; ++i) sorted[place[i] + taken[place[i]]++] = entry(keys[i], i);
}

void radix_sort(std::vector<Entry>& entries, std::vector<Entry>& spare) {
  const size_t n = entries.size();
  spare.resize(n);
  uint32_t position[kPasses][kBuckets] = {};
  for (const Entry e : entries)
    for (int pass = 0; pass < kPasses; ++pass) ++position[pass][digit_of(e, pass)];
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t begin = 0;
    for (uint32_t& bucket : position[pass]) begin += std::exchange(bucket, begin);
    for (const Entry e : entries) spare[position[pass][digit_of(e, pass)]++] = e;
    entries.swap(spare);
  }
}

struct Room {  // memory that is reused from segment to segment
  std::vector<uint32_t> keys;
  std::vector<Entry> entries, spare;
  std::vector<Moments> high;
  std::vector<double> spreads;
};

// Returns how many of the k entries of the best split are at the low end. `sorted` must have more than k entries.
int64_t best_split(const std::vector<Entry>& sorted, int64_t k, Room& room) {
  const int64_t n = static_cast<int64_t>(sorted.size());
  const double shift = value_of(sorted[n / 2]);
  const double count = static_cast<double>(k);
  room.high.resize(k + 1);  // high[j]: the moments of the j largest values
  room.spreads.resize(k + 1);
  Moments high, low;
  for (int64_t j = 0; j <= k; ++j) {
    room.high[j] = high;
    high.add(value_of(sorted[n - 1 - j]) - shift);
  }
  double best = -HUGE_VAL;
  for (int64_t i = 0; i <= k; ++i) {
    const double spread = split_spread(low, room.high[k - i], count);
    room.spreads[i] = spread;
    best = std::max(best, spread);
    low.add(value_of(sorted[i]) - shift);
  }
  const double equal = equal_spread(best);
  int64_t chosen = k;
  while (chosen > 0 && room.spreads[chosen] < equal) --chosen;
  return chosen;
}

template <class T>
void select_segment(const T* values, const bool* mask, int64_t n, int64_t k, Room& room, bool* out) {
  std::vector<Entry>& entries = room.entries;
  std::vector<uint32_t>& keys = room.keys;
  entries.resize(n);
  keys.resize(n + kKeysPadding);
  const int64_t usable = order_key_loops().finite(Tag<T>())(values, mask, n, keys.data());
  if (usable <= k) {
    for (int64_t i = 0; i < n; ++i) out[i] = keys[i] != kUnusable;
    return;
  }
  std::fill_n(out, n, false);
  if (n <= kRankSort) {
    rank_sort(keys.data(), n, entries);
    entries.resize(usable);
  } else {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      entries[count] = entry(keys[i], i);
      count += keys[i] != kUnusable;
    }
    entries.resize(usable);
    if (usable < kRadixSort)
      std::sort(entries.begin(), entries.end());
    else
      radix_sort(entries, room.spare);
  }
  const int64_t low = best_split(entries, k, room);
  for (int64_t i = 0; i < low; ++i) out[index_of(entries[i])] = true;
  for (int64_t i = usable - (k - low); i < usable; ++i) out[index_of(entries[i])] = true;
}

}  // namespace

void max_variance_mask(const SegmentedValues& values, const Keep& keep, bool* out, Device&) {
  const Segments& segments = values.segments;
  dispatch_float(values.type, [&](auto tag) {
    const auto* p = static_cast<const typename decltype(tag)::type*>(values.values);
    parallel_segments(segments, values.total, kGrain, [&](int64_t first, int64_t last) {
      Room room;
      for (int64_t segment = first; segment < last; ++segment) {
        const int64_t begin = segments.begin(segment), n = segments.end(segment) - begin;
        select_segment(p + begin, values.mask ? values.mask + begin : nullptr, n, keep.of(n), room, out + begin);
      }
    });
  });
}

}  // namespace d3s
