// topk_mask and select_tokens: select the k largest scores of each segment. Among equal scores, lower indices are
// selected first.
//
// If the keys of a segment fit in the shared memory of a block, one block handles the segment, in one launch. The block
// reads the scores once; all later passes read only the keys. If all segments have the same length of at most 8,192
// scores, most calls hold the keys in registers instead (held_keys.h), and one warp handles a segment of at most 1,024
// scores. Segments that do not fit in shared memory are cut into pieces (topk_pieces.h). With offsets but no bound on
// the lengths, the kernels for short segments and the kernels for long segments are launched. Each of these kernels
// skips the segments that it is not for. If a segment is longer than the caller declared, its block keeps the keys in
// global memory. This is slower, but correct.
//
//   launch             kernel            reads     -> writes
//   topk_mask          select_segments   scores    -> mask, count, threshold
//   topk_mask (long)   select_segments   scores    -> mask, count, threshold   (more loads in flight)
//   topk_mask (held)   select_held       scores    -> mask, count, threshold   (keys in registers)
#include "held_keys.h"
#include "note_faults.h"
#include "size_class.h"
#include "topk_pieces.h"

namespace d3s {
namespace {

// The keys of segments in global memory. If offsets are bad, segments may overlap and overwrite each other's keys.
struct Spill {
  uint32_t* keys = nullptr;

  static constexpr int kRoom = 8;  // the maximum number of slots that alignment adds before and after a segment
  static int64_t size(int64_t values, int64_t segments) { return values + kRoom * (segments + 1); }
  __device__ uint32_t* of(int64_t begin, int64_t segment) const { return keys + (begin + 3) / 4 * 4 + kRoom * segment; }
};

// Writes the outputs of a segment, after the search for the segment's k-th largest key.
template <class Row, class Group>
__device__ __forceinline__ void write_found(const Row& row, const Found<int>& found, const Quota& quota,
                                            const SelectionOutputs& outputs, int segment, const Group& group) {
  const Kept own = write_mask(row, cut_at(found), quota, group);
  if (!outputs.count) return;
  const Kept kept = sum_of(own, group);
  if (group.rank == 0) write_selected(outputs, segment, found.k, kept);
}

// If kLookUp is true, a segment contains several sequences (a pooled batch), so the sequence of each score is looked
// up. If kSpill is true, some keys may be in global memory. If kSpill is false, the compiler knows that all keys are in
// shared memory. kInFlight is the number of vectors of four scores that a thread loads before it uses the first vector.
template <bool kLookUp, bool kSpill, int kInFlight = kFoursInFlight>
__global__ void __launch_bounds__(BlockGroup::kMostThreads, kSpill ? 1 : 0)
    select_segments(const __grid_constant__ Scores scores, const __grid_constant__ Quota quota,
                    const __grid_constant__ Segments segments, const __grid_constant__ SizeClass sizes, Spill spill,
                    const __grid_constant__ SelectionOutputs outputs, const __grid_constant__ Faults faults) {
  note_quota(quota, faults);
  note_offsets(segments, faults);
  if (kLookUp) note_offsets(scores.sequences, faults);
  SearchRoom& room = *dynamic_shared<SearchRoom>();
  const BlockGroup block(room.group);
  const int segment = static_cast<int>(blockIdx.x);
  const int begin = static_cast<int>(segments.begin(segment)), end = static_cast<int>(segments.end(segment));
  if (!sizes.has(end - begin)) return;
  uint32_t* keys = reinterpret_cast<uint32_t*>(&room + 1);
  if (kSpill && end - begin > sizes.holds) keys = spill.of(begin, segment);
  const KeyRow<true> row(keys, outputs.mask + begin, end - begin);
  const int origin = begin - row.lead();

  clear_histogram(room.histogram, block);
  for_scores<kInFlight>(ScoreKeys<kLookUp>(scores, origin, segment), origin, begin, end, block,
                        [&](int four, const uint4& of_four) {
                          row.set(four, of_four);
                          count_first_digits(room.histogram, of_four);
                        });
  block.sync();
  const int absent = static_cast<int>(room.histogram[0]);
  Found<int> found = find_first_digit<true>(room.histogram, digit_of(0), quota, block, room.search, absent);
#pragma unroll 1
  for (int number = 1; number < kDigits && !found.keeps_all(); ++number) {
    const uint32_t lowest = found.prefix << found.shift;
    const auto count = [&](const Digit& digit) {
      row.for_stretch(block, [&](int, const uint4& keys) { count_any_keys(room.histogram, keys, digit, lowest); });
    };
    if (number == 1)  // two calls, so that the shifts are compile-time constants
      count(digit_of(1));
    else
      count(digit_of(2));
    block.sync();
    found = find_next_digit<true>(room.histogram, digit_of(number), found, block, room.search);
  }
  write_found(row, found, quota, outputs, segment, block);
}

// select_held handles segments of equal length, without per-token advantages. kWarps warps hold the keys of a segment
// in registers. Each thread holds kHeld vectors of four keys, all loaded at the same time. Eight vectors take 32 of the
// 64 registers that a thread has if 1,024 threads share a multiprocessor.
template <int kWarps>
struct Holders {
  using Group = std::conditional_t<kWarps == 1, WarpGroup, BlockGroup>;
  static constexpr int kSegments = kWarps == 1 ? 4 : 1;  // segments per block
  static constexpr int kThreads = kSegments * kWarps * kWarp;
};

template <int kWarps, int kHeld>
__global__ void __launch_bounds__(Holders<kWarps>::kThreads, (kHeld > 4 ? 1024 : 1280) / Holders<kWarps>::kThreads)
    select_held(const __grid_constant__ Scores scores, const __grid_constant__ Quota quota, int segments, int length,
                const __grid_constant__ SelectionOutputs outputs, const __grid_constant__ Faults faults) {
  using Of = Holders<kWarps>;
  using Room = HeldRoom<kWarps>;
  note_quota(quota, faults);
  const int in_block = Of::kSegments > 1 ? static_cast<int>(threadIdx.x) / kWarp : 0;
  Room& room = dynamic_shared<Room>()[in_block];
  const typename Of::Group group(room.group);
  const int segment = static_cast<int>(blockIdx.x) * Of::kSegments + in_block;
  if (Of::kSegments > 1 && segment >= segments) return;
  const int begin = segment * length, end = begin + length;
  HeldRow<kHeld> row(outputs.mask + begin, length);
  const int origin = begin - row.lead();

  clear_histogram(room.histogram, group, Room::kBins);
  row.load(ScoreKeys<false, true>(scores, origin, segment), origin, begin, end, group);
  constexpr int kShift = Digit::kKeyBits - Room::kBits;
  row.for_stretch(group, [&](int, const uint4& keys) { count_first_digits(room.histogram, keys, kShift); });
  group.sync();
  Found<int> found = find_digit(room, kShift, 0, group, [&](int all, int lowest) {
    int present = all - lowest;
    if (kSmallestKey >> kShift == 0 && lowest > 0) {  // the lowest bin may also contain other keys than kAbsent
      present = 0;
      row.for_stretch(group, [&](int, const uint4& keys) {
        for (const uint32_t key : {keys.x, keys.y, keys.z, keys.w}) present += key != kAbsent;
      });
      present = group.reduce(present, Sum());
    }
    const int k = static_cast<int>(quota.of(present));
    return Found<int>{0, k, k};
  });
#pragma unroll 1
  while (found.shift > 0 && !found.keeps_all()) {
    // The first bin begins at the key `first << shift`. If at least kBits bits are left, this is the lowest possible
    // key with the digits found so far. If fewer bits are left, the keys with these digits get the last bins, and the
    // first bins count smaller keys. This does no harm, since the k-th largest key is not among the smaller keys.
    // Larger keys are counted in the extra bin, which is never read.
    const int left = min(found.shift, Room::kBits), shift = found.shift - left;
    const uint32_t first = (found.prefix << left) - static_cast<uint32_t>(Room::kBins - (1 << left));
    const Digit digit{shift, Room::kBits};
    row.for_stretch(group,
                    [&](int, const uint4& keys) { count_any_keys(room.histogram, keys, digit, first << shift); });
    group.sync();
    found = find_digit(room, shift, first, group, [&](int, int) { return found; });
  }
  write_found(row, found, quota, outputs, segment, group);
}

// Launches select_held with the smallest number of threads that can hold `fours` vectors of each segment. If even the
// largest number of threads is not enough, or if select_held cannot number so many (empty) segments, launches nothing
// and returns false.
bool select_held_by(const Scores& scores, const Quota& quota, const Segments& segments, int64_t fours,
                    const SelectionOutputs& outputs, Device& device) {
  if (segments.count > INT32_MAX) return false;
  const auto by = [&](auto warps, auto held) {
    using Of = Holders<warps.value>;
    if (fours > int64_t{warps.value} * held.value * kWarp) return false;
    launch("topk_mask (held)", select_held<warps.value, held.value>, ceil_div(segments.count, Of::kSegments),
           Of::kThreads, Of::kSegments * sizeof(HeldRoom<warps.value>), device, scores, quota,
           static_cast<int>(segments.count), static_cast<int>(segments.length), outputs, device.faults);
    return true;
  };
  const std::integral_constant<int, 8> eight;
  return by(std::integral_constant<int, 1>(), std::integral_constant<int, 4>()) ||
         by(std::integral_constant<int, 1>(), eight) || by(std::integral_constant<int, 2>(), eight) ||
         by(std::integral_constant<int, 4>(), eight) || by(eight, eight);
}

// The maximum length of each size class. If only the device knows the lengths, there is one launch for each size class.
// In a single launch, blocks with short segments would wait for as much shared memory as long segments need.
constexpr int64_t kSizes[] = {2048, 8192, INT64_MAX};

// Returns the number of threads in a block. A multiprocessor gets as many blocks as its shared memory can hold, and
// these blocks get as many threads as the registers of the multiprocessor allow. For example, an H100 has shared memory
// for five blocks of 8,192 scores, and then 48 registers for each thread. A block has at least four warps, since the
// work on histograms does not depend on the number of scores.
int threads_for(int64_t length) {
  return length <= 1024 ? 128 : length <= 16384 ? 256 : length <= 24576 ? 512 : BlockGroup::kMostThreads;
}

// A thread has four vectors in flight if the segment has at least four vectors for each thread; in shorter segments,
// some loads would contain no scores. With four vectors, a thread needs 60 registers, so only four blocks of 256
// threads share a multiprocessor. Even so, the kernel is faster than with two vectors. Larger blocks are not faster
// with four vectors: for example, only one block of 1,024 threads fits on a multiprocessor, with two vectors or with
// four.
constexpr int kManyInFlight = 4, kFewThreads = 256;

bool same(const Segments& a, const Segments& b) {
  return a.count == b.count && a.length == b.length && a.offsets32 == b.offsets32 && a.offsets64 == b.offsets64;
}

}  // namespace

void select_top(const Scores& scores, const Quota& quota, const Segments& segments, int64_t values, int64_t longest,
                const SelectionOutputs& outputs, Device& device) {
  require_places(values);
  if (segments.ragged()) {  // scores that bad offsets leave out are not selected
    clear(outputs.mask, 0, values, device);
    if (outputs.count) clear(outputs.count, 0, segments.count * 4, device);
    if (outputs.threshold) clear(outputs.threshold, 0xff, segments.count * 4, device);  // NaN
  }
  const int64_t most_shared = device_attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int64_t left = (most_shared - static_cast<int64_t>(sizeof(SearchRoom))) / 4 - Spill::kRoom;
  const int64_t fits = left > kWarp ? left : kWarp;
  const bool look_up = scores.kind == Scores::Advantages::kPerSequence && !same(scores.sequences, segments);
  const auto select_blocks = [&](int64_t shortest, int64_t most, int64_t end, const Spill& spill) {
    const int threads = threads_for(most);
    // If the mask of each row consists of whole words, no row needs an additional vector for its ends.
    const bool words = segments.length % 4 == 0 && misalignment(outputs.mask) % 4 == 0;
    const int64_t fours = words ? segments.length / 4 : (segments.length + 6) / 4;
    const bool at_once = scores.keys || scores.kind != Scores::Advantages::kPerToken;
    if (!segments.ragged() && !look_up && at_once && select_held_by(scores, quota, segments, fours, outputs, device))
      return;
    const bool many = !spill.keys && !look_up && threads <= kFewThreads && most >= kManyInFlight * 4 * threads;
    const auto kernel = many         ? select_segments<false, false, kManyInFlight>
                        : spill.keys ? look_up ? select_segments<true, true> : select_segments<false, true>
                        : look_up    ? select_segments<true, false>
                                     : select_segments<false, false>;
    launch(many ? "topk_mask (long)" : "topk_mask", kernel, segments.count, threads,
           sizeof(SearchRoom) + (most + Spill::kRoom) * sizeof(uint32_t), device, scores, quota, segments,
           SizeClass{shortest, end, most}, spill, outputs, device.faults);
  };
  if (longest > fits) select_in_pieces({scores, quota, segments, outputs}, fits, values, device);
  if (longest > fits && !segments.ragged()) return;  // all segments are long
  const int64_t in_block = longest < fits ? longest : fits;
  if (lengths_are_bounded(segments, longest, values) && longest <= fits) {
    const bool may_spill = longest < values && segments.ragged();
    Spill spill;
    if (may_spill) spill.keys = device.scratch_of<uint32_t>(Spill::size(values, segments.count));
    select_blocks(0, in_block, may_spill ? INT64_MAX : in_block, spill);
    return;
  }
  int64_t shortest = 0;
  for (const int64_t end : kSizes) {
    const int64_t most = end < in_block ? end : in_block;
    if (shortest <= most) select_blocks(shortest, most, most, {});
    shortest = most + 1;
  }
}

}  // namespace d3s
