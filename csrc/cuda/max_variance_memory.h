// Finds the k values with the largest variance in a segment whose keys are in shared or global memory.
#pragma once

#include "bitonic_sort.h"
#include "max_variance_warp.h"

namespace d3s {

// Returns the entry of a value: its order key and its index. Unusable values sort last.
D3S_HOST_DEVICE Entry entry(uint32_t key, int64_t index) { return Entry{key} << 32 | static_cast<uint32_t>(index); }
D3S_HOST_DEVICE uint32_t key_of(Entry e) { return static_cast<uint32_t>(e >> 32); }

// ---- splits ------------------------------------------------------------------------------------------------------

// The number of splits that a thread tries in a round.
template <class Group>
constexpr int kSplits = std::is_same_v<Group, WarpGroup> ? 1 : 4;

namespace {  // internal linkage, like Moments

// One thread's share of the moments of splits.
struct SplitSums {
  Moments high;   // over the thread's keys among the last k keys
  Moments moved;  // how the thread's exchanges change the moments, from one split to another
};

// A block as a group of threads. Between two barriers, it adds up several values of each thread. This takes no longer
// than adding up one value, since most of the time is spent waiting at barriers.
struct SplitBlock : BlockGroup {
  static constexpr int kMostThreads = 512, kMostNumbers = 4;
  static constexpr int kSharedBytes =
      BlockGroup::kSharedBytes + kMostThreads / kWarp * kMostNumbers * static_cast<int>(sizeof(double));

  __device__ explicit SplitBlock(unsigned char* shared)
      : BlockGroup(shared), of_warps_(reinterpret_cast<double*>(shared + BlockGroup::kSharedBytes)) {}

  // Replaces each element of `numbers` with the element's sum over all threads.
  template <int kCount>
  __device__ void sum(double (&numbers)[kCount]) const {
#pragma unroll
    for (double& number : numbers) number = warp_reduce(number, Sum());
    if (rank % kWarp == 0) put(numbers);
    sync();
    get(numbers, [](int) {});
    sync();  // before the next call overwrites of_warps_
  }

  // Replaces each element of `numbers` with the element's sum over the threads before this thread. Sets `all` to the
  // sums over all threads.
  template <int kCount>
  __device__ void exclusive_sum(double (&numbers)[kCount], double (&all)[kCount]) const {
    double earlier[kCount] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      all[i] = numbers[i];
      numbers[i] = warp_exclusive_sum(all[i]);
    }
    if (rank % kWarp == kWarp - 1) put(all);
    sync();
    get(all, [&](int warp) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) earlier[i] = warp == rank / kWarp ? all[i] : earlier[i];
    });
    sync();
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] += earlier[i];
  }

 private:
  template <int kCount>
  __device__ void put(const double (&numbers)[kCount]) const {
    static_assert(kCount <= kMostNumbers);
#pragma unroll
    for (int i = 0; i < kCount; ++i) of_warps_[rank / kWarp * kCount + i] = numbers[i];
  }
  // Sets `sums` to the sums over all warps. Before a warp is added, calls before(warp); `sums` then contains the sums
  // over the warps before `warp`.
  template <int kCount, class Body>
  __device__ void get(double (&sums)[kCount], const Body& before) const {
#pragma unroll
    for (double& sum : sums) sum = 0.0;
#pragma unroll 4
    for (int warp = 0; warp < warps(); ++warp) {
      before(warp);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += of_warps_[warp * kCount + i];
    }
  }

  double* of_warps_;
};

__device__ inline SplitSums sum_of(const SplitSums& own, const SplitBlock& block) {
  double sums[] = {own.high.sum, own.high.square, own.moved.sum, own.moved.square};
  block.sum(sums);
  return {{sums[0], sums[1]}, {sums[2], sums[3]}};
}

// Returns the sum of `start` over all threads, plus the sum of `moved` over the threads before this thread. Sets `end`
// to the sum of `start` plus `moved` over all threads.
template <class Group>
__device__ Moments running_sum(const Moments& start, const Moments& moved, Moments& end, const Group& group) {
  const Moments first = {group.reduce(start.sum, Sum()), group.reduce(start.square, Sum())};
  Moments all;
  const Moments here = {first.sum + group.exclusive_sum(moved.sum, all.sum),
                        first.square + group.exclusive_sum(moved.square, all.square)};
  end = {first.sum + all.sum, first.square + all.square};
  return here;
}
__device__ inline Moments running_sum(const Moments& start, const Moments& moved, Moments& end,
                                      const SplitBlock& block) {
  double sums[] = {moved.sum, moved.square, start.sum, start.square}, all[4];
  block.exclusive_sum(sums, all);
  end = {all[2] + all[0], all[3] + all[1]};
  return {all[2] + sums[0], all[3] + sums[1]};
}

}  // namespace

// The splits of n sorted keys, where n > k > 1. `at(i)` is the i-th key. Split i has the first i and the last k - i
// keys. Split i + 1 has key i instead of key n - k + i. So the moments of all splits are a running sum over these
// exchanges of keys. In each round, every thread tries a few neighbouring splits, so that a warp loads neighbouring
// keys.
template <class Keys, class Group>
class Splits {
 public:
  __device__ Splits(const Keys& at, int n, int k, const Group& group)
      : at_(at), group_(group), k_(k), last_k_(n - k), shift_(order_key_value(at(n / 2))) {}

  // Returns the sums over this thread's share of the exchanges from split `from` to split `to`.
  __device__ SplitSums own_sums(int from, int to) const {
    SplitSums own;
    for (int round = from; round < to; round += group_.size * kEach) {
      float in[kEach], out[kEach];  // from `to` on: values that add nothing
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const int i = round + group_.rank + r * group_.size;
        in[r] = i < to ? order_key_value(at_(i)) : shift_;
        out[r] = i < to ? order_key_value(at_(last_k_ + i)) : shift_;
      }
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        own.high.add(shifted(out[r]));
        exchange(own.moved, in[r], out[r]);
      }
    }
    return own;
  }

  // Calls body(split, spread) for the splits in [from, to), where `to` is at most k + 1. share() returns this thread's
  // share of the moments of split `from`. The loads in share() run at the same time as the loads of keys.
  template <class Share, class Body>
  __device__ void for_each(const Share& share, int from, int to, const Body& body) const {
    Moments start;
    for (int round = from; round < to; round += group_.size * kEach) {
      const int first = round + group_.rank * kEach;
      float in[kEach], out[kEach];  // from index k on: an exchange of equal values
      Moments moved, end;
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const bool exchanged = first + r < k_;
        in[r] = exchanged ? order_key_value(at_(first + r)) : shift_;
        out[r] = exchanged ? order_key_value(at_(last_k_ + first + r)) : shift_;
      }
      if (round == from) start = share();
#pragma unroll
      for (int r = 0; r < kEach; ++r) exchange(moved, in[r], out[r]);
      Moments own = running_sum(start, moved, end, group_);
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        if (first + r < to) body(first + r, split_spread(own, Moments(), static_cast<double>(k_)));
        exchange(own, in[r], out[r]);
      }
      start = group_.rank == 0 ? end : Moments();
    }
  }

 private:
  static constexpr int kEach = kSplits<Group>;

  __device__ double shifted(float value) const { return static_cast<double>(value) - shift_; }
  __device__ void exchange(Moments& moments, float to, float from) const {
    const double in = shifted(to), out = shifted(from);
    moments.sum += in - out;
    moments.square += in * in - out * out;
  }

  const Keys& at_;
  const Group& group_;
  int k_, last_k_;  // last_k_: the index of the first of the last k keys
  float shift_;
};

// Returns how many of the k kept keys come from the low end of n sorted keys, where n > k > 1.
template <class Keys, class Group>
__device__ int best_split(const Keys& at, int n, int k, const Group& group) {
  const Splits<Keys, Group> splits(at, n, k, group);
  const Moments high = splits.own_sums(0, k).high;
  const auto start = [&] { return high; };
  double best = -HUGE_VAL;
  splits.for_each(start, 0, k + 1, [&](int, double spread) { best = spread > best ? spread : best; });
  const double equal = equal_spread(group.reduce(best, Max()));
  int chosen = 0;
  splits.for_each(start, 0, k + 1, [&](int i, double spread) { chosen = spread >= equal ? i : chosen; });
  return group.reduce(chosen, Max());
}

// Returns whether no splits need to be tried. This is so if all values are kept, or if at most one value is kept. One
// value has no variance, so the lowest value is then kept.
D3S_HOST_DEVICE bool keeps_lowest(int64_t usable, int64_t keep) { return usable <= keep || keep <= 1; }
D3S_HOST_DEVICE Ends lowest(int64_t usable, int64_t keep) { return {usable < keep ? usable : keep, 0, usable}; }

template <class Keys, class Group>
__device__ Ends find_ends(const Keys& at, int usable, int64_t keep, const Group& group) {
  if (keeps_lowest(usable, keep)) return lowest(usable, keep);
  const int k = static_cast<int>(keep), low = best_split(at, usable, k, group);
  return {low, k - low, usable};
}

// ---- sort and mark -----------------------------------------------------------------------------------------------

// Selects the values of one segment, and writes the segment's mask. `entries` has room for n entries.
template <class T, class Group>
__device__ void select_segment(const T* values, const bool* mask, int n, int64_t k, Entry* entries, const Group& group,
                               bool* out) {
  [[maybe_unused]] constexpr int kTurns = kUnrolled<Group>;
  int usable = 0;
#pragma unroll kTurns
  for (int i = group.rank; i < n; i += group.size) {
    const uint32_t key = usable_key(values, mask, i);
    entries[i] = entry(key, i);
    usable += key != kUnusable;
  }
  usable = group.reduce(usable, Sum());
  group.sync();
  bitonic_sort(entries, n, group);
  const auto at = [&](int i) { return key_of(entries[i]); };
  const Ends ends = find_ends(at, usable, k, group);
#pragma unroll kTurns
  for (int rank = group.rank; rank < n; rank += group.size) {
    const auto index = static_cast<uint32_t>(entries[rank]);
    // If offsets are bad, segments may overlap and overwrite each other's entries, so that an index may be out of
    // bounds.
    if (index < static_cast<uint32_t>(n)) out[index] = ends.keeps(rank);
  }
}

}  // namespace d3s
