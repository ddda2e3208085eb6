// Top-K selection in steps, for a segment that lies on several ranks: what one rank does between the collectives.
//
// Only the device may know the lengths of segments, so blocks share the keys evenly: each goes through the segments in
// its piece. All counts are integers, so the order in which atomics add them does not matter.
//
//   launch                      kernel                    reads                                  -> writes
//   topk_order_keys             order_keys_of_piece       scores                                 -> keys
//   topk_count_digit            count_digit_of_piece      keys, searches                         -> counts
//   topk_choose_digit_          choose_digit_of_segment   counts of all ranks, searches          -> searches
//   topk_mask_from_key (ties)   count_ties_of_piece       keys, searches                         -> ties_of_pieces
//   topk_mask_from_key          mask_of_piece             keys, searches, ties, ties_of_pieces   -> mask, zeros, lowest
#include "../ops/topk_steps.h"

#include "key_mask.h"

namespace d3s {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kPiece = 16384;  // 256 pieces for 4 million keys: two for each multiprocessor of an H200
constexpr int kChooseThreads = 256;

using Count = unsigned long long;  // atomics take no int64_t

D3S_HOST_DEVICE Scores scores_of(const SegmentedKeys& keys) {
  Scores scores;
  scores.keys = keys.keys;
  return scores;
}

struct Piece {
  int64_t begin, end;

  __device__ explicit Piece(int64_t total)
      : begin(int64_t{blockIdx.x} * kPiece), end(begin + kPiece < total ? begin + kPiece : total) {}

  // Calls body(segment, begin, end) for the part of each segment in this piece. Unchecked offsets may give wrong parts,
  // but none outside of the piece.
  template <class Body>
  __device__ void for_segments(const Segments& segments, const Body& body) const {
    int64_t from = begin;
    for (int64_t i = segments.find(begin); i < segments.count && from < end; ++i) {
      const int64_t first = segments.begin(i), last = segments.end(i) < end ? segments.end(i) : end;
      if (first > from) from = first;
      if (last <= from) continue;
      body(i, from, last);
      from = last;
    }
  }
};

struct Shared {
  uint32_t histogram[1 << Digit::kMostBits];
  alignas(16) unsigned char group[BlockGroup::kSharedBytes];
};

__global__ void __launch_bounds__(kThreads)
    order_keys_of_piece(const __grid_constant__ Scores scores, int64_t total, uint32_t* keys) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  const Piece piece(total);
  ScoreKeys source(scores);
  for_keys(source, piece.begin, piece.end, block, [&](int64_t position, uint32_t key) { keys[position] = key; });
}

__global__ void __launch_bounds__(kThreads)
    count_digit_of_piece(const __grid_constant__ SegmentedKeys keys, const KeySearch* searches,
                         const __grid_constant__ Digit digit, Count* counts) {
  Shared& shared = *dynamic_shared<Shared>();
  const BlockGroup block(shared.group);
  const Scores scores = scores_of(keys);
  ScoreKeys source(scores);
  const int bins = digit.bins();
  Piece(keys.total).for_segments(keys.segments, [&](int64_t segment, int64_t begin, int64_t end) {
    const bool first = digit.is_first();
    if (!first && searches[segment].k == 0) return;
    const uint32_t prefix = first ? 0 : static_cast<uint32_t>(searches[segment].prefix);
    for (int i = block.rank; i < bins; i += block.size) shared.histogram[i] = 0;
    block.sync();
    for_keys(source, begin, end, block, [&](int64_t, uint32_t key) {
      if (key != kAbsent && digit.follows(key, prefix)) atomicAdd(&shared.histogram[digit.bin_of(key)], 1u);
    });
    block.sync();
    for (int i = block.rank; i < bins; i += block.size)
      if (shared.histogram[i] > 0) atomicAdd(&counts[segment * bins + i], Count{shared.histogram[i]});
  });
}

// A block for each segment. Every thread has some bins; thread 0 has the highest.
__global__ void __launch_bounds__(kChooseThreads)
    choose_digit_of_segment(KeySearch* searches, const int64_t* counts, const __grid_constant__ Digit digit,
                            const __grid_constant__ Quota quota) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  const int bins = digit.bins(), each = static_cast<int>(ceil_div(bins, block.size));
  const int from = block.rank * each, to = from + each < bins ? from + each : bins;
  counts += int64_t{blockIdx.x} * bins;
  KeySearch search = searches[blockIdx.x];
  int64_t own = 0;
  for (int i = from; i < to; ++i) own += counts[bins - 1 - i];
  if (digit.is_first()) {
    const int64_t k = quota.of(block.reduce(own, Sum()));
    search = {0, k, k};
  }
  int64_t above = block.exclusive_sum(own);  // its barriers keep the store to `searches` after all loads
  if (search.k == 0) {
    if (block.rank == 0) searches[blockIdx.x] = search;
    return;
  }
  if (above >= search.left || search.left > above + own) return;
  for (int i = from; i < to; ++i) {
    const int bin = bins - 1 - i;
    if (above + counts[bin] >= search.left) {
      search.enter(bin, above, digit);
      searches[blockIdx.x] = search;
      return;
    }
    above += counts[bin];
  }
}

// Counts the ties of each piece's last segment, which may go on in the next piece. Also sets zeros and lowest to the
// values that mask_of_piece starts from.
__global__ void __launch_bounds__(kThreads)
    count_ties_of_piece(const __grid_constant__ SegmentedKeys keys, const KeySearch* searches, uint32_t* ties_of_pieces,
                        const __grid_constant__ KeyMaskOutputs outputs) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  for (int64_t i = int64_t{blockIdx.x} * block.size + block.rank; i < keys.segments.count;
       i += int64_t{gridDim.x} * block.size) {
    outputs.zeros[i] = 0;
    outputs.lowest[i] = UINT32_MAX;
  }
  const Piece piece(keys.total);
  if (piece.begin >= piece.end || keys.segments.count == 0) return;
  const int64_t last = keys.segments.find(piece.end - 1), begin = keys.segments.begin(last);
  const Scores scores = scores_of(keys);
  ScoreKeys source(scores);
  uint32_t own = 0;
  if (searches[last].k > 0)
    for_keys(source, begin > piece.begin ? begin : piece.begin, piece.end, block,
             [&](int64_t, uint32_t key) { own += key == static_cast<uint32_t>(searches[last].prefix); });
  own = block.reduce(own, Sum());
  if (block.rank == 0) ties_of_pieces[blockIdx.x] = own;
}

__global__ void __launch_bounds__(kThreads)
    mask_of_piece(const __grid_constant__ SegmentedKeys keys, const KeySearch* searches, const int64_t* ties,
                  const uint32_t* ties_of_pieces, bool drop_zeros, const __grid_constant__ KeyMaskOutputs outputs) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  const Scores scores = scores_of(keys);
  ScoreKeys source(scores);
  Piece(keys.total).for_segments(keys.segments, [&](int64_t segment, int64_t begin, int64_t end) {
    if (searches[segment].k == 0) {
      write_nothing(begin, end, outputs.mask, block);
      return;
    }
    int64_t before = 0;  // ties of this segment in earlier pieces
    for (int64_t i = keys.segments.begin(segment) / kPiece + block.rank; i < blockIdx.x; i += block.size)
      before += ties_of_pieces[i];
    before = block.reduce(before, Sum());
    const Cut cut = {static_cast<uint32_t>(searches[segment].prefix), ties[segment], false};
    const Kept kept = write_mask(source, begin, end, cut, before, drop_zeros, outputs.mask, block);
    if (block.rank > 0) return;
    if (kept.zeros > 0) atomicAdd(reinterpret_cast<Count*>(outputs.zeros + segment), Count{kept.zeros});
    if (kept.lowest < UINT32_MAX) atomicMin(reinterpret_cast<Count*>(outputs.lowest + segment), Count{kept.lowest});
  });
}

}  // namespace

void make_order_keys(const Scores& scores, int64_t total, uint32_t* keys, Device& device) {
  launch("topk_order_keys", order_keys_of_piece, ceil_div(total, kPiece), kThreads, BlockGroup::kSharedBytes, device,
         scores, total, keys);
}

void count_digit(const SegmentedKeys& keys, const KeySearch* searches, const Digit& digit, int64_t* counts,
                 Device& device) {
  clear(counts, 0, keys.segments.count * digit.bins() * static_cast<int64_t>(sizeof(int64_t)), device);
  launch("topk_count_digit", count_digit_of_piece, ceil_div(keys.total, kPiece), kThreads, sizeof(Shared), device, keys,
         searches, digit, reinterpret_cast<Count*>(counts));
}

void choose_digit(KeySearch* searches, int64_t segments, const int64_t* counts, const Digit& digit, const Quota& quota,
                  Device& device) {
  launch("topk_choose_digit_", choose_digit_of_segment, segments, kChooseThreads, BlockGroup::kSharedBytes, device,
         searches, counts, digit, quota);
}

void mask_from_key(const SegmentedKeys& keys, const KeySearch* searches, const int64_t* ties, bool drop_zeros,
                   const KeyMaskOutputs& outputs, Device& device) {
  if (keys.segments.ragged()) clear(outputs.mask, 0, keys.total, device);  // keeps no key that bad offsets leave out
  const int64_t pieces = ceil_div(keys.total, kPiece);
  auto* ties_of_pieces = device.scratch_of<uint32_t>(pieces);
  launch("topk_mask_from_key (ties)", count_ties_of_piece, pieces > 0 ? pieces : 1, kThreads, BlockGroup::kSharedBytes,
         device, keys, searches, ties_of_pieces, outputs);
  launch("topk_mask_from_key", mask_of_piece, pieces, kThreads, BlockGroup::kSharedBytes, device, keys, searches, ties,
         static_cast<const uint32_t*>(ties_of_pieces), drop_zeros, outputs);
}

}  // namespace d3s
