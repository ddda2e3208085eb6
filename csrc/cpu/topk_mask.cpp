// The selection of topk_mask, select_tokens and select_tokens_from_logits. It keeps exactly k scores of each segment.
// Among equal scores, lower indices are kept first.
//
// The scores of a segment become integer keys, and bisection finds the k-th largest key. Each step counts the keys that
// are at least a pivot. Counting runs at the speed of the cache, and some twenty pivots are enough. If a segment is too
// long for the cache, a sample first gives two keys that most likely enclose the k-th largest key, and only the few
// keys between these two keys are bisected. The few passes over such a segment recompute its keys piece by piece, which
// is cheaper than storing the keys.
#include <cmath>

#include "segment_keys.h"

namespace d3s {
namespace {

constexpr int64_t kBisect = 32768;  // up to this many keys (128 KiB), the search bisects without narrowing first
constexpr int64_t kSample = 1024;

// The search for the k-th largest of some keys. The wanted key lies in [low, high], together with `inside` - 1 other
// keys.
struct Search {
  const OrderKeyLoops& loops;
  SegmentKeys keys;
  int64_t inside, k;  // k: the wanted key is the k-th largest of `keys`
  uint32_t low = 1, high = kLargestKey;

  // Returns two keys of a sorted sample, four standard deviations below and above the wanted key's expected index.
  std::pair<uint32_t, uint32_t> guess() const {
    uint32_t sample[kSample];
    const int64_t step = keys.n / kSample;
    for (int64_t i = 0; i < kSample; ++i) sample[i] = keys.at(i * step + i % step);
    std::sort(sample, sample + kSample);
    const double rank = static_cast<double>(keys.n - k) / static_cast<double>(keys.n) * kSample;
    const double spread = 4 * std::sqrt(rank * (kSample - rank) / kSample) + 2;
    const uint32_t from = rank < spread ? low : sample[static_cast<int64_t>(rank - spread)];
    const uint32_t to = rank + spread >= kSample ? high : sample[static_cast<int64_t>(rank + spread)];
    return {std::clamp(from, low, high), std::clamp(to, low, high)};
  }

  // If the wanted key is in [from, to], copies all keys in this range to `spare`, continues with the copies, and
  // returns true. Otherwise, moves `low` or `high` past the range and returns false.
  bool narrow(uint32_t from, uint32_t to, uint32_t* spare) {
    std::vector<int64_t> within(pieces_of(keys.n)), above(pieces_of(keys.n));
    keys.for_pieces([&](int64_t piece, int64_t a, int64_t b, const uint32_t* p) {
      above[piece] = loops.count_from(p, b - a, to + 1);
      within[piece] = loops.copy_between(p, b - a, from, to, spare + a);
    });
    const int64_t more = total(above), between = total(within);
    if (k <= more) return low = to + 1, false;
    if (k > more + between) return high = from - 1, false;
    int64_t filled = 0;
    for (size_t piece = 0; piece < within.size(); ++piece) {
      std::copy_n(spare + piece * kPiece, within[piece], spare + filled);
      filled += within[piece];
    }
    low = from, high = to, k -= more, inside = between;
    keys = {keys.loops, between, spare};
    return true;
  }

  Cut bisect() {
    int64_t above = 0;  // the number of keys above `high`; always inside + above >= k > above
    while (low < high && inside + above > k) {
      const uint32_t middle = low + (high - low) / 2 + 1;
      const int64_t from_middle =
          keys.count([&](const uint32_t* p, int64_t n) { return loops.count_from(p, n, middle); });
      if (from_middle >= k) {
        low = middle;
        inside = from_middle - above;
      } else {
        high = middle - 1;
        inside -= from_middle - above;
        above = from_middle;
      }
    }
    return {low, k - above, inside + above == k};
  }
};

// Returns the cut that keeps k keys, where 1 <= k <= present. `present` is the number of keys that are not 0.
Cut find_cut(const SegmentKeys& keys, int64_t present, int64_t k) {
  Search search{*keys.loops, keys, present, k};
  Keys left;
  while (search.keys.n > kBisect && search.low < search.high) {
    const int64_t before = search.keys.n;
    const auto [from, to] = search.guess();
    // The keys of the narrowed range go to new memory, since a wrong guess must not overwrite the current keys. Few
    // pages of the new memory are touched.
    Keys next = new_keys(before);
    // After a wrong guess, the search takes all keys in the new range [low, high], without another sample.
    if (!search.narrow(from, to, next.get())) search.narrow(search.low, search.high, next.get());
    left = std::move(next);
    if (search.keys.n == before) break;  // there are too few different keys to narrow further
  }
  return search.bisect();
}

struct Selected {
  int64_t count = 0;
  float threshold = INFINITY;  // the lowest kept score
};

// Writes the mask of the segment [begin, end) of `scores`. `room` is memory for the keys, or null for a long segment.
Selected select_segment(const Scores& scores, const Quota& quota, int64_t begin, int64_t end, uint32_t* room,
                        bool* mask) {
  const OrderKeyLoops& loops = order_key_loops();
  SegmentKeys keys{&loops, end - begin, nullptr, &scores, begin};
  int64_t present = 0;
  if (room) {
    present = make_keys(scores, loops, begin, end, room);
    keys.stored = room;
  } else {
    present = keys.count([&](const uint32_t* p, int64_t n) { return loops.count_from(p, n, 1); });
  }
  if (present == 0) {
    std::fill_n(mask, keys.n, false);
    return {};
  }
  const int64_t k = quota.of(present);
  const Kept kept = write_mask(keys, find_cut(keys, present, k), quota, mask);
  return {k - kept.zeros, k > kept.zeros ? order_key_value(kept.lowest) : INFINITY};
}

}  // namespace

void select_top(const Scores& scores, const Quota& quota, const Segments& segments, int64_t values, int64_t,
                const SelectionOutputs& outputs, Device&) {
  const auto run = [&](int64_t segment, uint32_t* room) {
    const int64_t begin = segments.begin(segment), end = segments.end(segment);
    const Selected selected = select_segment(scores, quota, begin, end, room, outputs.mask + begin);
    if (outputs.count) outputs.count[segment] = static_cast<int32_t>(selected.count);
    if (outputs.threshold) outputs.threshold[segment] = selected.threshold;
  };
  const auto length = [&](int64_t segment) { return segments.end(segment) - segments.begin(segment); };
  parallel_segments(segments, values, kGrain, [&](int64_t first, int64_t last) {
    int64_t longest = 0;
    for (int64_t segment = first; segment < last; ++segment)
      if (length(segment) < kLong) longest = std::max(longest, length(segment));
    const Keys room = new_keys(longest);
    for (int64_t segment = first; segment < last; ++segment)
      if (length(segment) < kLong) run(segment, room.get());
  });
  for (int64_t segment = 0; segment < segments.count; ++segment)  // long segments one by one, each on all threads
    if (length(segment) >= kLong) run(segment, nullptr);
}

}  // namespace d3s
