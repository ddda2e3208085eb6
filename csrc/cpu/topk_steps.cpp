// The steps of a top-K selection from segments that are spread over several ranks. This file computes what one rank
// contributes between the collectives.
#include "../ops/topk_steps.h"

#include "segment_keys.h"

namespace d3s {
namespace {

// Counts how many keys have each value of a digit. Neighbouring keys often have the same digit, and incrementing a
// counter that was just written is slow. So neighbouring keys are counted in two tables, alternately.
class DigitCounts {
 public:
  explicit DigitCounts(const Digit& digit) : digit_(digit) {
    std::fill_n(even_, digit.bins(), 0u), std::fill_n(odd_, digit.bins(), 0u);
  }
  void add(const uint32_t* keys, int64_t n) {
    for (int64_t i = 0; i + 1 < n; i += 2) {
      ++even_[digit_.bin_of(keys[i])];
      ++odd_[digit_.bin_of(keys[i + 1])];
    }
    if (n % 2 > 0) ++even_[digit_.bin_of(keys[n - 1])];
  }
  void add_to(int64_t* counts) const {
    for (int bin = 0; bin < digit_.bins(); ++bin) counts[bin] += int64_t{even_[bin]} + odd_[bin];
  }

 private:
  const Digit digit_;
  uint32_t even_[1 << Digit::kMostBits], odd_[1 << Digit::kMostBits];
};

// counts[bin] += the number of keys that start with the prefix and whose next digit has the value `bin`.
void count_piece(const uint32_t* keys, int64_t n, const Digit& digit, uint32_t prefix, int64_t* counts) {
  const OrderKeyLoops& loops = order_key_loops();
  DigitCounts found(digit);
  if (digit.is_first()) {
    found.add(keys, n);
    counts[0] -= n - loops.count_from(keys, n, kAbsent + 1);
  } else {
    // Few keys start with the prefix. These keys are first copied into one block, since a branch for each key would
    // often be mispredicted.
    constexpr int64_t kBlock = 4096;
    uint32_t followers[kBlock];
    const int below = digit.shift + digit.bits;  // the number of bits below the prefix
    const uint32_t first = prefix << below, last = first | ((uint32_t{1} << below) - 1);
    for (int64_t begin = 0; begin < n; begin += kBlock)
      found.add(followers, loops.copy_between(keys + begin, std::min(kBlock, n - begin), first, last, followers));
  }
  found.add_to(counts);
}

// Calls body(segment) for short segments in parallel, and then for long segments one by one, each on all threads.
template <class Body>
void for_segments(const SegmentedKeys& keys, const Body& body) {
  const Segments& segments = keys.segments;
  const auto is_long = [&](int64_t segment) { return segments.end(segment) - segments.begin(segment) >= kLong; };
  parallel_segments(segments, keys.total, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t segment = first; segment < last; ++segment)
      if (!is_long(segment)) body(segment);
  });
  for (int64_t segment = 0; segment < segments.count; ++segment)
    if (is_long(segment)) body(segment);
}

SegmentKeys stored_keys(const SegmentedKeys& keys, int64_t segment) {
  const int64_t begin = keys.segments.begin(segment), end = keys.segments.end(segment);
  return {&order_key_loops(), end - begin, keys.keys + begin};
}

}  // namespace

void make_order_keys(const Scores& scores, int64_t total, uint32_t* keys, Device&) {
  const OrderKeyLoops& loops = order_key_loops();
  parallel_for(total, kPiece, [&](int64_t begin, int64_t end) { make_keys(scores, loops, begin, end, keys + begin); });
}

void count_digit(const SegmentedKeys& keys, const KeySearch* searches, const Digit& digit, int64_t* counts, Device&) {
  const int64_t bins = digit.bins();
  for_segments(keys, [&](int64_t segment) {
    int64_t* out = counts + segment * bins;
    std::fill_n(out, bins, int64_t{0});
    const KeySearch& search = searches[segment];
    if (!digit.is_first() && search.k == 0) return;
    const SegmentKeys own = stored_keys(keys, segment);
    const auto prefix = static_cast<uint32_t>(search.prefix);
    if (own.n < kLong) return count_piece(own.stored, own.n, digit, prefix, out);
    std::vector<int64_t> tables(pieces_of(own.n) * bins, 0);
    own.for_pieces([&](int64_t piece, int64_t a, int64_t b, const uint32_t* p) {
      count_piece(p, b - a, digit, prefix, tables.data() + piece * bins);
    });
    for (size_t i = 0; i < tables.size(); ++i) out[i % bins] += tables[i];
  });
}

void choose_digit(KeySearch* searches, int64_t segments, const int64_t* counts, const Digit& digit, const Quota& quota,
                  Device&) {
  const int bins = digit.bins();
  for (int64_t segment = 0; segment < segments; ++segment, counts += bins) {
    KeySearch& search = searches[segment];
    if (digit.is_first()) {
      const int64_t k = quota.of(std::accumulate(counts, counts + bins, int64_t{0}));
      search = {0, k, k};
    }
    int64_t above = 0;
    for (int bin = bins; search.k > 0 && bin-- > 0; above += counts[bin]) {
      if (above + counts[bin] < search.left) continue;
      search.enter(bin, above, digit);
      break;
    }
  }
}

void mask_from_key(const SegmentedKeys& keys, const KeySearch* searches, const int64_t* ties, const Quota& quota,
                   const KeyMaskOutputs& outputs, Device&) {
  if (keys.segments.ragged()) std::fill_n(outputs.mask, keys.total, false);
  for_segments(keys, [&](int64_t segment) {
    const SegmentKeys own = stored_keys(keys, segment);
    bool* mask = outputs.mask + keys.segments.begin(segment);
    Kept kept = {0, UINT32_MAX};
    if (searches[segment].k > 0)
      kept =
          write_mask(own, {static_cast<uint32_t>(searches[segment].prefix), std::max<int64_t>(0, ties[segment]), false},
                     quota, mask);
    else
      std::fill_n(mask, own.n, false);
    outputs.zeros[segment] = kept.zeros;
    outputs.lowest[segment] = kept.lowest;
  });
}

}  // namespace d3s
