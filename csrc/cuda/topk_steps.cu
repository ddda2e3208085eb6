// Top-K selection in steps, for segments that are spread over several ranks. Each rank runs these steps between the
// collectives. The host does not always know the lengths of the segments. So all keys together are cut into equal
// pieces, and each block goes through the segments in its piece. Counts are integers, so the order of atomic additions
// does not matter.
//
//   launch                      kernel                    reads                                  -> writes
//   topk_order_keys             order_keys_of_piece       scores                                 -> keys
//   topk_count_digit            count_digit_of_piece      keys, searches                         -> counts
//   topk_choose_digit_          choose_digit_of_segment   counts of all ranks, searches          -> searches
//   topk_mask_from_key (ties)   count_ties_of_piece       keys, searches                         -> ties_of_pieces
//   topk_mask_from_key          mask_of_piece             keys, searches, ties, ties_of_pieces   -> mask, zeros, lowest
#include "../ops/topk_steps.h"

#include "key_mask.h"
#include "note_faults.h"
#include "score_keys.h"

namespace d3s {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kPiece = 16384;  // keys; 4 million keys make 256 pieces, two for each multiprocessor of an H200
constexpr int kChooseThreads = 256;

using Count = unsigned long long;  // CUDA has no atomics for int64_t

struct Piece {
  int64_t begin, end;

  __device__ explicit Piece(int64_t total)
      : begin(int64_t{blockIdx.x} * kPiece), end(begin + kPiece < total ? begin + kPiece : total) {}

  // Calls body(segment, begin, end) for each segment that has a part in this piece; [begin, end) is the part. If
  // offsets are bad, parts may be wrong, but are never outside of the piece.
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

// Calls body(key) for this thread's share of the keys in [begin, end).
template <class Body>
__device__ void for_stored(const uint32_t* keys, int64_t begin, int64_t end, const BlockGroup& block,
                           const Body& body) {
#pragma unroll 4
  for (int64_t i = begin + block.rank; i < end; i += block.size) body(keys[i]);
}

__global__ void __launch_bounds__(kThreads, 2)
    order_keys_of_piece(const __grid_constant__ Scores scores, int64_t total, uint32_t* keys,
                        const __grid_constant__ Faults faults) {
  note_offsets(scores.sequences, faults);
  const BlockGroup block(dynamic_shared<unsigned char>());
  const Piece piece(total);
  const int begin = static_cast<int>(piece.begin), end = static_cast<int>(piece.end);
  for_scores(ScoreKeys<true>(scores, begin), begin, begin, end, block, [&](int four, const uint4& of_four) {
    const int position = begin + 4 * four;
    if (position + 4 <= end && misalignment(keys + position) == 0) {
      *reinterpret_cast<uint4*>(keys + position) = of_four;
      return;
    }
    int at = position;
    for (const uint32_t key : {of_four.x, of_four.y, of_four.z, of_four.w})
      if (at < end) keys[at++] = key;
  });
}

__global__ void __launch_bounds__(kThreads)
    count_digit_of_piece(const __grid_constant__ SegmentedKeys keys, const KeySearch* searches,
                         const __grid_constant__ Digit digit, Count* counts, const __grid_constant__ Faults faults) {
  if (digit.is_first()) note_offsets(keys.segments, faults);
  SearchRoom& room = *dynamic_shared<SearchRoom>();
  const BlockGroup block(room.group);
  const int bins = digit.bins();
  Piece(keys.total).for_segments(keys.segments, [&](int64_t segment, int64_t begin, int64_t end) {
    const bool first = digit.is_first();
    if (!first && searches[segment].k == 0) return;
    const uint32_t prefix = first ? 0 : static_cast<uint32_t>(searches[segment].prefix);
    clear_histogram(room.histogram, block);
    for_stored(keys.keys, begin, end, block, [&](uint32_t key) { count_key(room.histogram, key, digit, prefix); });
    block.sync();
    add_histogram(room.histogram, bins, counts + segment * bins, block);
    block.sync();
  });
}

struct ChooseRoom {
  FoundRoom<int64_t> search;
  alignas(16) unsigned char group[BlockGroup::kSharedBytes];
};

// There is one block for each segment.
__global__ void __launch_bounds__(kChooseThreads)
    choose_digit_of_segment(KeySearch* searches, const int64_t* counts, const __grid_constant__ Digit digit,
                            const __grid_constant__ Quota quota, const __grid_constant__ Faults faults) {
  if (digit.is_first()) note_quota(quota, faults);
  ChooseRoom& room = *dynamic_shared<ChooseRoom>();
  const BlockGroup block(room.group);
  counts += int64_t{blockIdx.x} * digit.bins();
  KeySearch& search = searches[blockIdx.x];
  const auto prefix = static_cast<uint32_t>(search.prefix);
  const Found<int64_t> found =
      digit.is_first() ? find_first_digit(counts, digit, quota, block, room.search)
                       : find_next_digit(counts, digit, {prefix, search.left, search.k}, block, room.search);
  if (block.rank == 0) search = {found.prefix, found.left, found.k};
}

// Counts the ties of the last segment in each piece, since this segment may continue in the next piece. Also
// initialises `zeros` and `lowest` for mask_of_piece.
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
  uint32_t own = 0;
  if (searches[last].k > 0)
    for_stored(keys.keys, begin > piece.begin ? begin : piece.begin, piece.end, block,
               [&, tie = static_cast<uint32_t>(searches[last].prefix)](uint32_t key) { own += key == tie; });
  own = block.reduce(own, Sum());
  if (block.rank == 0) ties_of_pieces[blockIdx.x] = own;
}

__global__ void __launch_bounds__(kThreads, 2)
    mask_of_piece(const __grid_constant__ SegmentedKeys keys, const KeySearch* searches, const int64_t* ties,
                  const uint32_t* ties_of_pieces, const __grid_constant__ Quota quota,
                  const __grid_constant__ KeyMaskOutputs outputs) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  Piece(keys.total).for_segments(keys.segments, [&](int64_t segment, int64_t begin, int64_t end) {
    const int count = static_cast<int>(end - begin);
    if (searches[segment].k == 0) {
      write_nothing(outputs.mask + begin, count, block);
      return;
    }
    int64_t before = 0;  // ties of this segment in earlier pieces
    for (int64_t i = keys.segments.begin(segment) / kPiece + block.rank; i < blockIdx.x; i += block.size)
      before += ties_of_pieces[i];
    before = block.reduce(before, Sum());
    const int64_t wanted = ties[segment] - before;
    const Cut cut = {static_cast<uint32_t>(searches[segment].prefix),
                     static_cast<int>(max(int64_t{0}, min(wanted, int64_t{count}))), false};
    const KeyRow<false> row(keys.keys + begin, outputs.mask + begin, count);
    const Kept kept = sum_of(write_mask(row, cut, quota, block), block);
    if (block.rank > 0) return;
    if (kept.zeros > 0) atomicAdd(reinterpret_cast<Count*>(outputs.zeros + segment), Count{kept.zeros});
    if (kept.lowest < UINT32_MAX) atomicMin(reinterpret_cast<Count*>(outputs.lowest + segment), Count{kept.lowest});
  });
}

}  // namespace

void make_order_keys(const Scores& scores, int64_t total, uint32_t* keys, Device& device) {
  require_places(total);
  launch("topk_order_keys", order_keys_of_piece, ceil_div(total, kPiece), kThreads, BlockGroup::kSharedBytes, device,
         scores, total, keys, device.faults);
}

void count_digit(const SegmentedKeys& keys, const KeySearch* searches, const Digit& digit, int64_t* counts,
                 Device& device) {
  clear(counts, 0, keys.segments.count * digit.bins() * static_cast<int64_t>(sizeof(int64_t)), device);
  launch("topk_count_digit", count_digit_of_piece, ceil_div(keys.total, kPiece), kThreads, sizeof(SearchRoom), device,
         keys, searches, digit, reinterpret_cast<Count*>(counts), device.faults);
}

void choose_digit(KeySearch* searches, int64_t segments, const int64_t* counts, const Digit& digit, const Quota& quota,
                  Device& device) {
  launch("topk_choose_digit_", choose_digit_of_segment, segments, kChooseThreads, sizeof(ChooseRoom), device, searches,
         counts, digit, quota, device.faults);
}

void mask_from_key(const SegmentedKeys& keys, const KeySearch* searches, const int64_t* ties, const Quota& quota,
                   const KeyMaskOutputs& outputs, Device& device) {
  if (keys.segments.ragged()) clear(outputs.mask, 0, keys.total, device);  // bad offsets may leave out some keys
  const int64_t pieces = ceil_div(keys.total, kPiece);
  auto* ties_of_pieces = device.scratch_of<uint32_t>(pieces);
  launch("topk_mask_from_key (ties)", count_ties_of_piece, pieces > 0 ? pieces : 1, kThreads, BlockGroup::kSharedBytes,
         device, keys, searches, ties_of_pieces, outputs);
  launch("topk_mask_from_key", mask_of_piece, pieces, kThreads, BlockGroup::kSharedBytes, device, keys, searches, ties,
         static_cast<const uint32_t*>(ties_of_pieces), quota, outputs);
}

}  // namespace d3s
