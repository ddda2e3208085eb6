// Finds the largest logits of rows, and merges all other logits into the rows' softmax states.
//
//   launch                         kernel       reads                          -> writes
//   topk_softmax_state_ (slices)   top_slices   logits                         -> slice_states, found, exceeded
//   topk_softmax_state_ (ties)     tied_slices  logits, exceeded               -> slice_states, found
//   topk_softmax_state_ (merge)    merge_best   slice_states, found            -> states, best
//
// top_slices has a block for each slice of a row. The slice is read twice, the second time from the caches:
//
//   1. The first pass finds the maximum of each of 2,048 groups of logits. At least k logits reach the k-th largest of
//      these maxima, and of random logits, not many more.
//   2. The second pass collects the logits that reach this bound, and adds up all others.
//
// The collected logits are sorted. The first k of them are the k largest of the slice; the others are added to the sums
// in this order. If the collected logits do not fit into shared memory, for example because all logits are equal,
// tied_slices searches the k-th largest logit digit by digit, and makes the second pass again.
//
// merge_best goes through the slices of a row from left to right. Of the entries in `best` and of the slice's k
// entries, the k largest stay in `best`; the others are added to the row's state.
#include "../ops/topk_logprobs.h"

#include "bitonic_sort.h"
#include "key_search.h"
#include "row_slices.h"

namespace d3s {
namespace {

constexpr int kGroupsPerThread = 4;
constexpr int kGroups = kGroupsPerThread * kThreads;
constexpr int kMostCandidates = 2048;
static_assert(kGroups >= kMostBest && kMostCandidates >= kMostBest, "there are k maxima, and k candidates fit");

// The candidates of a block: logits of its slice that may be among the k largest.
struct Candidates {
  // The bits of an entry are inverted, because bitonic_sort() puts the smallest number first.
  alignas(16) Entry inverted[kMostCandidates];
  unsigned count;  // may be larger than kMostCandidates: then the candidates are not complete
};

struct SliceRoom {
  Candidates candidates;
  SoftmaxState shares[2][kWarps];  // of the logits that are no candidates, and of the candidates that stay outside
  FoundRoom<int> search;
  alignas(16) unsigned char group[BlockGroup::kSharedBytes];

  // The memory of the candidates, before there are any.
  __device__ uint32_t* histogram() { return reinterpret_cast<uint32_t*>(candidates.inverted); }
  __device__ uint32_t* maxima() { return histogram() + kBins; }  // keys, [kGroupsPerThread][kThreads]
};
static_assert(sizeof(Candidates::inverted) >= (kBins + kGroups) * sizeof(uint32_t), "histogram and maxima fit");

// The columns [begin, end) of a slice. In a block, an entry has the column in place of the id, which takes fewer
// registers.
struct Place {
  int begin, end;
};

// The elements of a slice that are smaller than the entry `smallest` or, if not kExact, than its logit, which takes
// fewer registers. The others become candidates, and -inf.
template <bool kExact>
struct SmallElements {
  TopkEntry smallest;
  float lowest;  // the logit of `smallest`
  int end;       // the end of the slice

  template <class T>
  __device__ __forceinline__ uint4 of(const uint4& vector, int column) const {
    const uint4 one[1] = {vector};
    if (!(largest<T>(one) >= lowest)) return vector;  // nearly always
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    return make_uint4(rest_of<T>(vector.x, column), rest_of<T>(vector.y, column + kPerWord),
                      rest_of<T>(vector.z, column + 2 * kPerWord), rest_of<T>(vector.w, column + 3 * kPerWord));
  }

 private:
  // Returns a word of a vector without its candidates.
  template <class T>
  __device__ __forceinline__ uint32_t rest_of(uint32_t word, int column) const {
    if constexpr (sizeof(T) == 4) {
      return is_candidate(float_of_bits(word), column) ? kFillWord<T> : word;
    } else {
      const Pair z = unpack(word, Tag<T>());
      uint32_t gone = is_candidate(z.low, column) ? 0xffffu : 0u;
      if (is_candidate(z.high, column + 1)) gone |= 0xffff0000u;
      return (word & ~gone) | (kFillWord<T> & gone);
    }
  }

  __device__ __forceinline__ bool is_candidate(float z, int column) const {
    if (!(z >= lowest) || column >= end) return false;
    const TopkEntry entry = topk_entry(order_key_of_number(z), column);
    if (kExact && entry < smallest) return false;
    Candidates& candidates = dynamic_shared<SliceRoom>()->candidates;
    const unsigned slot = atomicAdd(&candidates.count, 1u);
    if (slot < kMostCandidates) candidates.inverted[slot] = ~entry;
    return true;
  }
};

// Calls body(vectors, column of the first vector, turn) for the thread's vectors of a slice, kInFlight at a time, with
// kWarp vectors from one to the next. The vectors are those that warp_share() reads.
template <class T, bool kAligned, class Body>
__device__ __forceinline__ void for_turns(const RowReader<T, kAligned>& reader, Place place, const Body& body) {
  constexpr int kTurns = kSlice / kStride<T>, kShare = kStride<T> / kWarps, kApart = kWarp * kPerVector<T>;
  constexpr int kReach = kApart * (kInFlight - 1) + kPerVector<T>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = place.begin + warp * kShare + lane * kPerVector<T>;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const int own = first + turn * kStride<T>;
    if (own >= place.end) return;
    uint4 vectors[kInFlight];
    if (reader.inside(own, kReach)) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) vectors[i] = reader.kept(own + i * kApart);
    } else {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) vectors[i] = reader.edge(own + i * kApart);
    }
    body(vectors, own, turn);
  }
}

// Finds a key that at least k logits of the slice reach; kSmallestKey if the slice has fewer than k groups of numbers.
template <class T, bool kAligned>
__device__ uint32_t lower_bound(const RowReader<T, kAligned>& reader, Place place, int k, SliceRoom& room,
                                const BlockGroup& block) {
  constexpr int kTurns = kSlice / kStride<T>, kGroupsOfTurn = kGroupsPerThread / kTurns;
  constexpr int kTogether = kInFlight / kGroupsOfTurn;  // vectors of a group
  uint32_t* histogram = room.histogram();
  uint32_t* maxima = room.maxima() + block.rank;
  for (int i = 0; i < kGroupsPerThread; ++i) maxima[i * kThreads] = kAbsent;  // no other thread reads these keys
  clear_histogram(histogram, block);
  for_turns(reader, place, [&](const uint4(&vectors)[kInFlight], int, int turn) {
#pragma unroll
    for (int group = 0; group < kGroupsOfTurn; ++group) {
      uint4 of_group[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) of_group[i] = vectors[group * kTogether + i];
      maxima[(turn * kGroupsOfTurn + group) * kThreads] = order_key(largest<T>(of_group));
    }
  });
  const auto maximum = [&](int i) { return maxima[i * kThreads]; };
  static_assert(kGroupsPerThread == 4, "the keys are counted as a vector of four");
  count_first_digits(histogram, make_uint4(maximum(0), maximum(1), maximum(2), maximum(3)));
  block.sync();
  Found<int> found = find_next_digit(histogram, digit_of(0), Found<int>{0, k, k}, block, room.search);
  if (found.prefix == 0) return kSmallestKey;
  clear_histogram(histogram, block);
  for (int i = 0; i < kGroupsPerThread; ++i) count_key(histogram, maximum(i), digit_of(1), found.prefix);
  block.sync();
  found = find_next_digit(histogram, digit_of(1), found, block, room.search);
  // The last digit is not searched: few groups differ in it alone.
  return max(found.prefix << found.shift, kSmallestKey);
}

// Finds the k-th largest entry of a slice that has at least k numbers. This is slow and rare.
template <class T, bool kAligned>
__device__ TopkEntry kth_entry(const RowReader<T, kAligned>& reader, Place place, int k, SliceRoom& room,
                               const BlockGroup& block) {
  constexpr int kApart = kWarp * kPerVector<T>;
  uint32_t* histogram = room.histogram();
  const auto count_digit = [&](const auto& count) {  // count(key, column) for each logit
    clear_histogram(histogram, block);
    for_turns(reader, place, [&](const uint4(&vectors)[kInFlight], int own, int) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        int column = own + i * kApart;
        for_elements<T>(vectors[i], [&](float z) {
          if (column < place.end) count(order_key(z), column);
          ++column;
        });
      }
    });
    block.sync();
  };
  Found<int> found{0, k, k};
#pragma unroll 1
  for (int number = 0; number < kDigits; ++number) {
    const Digit digit = digit_of(number);
    count_digit([&](uint32_t key, int) { count_key(histogram, key, digit, found.prefix); });
    found = find_next_digit(histogram, digit, found, block, room.search);
  }
  const uint32_t kth = found.prefix;
  if (found.keeps_all()) return TopkEntry{kth} << 32;
  // Of the equal logits, those with the lowest columns are chosen: a search in the columns, counted from the slice's
  // end, of which the wanted one is large.
  found.prefix = 0;
  static_assert(kSlice == 1 << 15, "a column in a slice has 15 bits");
#pragma unroll 1
  for (int number = 0; number < 2; ++number) {
    const Digit digit = {number == 0 ? 7 : 0, number == 0 ? 8 : 7};
    count_digit([&](uint32_t key, int column) {
      const auto from_end = static_cast<uint32_t>(place.begin + kSlice - 1 - column);
      if (key == kth && digit.follows(from_end, found.prefix)) atomicAdd(&histogram[digit.bin_of(from_end)], 1u);
    });
    found = find_next_digit(histogram, digit, found, block, room.search);
  }
  return topk_entry(kth, place.begin + kSlice - 1 - static_cast<int>(found.prefix));
}

// What the blocks of a launch have in common. found[slice of a row][k] are the largest entries of the slice, the
// largest first, with kNoEntry at the end where the slice has fewer than k numbers.
struct SlicesOutput {
  int k;
  SoftmaxState* states;
  TopkEntry* found;
  bool* exceeded;  // whether the slice has more candidates than fit
};

// One slice of a row, which a block computes.
template <class T, bool kAligned>
class SliceBlock {
 public:
  __device__ SliceBlock(const LogitsRows& rows, const SlicesOutput& out)
      : rows_(rows),
        out_(out),
        room_(*dynamic_shared<SliceRoom>()),
        block_(room_.group),
        columns_(static_cast<int>(rows.layout.columns)),
        row_(blockIdx.x / slices_of(columns_)),
        slice_(static_cast<int>(blockIdx.x % slices_of(columns_))),
        place_{slice_ * kSlice, min((slice_ + 1) * kSlice, columns_)} {}

  __device__ bool masked_out() const { return rows_.masked_out(row_); }
  __device__ RowReader<T, kAligned> reader() const { return {row_at<T>(rows_, row_), columns_}; }
  __device__ TopkEntry lower_bound() const {
    return TopkEntry{d3s::lower_bound(reader(), place_, out_.k, room_, block_)} << 32;
  }
  __device__ TopkEntry kth_entry() const { return d3s::kth_entry(reader(), place_, out_.k, room_, block_); }

  // Collects the elements from `smallest` on, and adds up all others. Returns whether the candidates fit.
  template <bool kExact>
  __device__ bool collect(TopkEntry smallest) const {
    if (block_.rank == 0) room_.candidates.count = 0;
    block_.sync();
    const SmallElements<kExact> elements = {smallest, logit_of(smallest), place_.end};
    const SoftmaxState share = warp_share(reader(), columns_, slice_, rows_.temperatures[row_], elements);
    if (block_.rank % kWarp == 0) room_.shares[0][block_.rank / kWarp] = share;
    block_.sync();
    return room_.candidates.count <= kMostCandidates;
  }

  // Writes the k largest candidates, and the state of all other elements.
  __device__ void write() const {
    const Candidates& candidates = room_.candidates;
    const int count = static_cast<int>(candidates.count), k = out_.k;
    const float temperature = rows_.temperatures[row_], scale = kLog2E / temperature;
    bitonic_sort(room_.candidates.inverted, count, block_);
    for (int i = block_.rank; i < k; i += kThreads)
      out_.found[int64_t{blockIdx.x} * k + i] =
          i < count ? ~candidates.inverted[i] - rows_.id(0) : kNoEntry;  // ids instead of columns
    LaneState outside;
    for (int i = k + block_.rank; i < count; i += kThreads) {
      const float z[1] = {logit_of(~candidates.inverted[i])};
      outside.add(z, scale);
    }
    const SoftmaxState share = warp_merge(outside.state(scale), 1.f / temperature);
    if (block_.rank % kWarp == 0) room_.shares[1][block_.rank / kWarp] = share;
    block_.sync();
    if (block_.rank >= kWarp) return;
    const SoftmaxState state = merge(merge_shares(room_.shares[0], temperature),
                                     merge_shares(room_.shares[1], temperature), 1.f / temperature);
    if (block_.rank == 0) out_.states[blockIdx.x] = state;
  }

 private:
  const LogitsRows& rows_;
  const SlicesOutput& out_;
  SliceRoom& room_;
  const BlockGroup block_;
  const int columns_;
  const int64_t row_;
  const int slice_;
  const Place place_;
};

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kAligned>)
    top_slices(const __grid_constant__ LogitsRows rows, const __grid_constant__ SlicesOutput out) {
  const SliceBlock<T, kAligned> block(rows, out);
  if (block.masked_out()) return;
  const bool fit = block.template collect<false>(block.lower_bound());
  if (threadIdx.x == 0) out.exceeded[blockIdx.x] = !fit;
  if (fit) block.write();
}

// Computes the slices in which the candidates of top_slices did not fit: a kernel of its own, whose search takes more
// registers.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    tied_slices(const __grid_constant__ LogitsRows rows, const __grid_constant__ SlicesOutput out) {
  const SliceBlock<T, kAligned> block(rows, out);
  if (block.masked_out() || !out.exceeded[blockIdx.x]) return;
  block.template collect<true>(block.kth_entry());  // exactly k candidates
  block.write();
}

constexpr int kMergers = 128;

// Merges two lists of k entries, the largest first. Each thread finds the ranks of some entries by binary search.
__device__ void merge_entries(const TopkEntry* first, const TopkEntry* second, int k, TopkEntry* merged) {
  const auto rank_in = [&](const TopkEntry* list, const auto& is_before) {
    int low = 0, high = k;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (is_before(list[middle]))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  // Only kNoEntry can be equal. Then the first list comes first, so that each entry has a rank of its own.
  for (int i = static_cast<int>(threadIdx.x); i < k; i += kMergers) {
    const TopkEntry a = first[i], b = second[i];
    merged[i + rank_in(second, [&](TopkEntry other) { return other > a; })] = a;
    merged[i + rank_in(first, [&](TopkEntry other) { return other >= b; })] = b;
  }
}

__global__ void __launch_bounds__(kMergers)
    merge_best(const __grid_constant__ LogitsRows rows, int k, const SoftmaxState* slice_states, const TopkEntry* found,
               RowState* states, TopkEntry* best_of_rows, const __grid_constant__ Faults faults) {
  constexpr int kMergeWarps = kMergers / kWarp;
  const int64_t row = blockIdx.x;
  if (rows.masked_out(row)) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int slices = slices_of(static_cast<int>(rows.layout.columns));
  const float temperature = rows.temperatures[row], inverse_temperature = 1.f / temperature;
  const float scale = kLog2E / temperature;
  TopkEntry* best = dynamic_shared<TopkEntry>();  // [k]
  TopkEntry* of_slice = best + k;                 // [k]
  TopkEntry* merged = of_slice + k;               // [2 k]
  auto* shares = reinterpret_cast<SoftmaxState*>(merged + 2 * k);
  for (int i = thread; i < k; i += kMergers) best[i] = flipped(best_of_rows[row * k + i]);
  SoftmaxState state = states[row].get();
  for (int slice = 0; slice < slices; ++slice) {
    const int64_t index = row * slices + slice;
    for (int i = thread; i < k; i += kMergers) of_slice[i] = found[index * k + i];
    __syncthreads();
    merge_entries(best, of_slice, k, merged);
    __syncthreads();
    LaneState driven_out;
    for (int i = thread; i < k; i += kMergers) {
      best[i] = merged[i];
      const TopkEntry entry = merged[k + i];
      const float z[1] = {entry == kNoEntry ? -INFINITY : logit_of(entry)};
      driven_out.add(z, scale);
    }
    const SoftmaxState share = warp_merge(driven_out.state(scale), inverse_temperature);
    if (lane == 0) shares[thread / kWarp] = share;
    __syncthreads();
    if (thread >= kWarp) continue;
    const SoftmaxState out = warp_merge(lane < kMergeWarps ? shares[lane] : SoftmaxState(), inverse_temperature);
    state = merge(merge(state, slice_states[index], inverse_temperature), out, inverse_temperature);
  }
  for (int i = thread; i < k; i += kMergers) best_of_rows[row * k + i] = flipped(best[i]);
  if (thread > 0) return;
  states[row].set(state);
  note_row(temperature, false, faults);
}

}  // namespace

void merge_topk_tile(const LogitsRows& rows, RowState* states, const BestEntries& best, Device& device) {
  require_columns(rows.layout.columns);
  const int64_t count = rows.layout.count, slices = slices_of(static_cast<int>(rows.layout.columns));
  const int64_t tasks = count * slices;
  if (tasks == 0) return;
  const int k = static_cast<int>(best.k);
  const SlicesOutput out = {k, device.scratch_of<SoftmaxState>(tasks), device.scratch_of<TopkEntry>(tasks * k),
                            device.scratch_of<bool>(tasks)};
  dispatch_rows(rows, [&](auto tag, auto aligned) {
    using T = typename decltype(tag)::type;
    constexpr bool kAligned = decltype(aligned)::value;
    launch("topk_softmax_state_ (slices)", top_slices<T, kAligned>, tasks, kThreads, sizeof(SliceRoom), device, rows,
           out);
    launch("topk_softmax_state_ (ties)", tied_slices<T, kAligned>, tasks, kThreads, sizeof(SliceRoom), device, rows,
           out);
  });
  launch("topk_softmax_state_ (merge)", merge_best, count, kMergers,
         4 * k * sizeof(TopkEntry) + kMergers / kWarp * sizeof(SoftmaxState), device, rows, k,
         static_cast<const SoftmaxState*>(out.states), static_cast<const TopkEntry*>(out.found), states, best.flipped,
         device.faults);
}

}  // namespace d3s
