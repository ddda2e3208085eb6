// support_weight_grad_: computes, for each id, the sum of grad * hidden[row] over the places of this id.
#pragma once

#include "segment_sort.h"
#include "support_sums.h"

namespace d3s {
namespace {

constexpr int kShort = 16;  // a warp adds up runs of at most this many places; must not exceed kWarp
constexpr int kAcross = 4;  // vectors of a row that a lane loads before it uses the first

// Writes the entry of each place: the place's id. The places are later sorted by their entries. A place without a
// gradient gets the largest entry, so that it comes last.
__global__ void make_entries(const __grid_constant__ SupportGradient gradient, int64_t rows, int64_t tokens,
                             uint64_t* entries, uint32_t* indices) {
  const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (place >= gradient.places) return;
  entries[place] = static_cast<uint64_t>(gradient.has(place, rows, tokens) ? gradient.tokens[place] : tokens);
  indices[place] = static_cast<uint32_t>(place);
}

// The places, sorted by id. The places of one id are then neighbours; they are called the id's run.
struct Runs {
  SortedEntries sorted;
  int64_t count;

  __device__ bool has(int64_t i, int64_t token) const {
    return i >= 0 && i < count && static_cast<int64_t>(sorted.entries[i]) == token;
  }
  // Returns the index of the first entry in [low, high) for which `past` is true; `high` if there is none.
  template <class Past>
  __device__ int64_t first_from(int64_t low, int64_t high, const Past& past) const {
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (past(static_cast<int64_t>(sorted.entries[middle])))
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
  // These two functions return the beginning and the end of an id's run. Entry i must be in this run.
  __device__ int64_t begin(int64_t i, int64_t token) const {
    return first_from(0, i, [&](int64_t other) { return other >= token; });
  }
  __device__ int64_t end(int64_t i, int64_t token) const {
    return first_from(i, count, [&](int64_t other) { return other > token; });
  }
};

template <class T, class To>
__device__ void add_to_token(const ColumnSums<T>& total, const Matrix& out, const Vector& bias_out, int64_t token,
                             bool aligned) {
  total.write(row_of<To>(out, token), true, aligned);
  if (bias_out.values && total.first == 0) bias_out.add(token, total.of_factors);
}

// The sums of one lane over several rows. A lane has the columns of kCount vectors.
template <class T, int kCount>
struct LaneSums {
  float sums[kCount][kPerVector<T>] = {};

  // Adds the terms of the first `count` lanes. `own` is this lane's term. load(row, j) returns this lane's vector j of
  // a row.
  template <class Load>
  __device__ void add(const Matrix& hidden, const Term& own, int count, const Load& load) {
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const T* row = row_of<T>(hidden, __shfl_sync(kAllLanes, own.row, k));
      const float factor = __shfl_sync(kAllLanes, own.factor, k);
      uint4 x[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[j] = load(row, j);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        int i = 0;
        for_elements<T>(x[j], [&](float value) { sums[j][i] = fmaf(factor, value, sums[j][i]), ++i; });
      }
    }
  }
};

// A warp adds up a run of at most kShort places, for all columns. Most runs have one place.
template <class T, class To>
__device__ void sum_short_run(const SupportGradient& gradient, const Matrix& hidden, const Runs& runs, int64_t first,
                              bool aligned, bool out_aligned, const Matrix& out, const Vector& bias_out) {
  constexpr int64_t kStep = kWarp * kPerVector<T>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (first >= runs.count) return;
  // The loads here do not wait for each other.
  const int64_t token = static_cast<int64_t>(runs.sorted.entries[first]), i = first + lane;
  const uint32_t place = i < runs.count ? runs.sorted.indices[i] : 0;
  const bool mine = runs.has(i, token), begins = !runs.has(first - 1, token), ends = !runs.has(first + kShort, token);
  if (token >= out.rows || !begins || !ends) return;
  const Term own = mine ? Term{gradient.rows[place], gradient.grad[place]} : Term();
  const int count = __popc(__ballot_sync(kAllLanes, mine));

  To* to = row_of<To>(out, token);
  int64_t column = lane * kPerVector<T>, end = kAcross * kStep;
  for (; aligned && out_aligned && end <= hidden.columns; column += kAcross * kStep, end += kAcross * kStep) {
    LaneSums<T, kAcross> total;
    total.add(hidden, own, count, [&](const T* row, int j) {
      return load_cached(reinterpret_cast<const uint4*>(row + column + j * kStep));
    });
#pragma unroll
    for (int j = 0; j < kAcross; ++j) write_vector<T>(total.sums[j], to + column + j * kStep, true);
  }
  // All lanes stay in the loop while any lane has a column left, since add() exchanges terms between lanes.
  for (; column - lane * kPerVector<T> < hidden.columns; column += kStep) {
    LaneSums<T, 1> total;
    total.add(hidden, own, count,
              [&](const T* row, int) { return load_elements(row, column, hidden.columns, aligned); });
    write_sums<T>(total.sums[0], to, column, hidden.columns, true, out_aligned);
  }

  if (!bias_out.values) return;
  float of_factors = 0.f;
  for (int k = 0; k < count; ++k) of_factors += __shfl_sync(kAllLanes, own.factor, k);
  if (lane == 0) bias_out.add(token, of_factors);
}

// A block adds up one stretch of a longer run, for a piece of the columns. There is a block for each index i that is a
// multiple of kShort. The first stretch of a run belongs to the first such index in the run. A later stretch belongs to
// the last such index at or before the stretch's beginning.
template <class T, class To>
__device__ void sum_stretch(const SupportGradient& gradient, const Matrix& hidden, const Runs& runs, int64_t i,
                            int64_t piece, bool aligned, bool out_aligned, const StretchSums& stretches,
                            const Matrix& out, const Vector& bias_out) {
  const int64_t token = static_cast<int64_t>(runs.sorted.entries[i]);
  // If entry i is in a run of more than kShort places, at least one of these two entries is in the same run.
  if (token >= out.rows || !(runs.has(i - kShort / 2, token) || runs.has(i + kShort / 2, token))) return;
  const int64_t run = runs.begin(i, token), after = i - run;
  const int64_t n = after < kShort ? 0 : ceil_div(after, kStretch), first = run + n * kStretch;
  if (after < kShort ? !runs.has(run + kShort, token) : first - i >= kShort || !runs.has(first, token)) return;
  ColumnSums<T> total(piece, hidden.columns);
  const auto term_at = [&](int64_t at) {
    if (!runs.has(at, token)) return Term();
    const uint32_t place = runs.sorted.indices[at];
    return Term{gradient.rows[place], gradient.grad[place]};
  };
  for (int64_t at = first; at < first + kStretch && runs.has(at, token); at += kWarp)
    total.add_terms(hidden, aligned, at, at + kWarp, term_at);
  if (runs.has(run + kStretch, token))
    stretches.keep(stretches.at(run, n), total);
  else
    add_to_token<T, To>(total, out, bias_out, token, out_aligned);
}

// The first blocks handle the stretches of long runs, since long runs take the most time. After these blocks, there is
// one warp for each place.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_tokens(const __grid_constant__ SupportGradient gradient, const __grid_constant__ Matrix hidden,
               const __grid_constant__ Runs runs, uint32_t long_blocks, uint32_t pieces, bool aligned, bool out_aligned,
               const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out,
               const __grid_constant__ Vector bias_out) {
  if (blockIdx.x < long_blocks) {
    sum_stretch<T, To>(gradient, hidden, runs, int64_t{blockIdx.x / pieces} * kShort, blockIdx.x % pieces, aligned,
                       out_aligned, stretches, out, bias_out);
    return;
  }
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  sum_short_run<T, To>(gradient, hidden, runs, (blockIdx.x - long_blocks) * warps + warp, aligned, out_aligned, out,
                       bias_out);
}

// There is a block for each multiple of kStretch among the indices of the sorted places. Every long run contains at
// least one such multiple; the block of the run's first multiple combines the partial sums of the run.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    join_tokens(const __grid_constant__ Runs runs, uint32_t pieces, bool out_aligned,
                const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out,
                const __grid_constant__ Vector bias_out) {
  const int64_t i = blockIdx.x / pieces * kStretch, token = static_cast<int64_t>(runs.sorted.entries[i]);
  if (token >= out.rows || runs.has(i - kStretch, token)) return;
  const int64_t run = runs.begin(i, token), places = runs.end(i, token) - run;
  if (places <= kStretch) return;
  add_to_token<T, To>(stretches.joined<T>(run, places, blockIdx.x % pieces), out, bias_out, token, out_aligned);
}

}  // namespace

}  // namespace d3s
