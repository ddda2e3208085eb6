// topk_mask, select_tokens: exactly k of each segment, ties to the lower index.
//
// The k-th largest key is found digit by digit, from the top: a histogram of the next digit, over the keys that have
// the digits found so far, gives that digit. Then the larger keys are kept, and the first few keys that equal the k-th.
// All counts are integers, so the order in which atomics add them does not matter.
//
// One block handles a segment that fits in shared memory, in one launch. A longer segment of known length is cut into
// pieces, one for each block; every pass is a launch of its own, so that no block waits for another. If a segment is
// longer than the caller said, its block reads the scores again in each pass: slower, but correct.
//
//   launch                     kernel            reads                                    -> writes
//   topk_mask                  select_segments   scores                                   -> mask, count, threshold
//
//   topk_mask (first digit)    count_digit<0>    scores                                   -> histograms[0]
//   topk_mask (second digit)   count_digit<1>    scores, histograms[0]                    -> k, found[0], histograms[1]
//   topk_mask (third digit)    count_digit<2>    scores, k, found[0], histograms[1]       -> found[1], histograms[2]
//   topk_mask (ties)           count_ties        scores, k, found[1], histograms[2]       -> found[2], ties, kept
//   topk_mask (mask)           write_pieces      scores, k, found[2], ties, kept          -> mask, kept
//   select_tokens (results)    write_results     k, kept                                  -> count, threshold
#include "key_mask.h"
#include "size_class.h"

namespace d3s {
namespace {

// 32 bits in three digits: tables of 8 KB, and three passes.
constexpr int kDigits = 3;
constexpr int kBins = 2048;
D3S_HOST_DEVICE int shift_of(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
D3S_HOST_DEVICE uint32_t bin_of(uint32_t key, int digit) { return key >> shift_of(digit) & (digit == 2 ? 1023 : 2047); }
// Whether the digits of a key above this one are `prefix`.
D3S_HOST_DEVICE bool agrees(uint32_t key, uint32_t prefix, int digit) {
  return digit == 0 || key >> shift_of(digit - 1) == prefix;
}

// How far the search for the k-th largest key has come.
struct Found {
  uint32_t prefix;  // the digits found so far; at the end, the whole key
  uint32_t equal;   // how many keys have these digits
  int64_t above;    // how many keys are larger
};

// The first bin has only absent keys: order_key gives no other key below 2^21.
D3S_HOST_DEVICE int64_t present_of(const uint32_t* first_histogram, int64_t n) { return n - first_histogram[0]; }

// Finds the bin of the k-th largest key; all threads of the block must call it. `before` is the search so far.
__device__ Found find_bin(const uint32_t* histogram, int digit, const Found& before, int64_t k, const BlockGroup& block,
                          Found* shared) {
  const int bins = digit == 2 ? 1024 : kBins, each = bins / block.size > 0 ? bins / block.size : 1;
  const int first = block.rank * each;  // counted from the top: thread 0 has the highest bins
  int64_t own = 0;
  for (int i = first; i < first + each && i < bins; ++i) own += histogram[bins - 1 - i];
  int64_t above = before.above + block.exclusive_sum(own);
  if (above < k && k <= above + own)
    for (int i = first; i < first + each; ++i) {
      const uint32_t here = histogram[bins - 1 - i];
      if (above + here >= k) {
        *shared = {before.prefix << (digit == 2 ? 10 : 11) | static_cast<uint32_t>(bins - 1 - i), here, above};
        break;
      }
      above += here;
    }
  block.sync();
  return *shared;  // the next call writes it after barriers that come after this read
}

__device__ void clear_histogram(uint32_t* histogram, const BlockGroup& block) {
  for (int i = block.rank; i < kBins; i += block.size) histogram[i] = 0;
  block.sync();
}

D3S_HOST_DEVICE Cut cut_at(const Found& found, int64_t k) {
  return {found.prefix, k - found.above, k - found.above == found.equal};
}

D3S_HOST_DEVICE void write_selected(const SelectionOutputs& outputs, int64_t segment, int64_t k, const Kept& kept) {
  const int64_t count = k - kept.zeros;
  if (outputs.count) outputs.count[segment] = static_cast<int32_t>(count);
  if (outputs.threshold) outputs.threshold[segment] = count > 0 ? order_key_value(kept.lowest) : INFINITY;
}

// The start of a block's shared memory. The keys follow it.
struct Shared {
  uint32_t histogram[kBins];
  Found found;
  alignas(16) unsigned char group[BlockGroup::kSharedBytes];
};

// ---- a block for each segment ------------------------------------------------------------------------------------

// A segment's keys: stored in shared memory if they fit, else made from the scores again in each pass.
struct SegmentKeys {
  ScoreKeys source;
  const uint32_t* stored;  // or null
  int64_t begin;

  __device__ void load(int64_t first, int stride, int count, uint32_t (&keys)[kKeysInFlight]) {
    if (!stored) {
      source.load(first, stride, count, keys);
      return;
    }
    const uint32_t* from = stored + (first - begin);
#pragma unroll
    for (int i = 0; i < kKeysInFlight; ++i)
      if (i < count) keys[i] = from[i * stride];
  }
};

__global__ void __launch_bounds__(BlockGroup::kMostThreads)
    select_segments(const __grid_constant__ Scores scores, const __grid_constant__ Quota quota, bool drop_zeros,
                    const __grid_constant__ Segments segments, const __grid_constant__ SizeClass sizes,
                    const __grid_constant__ SelectionOutputs outputs) {
  Shared& shared = *dynamic_shared<Shared>();
  auto* stored = reinterpret_cast<uint32_t*>(&shared + 1);
  const BlockGroup block(shared.group);
  const int64_t segment = blockIdx.x;
  const int64_t begin = segments.begin(segment), end = segments.end(segment), n = end - begin;
  if (!sizes.has(n)) return;
  const bool fits = n <= sizes.capacity;
  SegmentKeys keys = {ScoreKeys(scores), fits ? stored : nullptr, begin};

  clear_histogram(shared.histogram, block);
  for_keys(keys.source, begin, end, block, [&](int64_t position, uint32_t key) {
    if (fits) stored[position - begin] = key;
    atomicAdd(&shared.histogram[bin_of(key, 0)], 1u);
  });
  block.sync();
  const int64_t k = quota.of(present_of(shared.histogram, n));
  if (k == 0) {
    write_nothing(begin, end, outputs.mask, block);
    if (block.rank == 0) write_selected(outputs, segment, 0, {0, 0});
    return;
  }
  Found found = find_bin(shared.histogram, 0, {0, 0, 0}, k, block, &shared.found);
  for (int digit = 1; digit < kDigits; ++digit) {
    clear_histogram(shared.histogram, block);
    for_keys(keys, begin, end, block, [&](int64_t, uint32_t key) {
      if (agrees(key, found.prefix, digit)) atomicAdd(&shared.histogram[bin_of(key, digit)], 1u);
    });
    block.sync();
    found = find_bin(shared.histogram, digit, found, k, block, &shared.found);
  }
  const Kept kept = write_mask(keys, begin, end, cut_at(found, k), 0, drop_zeros, outputs.mask, block);
  if (block.rank == 0) write_selected(outputs, segment, k, kept);
}

// ---- many blocks for each segment --------------------------------------------------------------------------------

constexpr int kPieceThreads = 512;
constexpr int64_t kPiece = 16384;  // 256 pieces for 4 million scores: two for each multiprocessor of an H200

// What a launch leaves for the later ones, for each segment.
struct Progress {
  uint32_t histograms[kDigits][kBins];
  Found found[kDigits];
  int64_t k;
  Kept kept;
};

struct Pieces {
  const Scores scores;
  const Quota quota;
  const Segments segments;
  unsigned per_segment;
  Progress* progress;
  uint32_t* ties;  // [segments][per_segment]: how many keys of a piece equal the k-th
};

// The piece of a segment that a block handles. The last piece goes on to the segment's end, however long that is.
struct Piece {
  int64_t segment, number, begin, end, length;

  __device__ explicit Piece(const Pieces& pieces)
      : segment(blockIdx.x / pieces.per_segment), number(blockIdx.x % pieces.per_segment) {
    const int64_t first = pieces.segments.begin(segment), last = pieces.segments.end(segment);
    length = last - first;
    begin = first + number * kPiece < last ? first + number * kPiece : last;
    end = number + 1 < pieces.per_segment && begin + kPiece < last ? begin + kPiece : last;
  }
};

// The result of the search before `digit`. Every block of the segment searches the last histogram, which costs less
// than to wait for one of them. The first block stores the result for later launches.
__device__ Found resume(const Pieces& pieces, const Piece& piece, int digit, int64_t& k, const BlockGroup& block,
                        Shared& shared) {
  Progress& progress = pieces.progress[piece.segment];
  k = digit == 1 ? pieces.quota.of(present_of(progress.histograms[0], piece.length)) : digit > 1 ? progress.k : 0;
  if (k == 0) return {0, 0, 0};  // nothing is found yet, or nothing is kept (progress.k stays 0)
  const Found before = digit > 1 ? progress.found[digit - 2] : Found{0, 0, 0};
  const Found found = find_bin(progress.histograms[digit - 1], digit - 1, before, k, block, &shared.found);
  if (piece.number == 0 && block.rank == 0) {
    progress.found[digit - 1] = found;
    if (digit == 1) progress.k = k;
  }
  return found;
}

template <int kDigit>
__global__ void __launch_bounds__(kPieceThreads, 1) count_digit(const __grid_constant__ Pieces pieces) {
  Shared& shared = *dynamic_shared<Shared>();
  const BlockGroup block(shared.group);
  const Piece piece(pieces);
  int64_t k;
  const Found found = resume(pieces, piece, kDigit, k, block, shared);
  if (kDigit > 0 && k == 0) return;
  ScoreKeys keys(pieces.scores);
  clear_histogram(shared.histogram, block);
  for_keys(keys, piece.begin, piece.end, block, [&](int64_t, uint32_t key) {
    if (agrees(key, found.prefix, kDigit)) atomicAdd(&shared.histogram[bin_of(key, kDigit)], 1u);
  });
  block.sync();
  uint32_t* total = pieces.progress[piece.segment].histograms[kDigit];
  for (int i = block.rank; i < kBins; i += block.size)
    if (shared.histogram[i] > 0) atomicAdd(&total[i], shared.histogram[i]);
}

__global__ void __launch_bounds__(kPieceThreads, 1) count_ties(const __grid_constant__ Pieces pieces) {
  Shared& shared = *dynamic_shared<Shared>();
  const BlockGroup block(shared.group);
  const Piece piece(pieces);
  int64_t k;
  const Found found = resume(pieces, piece, kDigits, k, block, shared);
  if (piece.number == 0 && block.rank == 0) pieces.progress[piece.segment].kept = {0, UINT32_MAX};
  if (k == 0 || cut_at(found, k).all_ties) return;
  ScoreKeys keys(pieces.scores);
  uint32_t own = 0;
  for_keys(keys, piece.begin, piece.end, block, [&](int64_t, uint32_t key) { own += key == found.prefix; });
  own = block.reduce(own, Sum());
  if (block.rank == 0) pieces.ties[blockIdx.x] = own;
}

__global__ void __launch_bounds__(kPieceThreads, 2)
    write_pieces(const __grid_constant__ Pieces pieces, bool drop_zeros, bool* mask) {
  Shared& shared = *dynamic_shared<Shared>();
  const BlockGroup block(shared.group);
  const Piece piece(pieces);
  Progress& progress = pieces.progress[piece.segment];
  if (progress.k == 0) {
    write_nothing(piece.begin, piece.end, mask, block);
    return;
  }
  const Cut cut = cut_at(progress.found[kDigits - 1], progress.k);
  int64_t before = 0;
  if (!cut.all_ties) {
    for (int64_t i = block.rank; i < piece.number; i += block.size)
      before += pieces.ties[piece.segment * pieces.per_segment + i];
    before = block.reduce(before, Sum());
  }
  ScoreKeys keys(pieces.scores);
  const Kept kept = write_mask(keys, piece.begin, piece.end, cut, before, drop_zeros, mask, block);
  if (block.rank > 0) return;
  if (kept.zeros > 0) atomicAdd(&progress.kept.zeros, kept.zeros);
  if (kept.lowest < UINT32_MAX) atomicMin(&progress.kept.lowest, kept.lowest);
}

__global__ void write_results(const Progress* progress, int64_t segments,
                              const __grid_constant__ SelectionOutputs outputs) {
  const int64_t segment = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (segment < segments) write_selected(outputs, segment, progress[segment].k, progress[segment].kept);
}

void select_in_pieces(const Scores& scores, const Quota& quota, bool drop_zeros, const Segments& segments,
                      int64_t longest, const SelectionOutputs& outputs, Device& device) {
  const auto per_segment = static_cast<unsigned>(ceil_div(longest, kPiece));
  const int64_t blocks = segments.count * per_segment;
  auto* progress = device.scratch_of<Progress>(segments.count);
  clear(progress, 0, segments.count * static_cast<int64_t>(sizeof(Progress)), device);
  const Pieces pieces = {scores, quota, segments, per_segment, progress, device.scratch_of<uint32_t>(blocks)};
  const size_t shared = sizeof(Shared);
  launch("topk_mask (first digit)", count_digit<0>, blocks, kPieceThreads, shared, device, pieces);
  launch("topk_mask (second digit)", count_digit<1>, blocks, kPieceThreads, shared, device, pieces);
  launch("topk_mask (third digit)", count_digit<2>, blocks, kPieceThreads, shared, device, pieces);
  launch("topk_mask (ties)", count_ties, blocks, kPieceThreads, shared, device, pieces);
  launch("topk_mask (mask)", write_pieces, blocks, kPieceThreads, shared, device, pieces, drop_zeros, outputs.mask);
  if (outputs.count || outputs.threshold)
    launch("select_tokens (results)", write_results, ceil_div(segments.count, 128), 128, 0, device,
           static_cast<const Progress*>(progress), segments.count, outputs);
}

// ---- which kernels, and how many threads -------------------------------------------------------------------------

constexpr int64_t kSmall = 2048;  // scores; if lengths are unknown, shorter segments have a launch with little memory

// Threads have some 8 to 32 keys each. There are at least four warps, since the digit tables are work for as many.
int threads_for(int64_t length) {
  return length <= 1024 ? 128 : length <= 4096 ? 256 : length <= 16384 ? 512 : BlockGroup::kMostThreads;
}

}  // namespace

void select_top(const Scores& scores, const Quota& quota, bool drop_zeros, const Segments& segments, int64_t values,
                int64_t longest, const SelectionOutputs& outputs, Device& device) {
  if (values > UINT32_MAX)
    throw std::invalid_argument("scores: got " + std::to_string(values) + " of them; takes fewer than 2^32 on a GPU");
  if (segments.ragged()) clear(outputs.mask, 0, values, device);  // values that bad offsets leave out are not selected
  const int64_t room = device_attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin) - sizeof(Shared);
  const int64_t capacity = room / static_cast<int64_t>(sizeof(uint32_t));
  const auto select_blocks = [&](int64_t shortest, int64_t most) {
    const int64_t keys = most < capacity ? most : capacity;
    const int threads = threads_for(keys);
    const SizeClass sizes = {shortest, most < longest ? most : INT64_MAX, keys};
    launch("topk_mask", select_segments, segments.count, threads, sizeof(Shared) + keys * sizeof(uint32_t), device,
           scores, quota, drop_zeros, segments, sizes, outputs);
  };
  // A segment longer than the capacity is slow if its length is unknown here; the caller can give it by max_segment.
  const bool known = lengths_are_bounded(segments, longest, values);
  if (longest > capacity && known) {
    select_in_pieces(scores, quota, drop_zeros, segments, longest, outputs, device);
  } else if (known || longest <= kSmall) {
    select_blocks(0, longest);
  } else {
    select_blocks(0, kSmall);
    select_blocks(kSmall + 1, longest);
  }
}

}  // namespace d3s
