// kept_weight_grad_: for each token, the sum over the places that stand for it.
#pragma once

#include "kept_sums.h"
#include "segment_sort.h"

namespace d3s {
namespace {

// The sort is by token; places without a gradient come last.
__global__ void make_entries(const __grid_constant__ KeptGradient gradient, int64_t rows, int64_t tokens,
                             uint64_t* entries, uint32_t* indices) {
  const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (place >= gradient.places) return;
  entries[place] = static_cast<uint64_t>(gradient.has(place, rows, tokens) ? gradient.tokens[place] : tokens);
  indices[place] = static_cast<uint32_t>(place);
}

// Places sorted by token. Those of a token are its run.
struct Runs {
  SortedEntries sorted;
  int64_t count;

  __device__ bool has(int64_t i, int64_t token) const {
    return i >= 0 && i < count && static_cast<int64_t>(sorted.entries[i]) == token;
  }
  // The first entry in [low, high) of which `past` is true, or `high`.
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
  // The beginning of a token's run, which has entry i; and its end.
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

// A block for each sorted place, or for each piece of the columns. Those where no stretch of a run begins end at once.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_tokens(const __grid_constant__ KeptGradient gradient, const __grid_constant__ Matrix hidden,
               const __grid_constant__ Runs runs, uint32_t pieces, bool aligned, bool out_aligned,
               const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out,
               const __grid_constant__ Vector bias_out) {
  const int64_t first = blockIdx.x / pieces, token = static_cast<int64_t>(runs.sorted.entries[first]);
  if (token >= out.rows) return;
  int64_t run = first;
  if (runs.has(first - 1, token)) {
    if (!runs.has(first - kStretch, token)) return;  // most places, without a search
    run = runs.begin(first - kStretch, token);
    if ((first - run) % kStretch != 0) return;
  }
  ColumnSums<T> total(blockIdx.x % pieces, hidden.columns);
  const auto term_at = [&](int64_t i) {
    if (!runs.has(i, token)) return Term();
    const uint32_t place = runs.sorted.indices[i];
    return Term{gradient.rows[place], gradient.grad[place]};
  };
  for (int64_t i = first; i < first + kStretch && runs.has(i, token); i += kWarp)
    total.add_terms(hidden, aligned, i, i + kWarp, term_at);
  if (runs.has(run + kStretch, token))
    stretches.keep(stretches.at(run, (first - run) / kStretch), total);
  else
    add_to_token<T, To>(total, out, bias_out, token, out_aligned);
}

// A block for each multiple of a stretch among the sorted places: a long run has at least one, and the first does it.
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
