// Top-K selection in segments that are too long for one block. The scores of all segments together are cut into pieces
// of equal length, so the host need not know the lengths of the segments. Each pass is a separate launch, so that no
// block waits for another block. The scores are read twice. The second pass knows the first digit of the k-th largest
// key, so it decides which keys are kept, except for the keys with the same first digit. These undecided keys are
// mostly a few percent of all keys. The second pass copies the undecided keys and their positions; the later passes
// read only these copies.
//
//   launch                       kernel             reads                                 -> writes
//   topk_mask (first digit)      count_first        scores                                -> histograms[0]
//   topk_mask (second digit)     split_pieces       scores, histograms[0]                 -> mask, rest, histograms[1]
//   topk_mask (third digit)      count_last         rest, histograms[1]                   -> histograms[2], last_digits
//   topk_mask (rest)             finish_pieces      rest, histograms[2], last_digits      -> mask, count, threshold
#pragma once

#include "key_mask.h"
#include "note_faults.h"
#include "score_keys.h"

namespace d3s {
namespace {

constexpr int kPieceThreads = 512;
constexpr int kPieceWarps = kPieceThreads / kWarp;
constexpr int kPiece = 16384;  // scores; 4 million scores make 256 pieces, two for each multiprocessor of an H200

struct Selection {
  Scores scores;
  Quota quota;
  Segments segments;
  SelectionOutputs outputs;
};

// The state of the search in one long segment, shared by all blocks that have a part of the segment.
struct alignas(16) Progress {
  uint32_t histograms[kDigits][kBins];
  Found<int> found[kDigits];
  // `unkept` is the maximum of ~key over the kept keys, not the minimum of key, since all this memory is 0 at first.
  uint32_t zeros, unkept;
  uint32_t finished;  // how many parts of the segment are finished
};

// The undecided keys, which have the same first digit as the k-th largest key, and their positions in the piece.
struct Rest {
  uint32_t* keys;     // [values]: the keys of a warp begin at the index of the first score in the warp's stretch
  uint16_t* places;   // [values]: at the same indices as the keys
  uint32_t* numbers;  // [parts][kPieceWarps]: how many keys each warp has
};

struct Pieces {
  Selection selection;
  int values, length;  // the number of scores in all segments together, and in a piece
  int longer_than;     // segments of at most this length are left to other launches
  // If false, progress[] has one slot for each segment. If true, progress[] has one slot for every longer_than + 1
  // scores, and a long segment uses the slot of its first score, which no other long segment uses. It is true if there
  // are more segments than there can be long segments.
  bool slot_by_begin;
  Progress* progress;
  Rest rest;
  uint32_t* last_digits;  // [parts][kBins / 2]: histograms of the last digit
};

// The part of a piece that belongs to one long segment. A long segment is longer than a piece, so the part contains the
// first or the last score of the piece, and a piece has at most two parts.
struct Part {
  int segment;
  int first_piece, last_piece;  // the pieces with the first and the last score of the segment
  int begin, end;
  // The index of this part among all parts. Each piece has two such indices. The second index is for a part that does
  // not contain the first score of the piece.
  int number;
  int slot;  // the index in progress[]

  __device__ Progress& progress(const Pieces& pieces) const { return pieces.progress[slot]; }
  __device__ bool begins() const { return number / 2 == first_piece; }
  // Returns the index of this segment's part in an earlier piece.
  __device__ int64_t part_in(const Pieces& pieces, int64_t piece) const {
    return 2 * piece + (pieces.selection.segments.begin(segment) > piece * pieces.length);
  }
};

// Calls body(part) for each part of a long segment in the block's piece.
template <class Body>
__device__ void for_parts(const Pieces& pieces, const Body& body) {
  const Segments& segments = pieces.selection.segments;
  const int begin = static_cast<int>(blockIdx.x) * pieces.length, end = min(begin + pieces.length, pieces.values);
  int first = 0, last = 0;  // the number of segments fits in an int, since it fits in a grid
  if (segments.count > 1)
    first = static_cast<int>(segments.find(begin)), last = static_cast<int>(segments.find(end - 1));
#pragma unroll 1
  for (int segment = first;; segment = last) {
    const int from = static_cast<int>(segments.begin(segment)), to = static_cast<int>(segments.end(segment));
    Part part = {segment,
                 from / pieces.length,
                 (to - 1) / pieces.length,
                 max(from, begin),
                 min(to, end),
                 2 * static_cast<int>(blockIdx.x) + (segment != first),
                 0};
    part.slot = pieces.slot_by_begin ? from / (pieces.longer_than + 1) : segment;
    if (to - from > pieces.longer_than && part.begin < part.end) body(part);  // only bad offsets give an empty part
    if (segment == last) return;
  }
}

// Continues the search by digit kNumber, whose histogram the previous launch has completed. Every block of the segment
// does this, which takes less time than waiting for one block. The segment's first block stores the result for later
// launches.
template <int kNumber>
__device__ Found<int> resume(const Pieces& pieces, const Part& part, const BlockGroup& block, SearchRoom& room) {
  const Progress& progress = part.progress(pieces);
  const Found<int> before = kNumber > 0 ? progress.found[kNumber - 1] : Found<int>{};
  Found<int> found = before;
  if (kNumber == 0 || (before.k > 0 && !before.keeps_all()))
    found = kNumber > 0 ? find_next_digit(progress.histograms[kNumber], digit_of(kNumber), before, block, room.search)
                        : find_first_digit(progress.histograms[0], digit_of(0), pieces.selection.quota, block,
                                           room.search, static_cast<int>(progress.histograms[0][0]));
  if (part.begins() && block.rank == 0) part.progress(pieces).found[kNumber] = found;
  block.sync();
  return found;
}

__device__ inline void add_kept(const Kept& own, Progress& progress, const BlockGroup& block) {
  const Kept kept = sum_of(own, block);
  if (block.rank > 0) return;
  if (kept.zeros > 0) atomicAdd(&progress.zeros, kept.zeros);
  if (kept.lowest < UINT32_MAX) atomicMax(&progress.unkept, ~kept.lowest);
}

// This warp's stretch of a part. The stretch consists of vectors of four scores, like a MaskRow.
struct PartOfWarp {
  MaskRow row;
  int origin;    // the position where the part's first vector begins
  int from, to;  // the index of the stretch's first vector, and of the first vector after the stretch
  int begin;     // the position of the stretch's first score

  __device__ PartOfWarp(const Pieces& pieces, const Part& part, const BlockGroup& block)
      : row(pieces.selection.outputs.mask + part.begin, part.end - part.begin), origin(part.begin - row.lead()) {
    block.warp_stretch(0, row.fours(), from, to);
    begin = max(part.begin, position(from));
  }

  __device__ int position(int four) const { return origin + 4 * four; }
};

// Returns whether a key is kept, and updates `kept`. `taken` says whether the key is one of the k largest. If zeros are
// dropped, a key whose score is 0 is not kept.
__device__ __forceinline__ bool keep_taken(bool taken, uint32_t key, const Quota& quota, Kept& kept) {
  if (taken && quota.drop_zeros && key == kZeroKey) {
    taken = false;
    ++kept.zeros;
  }
  if (taken) kept.lowest = min(kept.lowest, key);
  return taken;
}

__global__ void __launch_bounds__(kPieceThreads, 2)
    count_first(const __grid_constant__ Pieces pieces, const __grid_constant__ Faults faults) {
  note_quota(pieces.selection.quota, faults);
  note_offsets(pieces.selection.segments, faults);
  note_offsets(pieces.selection.scores.sequences, faults);
  SearchRoom& room = *dynamic_shared<SearchRoom>();
  const BlockGroup block(room.group);
  for_parts(pieces, [&](const Part& part) {
    clear_histogram(room.histogram, block);
    const int origin = part.begin / 4 * 4;
    // A thread loads four vectors here before it uses the first. The default of two vectors is for select_segments,
    // where most segments are too short for four.
    for_scores<4>(ScoreKeys<true>(pieces.selection.scores, origin), origin, part.begin, part.end, block,
                  [&](int, const uint4& keys) { count_first_digits(room.histogram, keys); });
    block.sync();
    add_histogram(room.histogram, kBins, part.progress(pieces).histograms[0], block);
    block.sync();
  });
}

__global__ void __launch_bounds__(kPieceThreads, 2) split_pieces(const __grid_constant__ Pieces pieces) {
  SearchRoom& room = *dynamic_shared<SearchRoom>();
  const BlockGroup block(room.group);
  const int lane = block.rank % kWarp;
  const Selection& selection = pieces.selection;
  bool* mask = selection.outputs.mask;
  for_parts(pieces, [&](const Part& part) {
    const Found<int> found = resume<0>(pieces, part, block, room);
    if (found.k == 0) {
      write_nothing(mask + part.begin, part.end - part.begin, block);
      return;
    }
    clear_histogram(room.histogram, block);
    const Cut cut = cut_at(found);
    const PartOfWarp own(pieces, part, block);
    const uint32_t width = cut.all_ties ? 0 : 1u << found.shift;  // keys in [cut.key, cut.key + width) are undecided
    Taker taker(cut.key + width, selection.quota);
    ScoreKeys<true> source(selection.scores, own.origin);
    const int stop = min(part.end, own.position(own.to));
    int next = own.begin;
    for (int first = own.position(own.from); first < stop; first += 4 * kWarp) {
      uint4 keys[1];  // only one vector, since registers are scarce
      int position = first + 4 * lane;
      source.load(position, 0, own.begin, stop, keys);
      if (position < stop) own.row.store((position - own.origin) / 4, taker.take(keys[0]));
      const uint32_t undecided = bytes_of(keys[0], [&](uint32_t key) { return key - cut.key < width; });
      int all, at = next + before_lane(__popc(undecided), all);
      next += all;
      for (const uint32_t key : {keys[0].x, keys[0].y, keys[0].z, keys[0].w}) {
        if (key - cut.key < width) {
          pieces.rest.keys[at] = key;
          pieces.rest.places[at++] = static_cast<uint16_t>(position - static_cast<int>(blockIdx.x) * pieces.length);
          atomicAdd(&room.histogram[digit_of(1).bin_of(key)], 1u);
        }
        ++position;
      }
    }
    if (lane == 0)
      pieces.rest.numbers[int64_t{part.number} * kPieceWarps + block.rank / kWarp] =
          static_cast<uint32_t>(next - own.begin);
    add_kept(taker.kept(), part.progress(pieces), block);
    add_histogram(room.histogram, kBins, part.progress(pieces).histograms[1], block);
  });
}

// The keys of a part that this warp left undecided in split_pieces(): the index of the first key, and their count.
struct WarpRest {
  int begin, count;

  __device__ WarpRest(const Pieces& pieces, const Part& part, const BlockGroup& block)
      : begin(PartOfWarp(pieces, part, block).begin),
        count(static_cast<int>(pieces.rest.numbers[int64_t{part.number} * kPieceWarps + block.rank / kWarp])) {}
};

__global__ void __launch_bounds__(kPieceThreads, 2) count_last(const __grid_constant__ Pieces pieces) {
  SearchRoom& room = *dynamic_shared<SearchRoom>();
  const BlockGroup block(room.group);
  for_parts(pieces, [&](const Part& part) {
    const Found<int> found = resume<1>(pieces, part, block, room);
    if (found.k == 0 || found.keeps_all()) return;
    clear_histogram(room.histogram, block);
    const WarpRest rest(pieces, part, block);
    for (int i = block.rank % kWarp; i < rest.count; i += kWarp)
      count_key(room.histogram, pieces.rest.keys[rest.begin + i], digit_of(2), found.prefix);
    block.sync();
    const int bins = digit_of(2).bins();
    for (int i = block.rank; i < bins; i += block.size)
      pieces.last_digits[int64_t{part.number} * bins + i] = room.histogram[i];
    add_histogram(room.histogram, bins, part.progress(pieces).histograms[2], block);
  });
}

// Writes the mask of the keys that split_pieces() left undecided. Returns the result for this thread's share of these
// keys.
__device__ inline Kept finish_rest(const Pieces& pieces, const Part& part, const Cut& cut, const BlockGroup& block) {
  const int lane = block.rank % kWarp;
  const WarpRest rest(pieces, part, block);
  const auto for_rest = [&](const auto& body) {
    for (int first = 0; first < rest.count; first += kWarp) {
      const bool inside = first + lane < rest.count;
      body(rest.begin + first + lane, inside ? pieces.rest.keys[rest.begin + first + lane] : kAbsent);
    }
  };
  int tie = 0;
  if (!cut.all_ties) {
    const int bins = digit_of(2).bins(), bin = digit_of(2).bin_of(cut.key);
    for (int piece = part.first_piece + block.rank; piece < static_cast<int>(blockIdx.x); piece += block.size)
      tie += pieces.last_digits[part.part_in(pieces, piece) * bins + bin];
    tie = block.reduce(tie, Sum());
    int own = 0;
    for_rest([&](int, uint32_t key) { own += key == cut.key; });
    tie += block.sum_before_warp(own);
  }
  Kept kept = {0, UINT32_MAX};
  bool* mask = pieces.selection.outputs.mask + int64_t{blockIdx.x} * pieces.length;
  for_rest([&](int at, uint32_t key) {
    const bool equal = key == cut.key;
    bool taken = key >= cut.key;
    if (!cut.all_ties) {
      const unsigned lanes = __ballot_sync(kAllLanes, equal);
      taken = taken && (!equal || tie + __popc(lanes & ((1u << lane) - 1)) < cut.ties);
      tie += __popc(lanes);
    }
    if (keep_taken(taken, key, pieces.selection.quota, kept)) mask[pieces.rest.places[at]] = true;
  });
  return kept;
}

__global__ void __launch_bounds__(kPieceThreads, 2) finish_pieces(const __grid_constant__ Pieces pieces) {
  SearchRoom& room = *dynamic_shared<SearchRoom>();
  const BlockGroup block(room.group);
  const SelectionOutputs& outputs = pieces.selection.outputs;
  for_parts(pieces, [&](const Part& part) {
    const Found<int> found = resume<2>(pieces, part, block, room);
    Progress& progress = part.progress(pieces);
    if (found.k > 0 && !progress.found[0].keeps_all())
      add_kept(finish_rest(pieces, part, cut_at(found), block), progress, block);
    if (block.rank > 0 || !outputs.count) return;
    __threadfence();  // add_kept() must be visible before this block's part counts as finished
    if (atomicAdd(&progress.finished, 1u) < static_cast<uint32_t>(part.last_piece - part.first_piece)) return;
    __threadfence();
    write_selected(outputs, part.segment, found.k, {atomicAdd(&progress.zeros, 0u), ~atomicMax(&progress.unkept, 0u)});
  });
}

void select_in_pieces(const Selection& selection, int64_t longer_than, int64_t values, Device& device) {
  const Segments& segments = selection.segments;
  if (segments.count == 0) return;
  const int length = longer_than < kPiece ? static_cast<int>(longer_than) / kWarp * kWarp : kPiece;
  const int64_t blocks = ceil_div(values, length);
  const int64_t most_long = ceil_div(values, longer_than + 1);
  const bool slot_by_begin = segments.count > most_long;
  const int64_t slots = slot_by_begin ? most_long : segments.count;
  auto* progress = device.scratch_of<Progress>(slots);
  clear(progress, 0, slots * static_cast<int64_t>(sizeof(Progress)), device);
  const Pieces pieces = {selection,
                         static_cast<int>(values),
                         length,
                         static_cast<int>(longer_than),
                         slot_by_begin,
                         progress,
                         {device.scratch_of<uint32_t>(values), device.scratch_of<uint16_t>(values),
                          device.scratch_of<uint32_t>(2 * blocks * kPieceWarps)},
                         device.scratch_of<uint32_t>(2 * blocks * digit_of(2).bins())};
  const auto pass = [&](const char* name, auto kernel, const auto&... more) {
    launch(name, kernel, blocks, kPieceThreads, sizeof(SearchRoom), device, pieces, more...);
  };
  pass("topk_mask (first digit)", count_first, device.faults);
  pass("topk_mask (second digit)", split_pieces);
  pass("topk_mask (third digit)", count_last);
  pass("topk_mask (rest)", finish_pieces);
}

}  // namespace
}  // namespace d3s
