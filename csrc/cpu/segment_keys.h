// Access to the keys of a segment on a CPU. The keys are either stored, or recomputed in each pass. write_mask writes
// the mask of a segment whose k-th largest key is known.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "../core/cut.h"
#include "../ops/topk_mask.h"
#include "../torch_abi.h"
#include "order_key_loops.h"

namespace d3s {

constexpr int64_t kGrain = 8192;       // the minimum number of scores for a thread
constexpr int64_t kPiece = 65536;      // the number of keys in a piece: 256 KiB, which fit in the L2 cache
constexpr int64_t kLong = 2 * kPiece;  // from this length on, all threads share a segment, and topk_mask stores no keys

using Keys = std::unique_ptr<uint32_t[]>;  // a vector would first fill the memory with zeros

inline Keys new_keys(int64_t n) { return Keys(new uint32_t[n > 0 ? n : 1]); }

inline int64_t pieces_of(int64_t n) { return (n + kPiece - 1) / kPiece; }

inline int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// ---- scores ----------------------------------------------------------------------------------------------------

// Writes the keys of the scores [begin, end), and returns how many of these scores are present.
inline int64_t make_keys(const Scores& scores, const OrderKeyLoops& loops, int64_t begin, int64_t end, uint32_t* keys) {
  return dispatch_float(scores.type, [&](auto tag) {
    const auto from = loops.from(tag);
    const auto* values = static_cast<const typename decltype(tag)::type*>(scores.values);
    const auto part = [&](int64_t a, int64_t b, const float* each, float one) {
      return from(values + a, each ? each + a : nullptr, one, scores.mask ? scores.mask + a : nullptr, b - a,
                  keys + (a - begin));
    };
    switch (scores.kind) {
      case Scores::Advantages::kNone:
        return part(begin, end, nullptr, 1.f);
      case Scores::Advantages::kOne:
        return part(begin, end, nullptr, *scores.advantages);
      case Scores::Advantages::kPerToken:
        return part(begin, end, scores.advantages, 0.f);
      default:
        break;
    }
    int64_t present = 0;
    for (int64_t i = scores.sequences.find(begin), a = begin; a < end; ++i) {
      const int64_t b = std::min(end, scores.sequences.end(i));
      if (b <= a) continue;
      present += part(a, b, nullptr, scores.advantages[i]);
      a = b;
    }
    return present;
  });
}

// The keys of one segment. If `stored` is null, the keys are computed from `scores` in each pass.
struct SegmentKeys {
  const OrderKeyLoops* loops;
  int64_t n;
  const uint32_t* stored;
  const Scores* scores = nullptr;
  int64_t begin = 0;

  uint32_t at(int64_t i) const {
    uint32_t key = stored ? stored[i] : kAbsent;
    if (!stored) make_keys(*scores, *loops, begin + i, begin + i + 1, &key);
    return key;
  }

  // Returns the sum of body(keys, n) over all pieces.
  template <class Count>
  int64_t count(const Count& body) const {
    if (stored && n <= kPiece) return body(stored, n);  // without an allocation, since bisection calls count() often
    std::vector<int64_t> counts(pieces_of(n));
    for_pieces([&](int64_t piece, int64_t a, int64_t b, const uint32_t* p) { counts[piece] = body(p, b - a); });
    return total(counts);
  }

  // Calls body(piece, a, b, keys) for each piece [a, b), where `keys` points to the keys of the piece. If the segment
  // is long, the pieces are divided among all threads.
  template <class Body>
  void for_pieces(const Body& body) const {
    const int64_t pieces = pieces_of(n);
    parallel_for(pieces, n < kLong ? pieces : 1, [&](int64_t first, int64_t last) {
      const Keys room = stored ? nullptr : new_keys(kPiece);
      for (int64_t piece = first; piece < last; ++piece) {
        const int64_t a = piece * kPiece, b = std::min(n, a + kPiece);
        if (!stored) make_keys(*scores, *loops, begin + a, begin + b, room.get());
        body(piece, a, b, stored ? stored + a : room.get());
      }
    });
  }
};

using Cut = CutOf<int64_t>;
using Kept = KeptOf<int64_t>;

inline Kept write_mask(const SegmentKeys& keys, const Cut& cut, const Quota& quota, bool* mask) {
  const OrderKeyLoops& loops = *keys.loops;
  const int64_t pieces = pieces_of(keys.n);
  std::vector<int64_t> surplus(pieces, 0);      // for each piece: how many of its ties are not kept
  std::vector<uint32_t> from(pieces, cut.key);  // for each piece: the lowest key that it may keep
  if (!cut.all_ties) {  // ties are kept from the left: all in the first pieces, some in one piece, none in later pieces
    keys.for_pieces([&](int64_t piece, int64_t a, int64_t b, const uint32_t* p) {
      surplus[piece] = loops.count_from(p, b - a, cut.key) - loops.count_from(p, b - a, cut.key + 1);
    });
    int64_t left = cut.ties;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t taken = std::min(left, surplus[piece]);
      left -= taken, surplus[piece] -= taken;
      if (taken == 0) from[piece] = cut.key + 1;
    }
  }
  std::vector<int64_t> zeros(pieces, 0);
  std::vector<uint32_t> lowest(pieces);
  keys.for_pieces([&](int64_t piece, int64_t a, int64_t b, const uint32_t* p) {
    bool* out = mask + a;
    loops.write_mask(p, b - a, cut.key, out);
    lowest[piece] = loops.lowest_from(p, b - a, from[piece]);
    for (int64_t i = b - a, extra = surplus[piece]; extra > 0;)
      if (p[--i] == cut.key) out[i] = false, --extra;
    if (!quota.drop_zeros || cut.key > kZeroKey) return;
    for (int64_t i = 0; i < b - a; ++i)
      if (out[i] && p[i] == kZeroKey) out[i] = false, ++zeros[piece];
    if (lowest[piece] == kZeroKey) lowest[piece] = loops.lowest_from(p, b - a, kZeroKey + 1);
  });
  return {total(zeros), lowest.empty() ? UINT32_MAX : *std::min_element(lowest.begin(), lowest.end())};
}

}  // namespace d3s
