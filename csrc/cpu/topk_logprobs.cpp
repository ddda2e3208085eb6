// Finds the largest logits of rows, and merges all other logits into the rows' softmax states, slice by slice.
//
// A row reads its logits twice: the first pass looks for logits that are larger than the smallest entry in `best`,
// which after some slices are rare; the second pass adds up the slice, which is then in the nearest caches. The second
// pass is the loop of logprob_entropy. Where a slice has new entries, the loop reads a copy of the slice, in which
// these logits are -inf.
#include "../ops/topk_logprobs.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "row_slices.h"
#include "topk_loops.h"

namespace d3s {
namespace {

static_assert(kSlice <= 65536, "places in a slice are 16-bit");

// One slice of a row.
template <class T>
struct SliceOf {
  const T* logits;
  int64_t n;
  int64_t first_id;
  const T* next;  // what the caller reads next
};

// The entries of a slice that are larger than a row's smallest entry: at most k, the largest first.
struct FoundEntries {
  TopkEntry* entries;
  int64_t count = 0;
};

// Works on one slice at a time, with buffers of its own. Each thread has one object.
template <class T>
class SliceTop {
 public:
  explicit SliceTop(int64_t k) : k_(k), places_(kSlice), maxima_(kSlice), entries_(kSlice), kept_(kSlice) {}

  // Finds the k largest entries of the slice among those that are larger than `smallest`.
  void find(const SliceOf<T>& slice, TopkEntry smallest, FoundEntries& found) {
    found.count = 0;
    float lowest = -INFINITY;
    if (smallest != kNoEntry) {
      // An equal logit with a higher id has a smaller entry.
      const uint32_t key = key_of(smallest) + (slice.first_id > id_of(smallest) ? 1 : 0);
      if (key > kLargestKey) return;
      lowest = order_key_value(key);
    }
    const bool is_free = smallest == kNoEntry;
    if (is_free) lowest = std::max(lowest, lower_bound(slice));
    int64_t count = loops_.places_from(slice.logits, slice.n, lowest, places_.data());
    if (!is_free && count > kMany * k_) {
      lowest = std::max(lowest, lower_bound(slice));
      count = loops_.places_from(slice.logits, slice.n, lowest, places_.data());
    }
    int64_t larger = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = places_[i];
      const TopkEntry entry = topk_entry(order_key_of_number(to_float(slice.logits[place])), slice.first_id + place);
      entries_[larger] = entry;
      larger += entry > smallest;
    }
    const auto begin = entries_.begin(), end = begin + larger;
    const auto cut = begin + std::min(k_, larger);
    if (cut < end) std::nth_element(begin, cut, end, std::greater<>());
    std::sort(begin, cut, std::greater<>());
    std::copy(begin, cut, found.entries);
    found.count = cut - begin;
  }

  // Returns the state of the slice's logits without the first `left_out` entries that were found in it.
  SoftmaxState state(const SliceOf<T>& slice, const TopkEntry* found, int64_t left_out, float scale) {
    const T* logits = slice.logits;
    if (left_out > 0) {
      std::copy(logits, logits + slice.n, kept_.data());
      for (int64_t i = 0; i < left_out; ++i) kept_[id_of(found[i]) - slice.first_id] = from_float<T>(-INFINITY);
      logits = kept_.data();
    }
    const SoftmaxSums sums = softmax_rows().of(Tag<T>()).slice(logits, slice.n, scale, slice.next);
    return {sums.max, sums.sum, sums.dot};
  }

 private:
  // If more entries than this, times k, are larger than the row's smallest entry, a better lower bound is searched.
  static constexpr int64_t kMany = 4;

  // Returns a number that at least k logits of the slice reach, unless the slice is too short: the k-th largest maximum
  // of groups of logits. About 1.4 k logits reach it.
  float lower_bound(const SliceOf<T>& slice) {
    int64_t groups = kGroupsMultiple;
    while (groups < 2 * k_) groups *= 2;
    if (slice.n < groups) return -INFINITY;
    loops_.group_maxima(slice.logits, slice.n, groups, maxima_.data());
    const auto kth = maxima_.begin() + (k_ - 1);
    std::nth_element(maxima_.begin(), kth, maxima_.begin() + groups, std::greater<>());
    return *kth;
  }

  const int64_t k_;
  const TopkLoopsOf<T>& loops_ = topk_loops().of(Tag<T>());
  std::vector<uint16_t> places_;
  std::vector<float> maxima_;
  std::vector<TopkEntry> entries_;
  std::vector<T> kept_;
};

// The largest entries of one row.
class BestOfRow {
 public:
  explicit BestOfRow(int64_t k) : best_(k), merged_(k), driven_out_(k) {}

  void load(const TopkEntry* flipped_entries) {
    std::transform(flipped_entries, flipped_entries + best_.size(), best_.begin(), flipped);
  }
  void store(TopkEntry* flipped_entries) const { std::transform(best_.begin(), best_.end(), flipped_entries, flipped); }
  TopkEntry smallest() const { return best_.back(); }

  // Takes the largest of the entries that were found in a slice, and returns how many it takes. Sets `out` to the state
  // of the entries that leave to make room.
  int64_t take(const FoundEntries& found, float scale, SoftmaxState& out) {
    const auto k = static_cast<int64_t>(best_.size());
    int64_t stay = 0, come = 0;
    while (stay + come < k)
      if (come < found.count && found.entries[come] > best_[stay])
        ++come;
      else
        ++stay;
    out = {};
    if (come == 0) return 0;
    int64_t count = 0;
    for (int64_t i = stay; i < k && best_[i] != kNoEntry; ++i) driven_out_[count++] = logit_of(best_[i]);
    if (count > 0) {
      const SoftmaxSums sums = softmax_rows().float32.slice(driven_out_.data(), count, scale, driven_out_.data());
      out = {sums.max, sums.sum, sums.dot};
    }
    std::merge(best_.begin(), best_.begin() + stay, found.entries, found.entries + come, merged_.begin(),
               std::greater<>());
    best_.swap(merged_);
    return come;
  }

 private:
  std::vector<TopkEntry> best_, merged_;
  std::vector<float> driven_out_;
};

// What the threads share.
template <class T>
struct Work {
  const LogitsRows& rows;
  RowState* states;
  BestEntries best;
  const std::vector<int64_t>& live;  // the rows that are not masked out
  int64_t slices;

  SliceOf<T> slice(int64_t row, int64_t number, const T* next_row) const {
    const int64_t begin = number * kSlice, end = std::min(rows.layout.columns, begin + kSlice);
    const T* p = static_cast<const T*>(rows.logits) + rows.layout.offset(row);
    return {p + begin, end - begin, rows.id(begin), end < rows.layout.columns ? p + end : next_row};
  }
  const T* first_logit(int64_t row) const { return slice(row, 0, nullptr).logits; }
  float scale(int64_t row) const { return kLog2E / rows.temperatures[row]; }
  TopkEntry* best_of(int64_t row) const { return best.flipped + row * best.k; }
  void merge_into(SoftmaxState& state, int64_t row, const SoftmaxState& rest, const SoftmaxState& driven_out) const {
    const float inverse_temperature = 1.f / rows.temperatures[row];
    state = merge(merge(state, rest, inverse_temperature), driven_out, inverse_temperature);
  }
};

// A thread computes whole rows.
template <class T>
void merge_many_rows(const Work<T>& work) {
  const auto count = static_cast<int64_t>(work.live.size());
  parallel_for(count, 1 + kGrain / (work.rows.layout.columns + 1), [&](int64_t begin, int64_t end) {
    SliceTop<T> top(work.best.k);
    BestOfRow best(work.best.k);
    std::vector<TopkEntry> entries(work.best.k);
    FoundEntries found{entries.data()};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = work.live[i];
      const float scale = work.scale(row);
      const T* next_row = work.first_logit(work.live[i + 1 < end ? i + 1 : i]);
      SoftmaxState state = work.states[row].get(), driven_out;
      best.load(work.best_of(row));
      for (int64_t number = 0; number < work.slices; ++number) {
        const SliceOf<T> slice = work.slice(row, number, next_row);
        top.find(slice, best.smallest(), found);
        const int64_t taken = best.take(found, scale, driven_out);
        work.merge_into(state, row, top.state(slice, found.entries, taken, scale), driven_out);
      }
      best.store(work.best_of(row));
      work.states[row].set(state);
    }
  });
}

// A thread computes some slices of a row: first the entries of every slice, then, where it is known how many of them
// the row takes, the states of the slices without these entries.
template <class T>
void merge_few_rows(const Work<T>& work) {
  const int64_t k = work.best.k, slices = work.slices, tasks = static_cast<int64_t>(work.live.size()) * slices;
  std::vector<TopkEntry> entries(tasks * k);
  std::vector<FoundEntries> found(tasks);
  std::vector<int64_t> taken(tasks);
  std::vector<SoftmaxState> rest(tasks), driven_out(tasks);
  const auto each = [&](const auto& body) {  // body(task, row, slice, the thread's object)
    parallel_for(tasks, kGrain / kSlice, [&](int64_t begin, int64_t end) {
      SliceTop<T> top(k);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = work.live[task / slices];
        body(task, row, work.slice(row, task % slices, work.first_logit(row)), top);
      }
    });
  };
  each([&](int64_t task, int64_t row, const SliceOf<T>& slice, SliceTop<T>& top) {
    found[task].entries = entries.data() + task * k;
    top.find(slice, flipped(work.best_of(row)[k - 1]), found[task]);
  });
  BestOfRow best(k);
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = work.live[task / slices];
    if (task % slices == 0) best.load(work.best_of(row));
    taken[task] = best.take(found[task], work.scale(row), driven_out[task]);
    if (task % slices == slices - 1) best.store(work.best_of(row));
  }
  each([&](int64_t task, int64_t row, const SliceOf<T>& slice, SliceTop<T>& top) {
    rest[task] = top.state(slice, found[task].entries, taken[task], work.scale(row));
  });
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = work.live[task / slices];
    SoftmaxState state = work.states[row].get();
    work.merge_into(state, row, rest[task], driven_out[task]);
    work.states[row].set(state);
  }
}

}  // namespace

void merge_topk_tile(const LogitsRows& rows, RowState* states, const BestEntries& best, Device&) {
  const std::vector<int64_t> live = unmasked(rows);
  const int64_t slices = (rows.layout.columns + kSlice - 1) / kSlice, threads = torch::stable::get_num_threads();
  const bool few = slices > 1 && static_cast<int64_t>(live.size()) < 8 * threads;
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Work<T> work{rows, states, best, live, slices};
    if (few)
      merge_few_rows(work);
    else
      merge_many_rows(work);
  });
}

}  // namespace d3s
