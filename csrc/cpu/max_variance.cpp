// max_variance_select: of each segment the k values with the largest variance. Sort, try every split, mark both ends.
#include <algorithm>
#include <cmath>

#include "../core/order_key.h"
#include "../core/split_scan.h"
#include "../ops/rollouts.h"
#include "../torch_abi.h"
#include "order_key_loops.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 1024;      // values; work for a thread
constexpr int64_t kRankSort = 256;    // up to this length, comparing all keys with all, vectorised, is fastest
constexpr int64_t kRadixSort = 1024;  // from this length on, three passes over the keys are fastest
constexpr int kDigit = 11;            // bits of a pass: 32 in three, with tables that stay in the first-level cache
constexpr uint32_t kBuckets = 1u << kDigit;

// One integer to sort by: a value's order key in the high bits, its index in the low ones, so that ties go to the lower
// index. Unusable values have no entry.
using Entry = uint64_t;

Entry entry(uint32_t key, int64_t index) { return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(index); }
double value_of(Entry e) { return order_key_value(static_cast<uint32_t>(e >> 32)); }
int64_t index_of(Entry e) { return static_cast<int64_t>(e & 0xffffffffu); }

// The sorts get entries in the order of their index, and leave those with equal keys in this order.

void rank_sort(std::vector<Entry>& entries, std::vector<Entry>& spare) {
  const int64_t n = static_cast<int64_t>(entries.size());
  uint32_t keys[kRankSort] = {}, place[kRankSort];
  uint8_t taken[kRankSort] = {};  // how many equal keys came before; fewer than kRankSort
  for (int64_t i = 0; i < n; ++i) keys[i] = static_cast<uint32_t>(entries[i] >> 32);
  D3S_PICK_VARIANT(order_key_loops).count_below(keys, n, place);
  spare.resize(n);
  for (int64_t i = 0; i < n; ++i) spare[place[i] + taken[place[i]]++] = entries[i];
  entries.swap(spare);
}

void radix_sort(std::vector<Entry>& entries, std::vector<Entry>& spare) {
  const size_t n = entries.size();
  spare.resize(n);
  for (int shift = 32; shift < 64; shift += kDigit) {
    uint32_t position[kBuckets + 1] = {};
    for (const Entry e : entries) ++position[(e >> shift & (kBuckets - 1)) + 1];
    for (uint32_t b = 0; b < kBuckets; ++b) position[b + 1] += position[b];
    for (const Entry e : entries) spare[position[e >> shift & (kBuckets - 1)]++] = e;
    entries.swap(spare);
  }
}

// How many of the kept k come from the low end of n sorted entries. n must be above k.
int64_t best_split(const std::vector<Entry>& sorted, int64_t k, std::vector<Moments>& high) {
  const int64_t n = static_cast<int64_t>(sorted.size());
  const double shift = value_of(sorted[n / 2]);
  high.resize(k + 1);  // high[j]: moments of the j largest values
  high[0] = {};
  for (int64_t j = 0; j < k; ++j) {
    high[j + 1] = high[j];
    high[j + 1].add(value_of(sorted[n - 1 - j]) - shift);
  }
  const double count = static_cast<double>(k);
  double best = -HUGE_VAL;
  Moments low;
  for (int64_t i = 0; i <= k; ++i) {
    best = std::max(best, split_spread(low, high[k - i], count));
    low.add(value_of(sorted[i]) - shift);
  }
  low = {};
  int64_t chosen = 0;
  for (int64_t i = 0; i <= k; ++i) {
    if (split_spread(low, high[k - i], count) >= equal_spread(best)) chosen = i;
    low.add(value_of(sorted[i]) - shift);
  }
  return chosen;
}

struct Room {  // reused from segment to segment
  std::vector<Entry> entries, spare;
  std::vector<Moments> high;
};

template <class T>
void select_segment(const T* values, const bool* mask, int64_t n, int64_t k, Room& room, bool* out) {
  std::vector<Entry>& entries = room.entries;
  entries.resize(n);
  int64_t usable = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(values[i]);
    entries[usable] = entry(order_key(value), i);
    usable += (!mask || mask[i]) && std::isfinite(value);
  }
  entries.resize(usable);
  std::fill_n(out, n, false);
  if (usable <= k) {
    for (const Entry e : entries) out[index_of(e)] = true;
    return;
  }
  if (usable <= kRankSort)
    rank_sort(entries, room.spare);
  else if (usable < kRadixSort)
    std::sort(entries.begin(), entries.end());
  else
    radix_sort(entries, room.spare);
  const int64_t low = best_split(entries, k, room.high);
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
