// Computes the softmax states of rows of logits, slice by slice, in several threads.
#pragma once

#include <algorithm>
#include <vector>

#include "../ops/logprob_entropy.h"
#include "../torch_abi.h"
#include "softmax_rows.h"

namespace d3s {
namespace {

// The minimum number of logits for a thread. For fewer logits, a second thread costs more time than it saves.
constexpr int64_t kGrain = 32768;

// Lists the rows that are not masked out, so that the work can be divided evenly among the threads.
std::vector<int64_t> unmasked(const LogitsRows& rows) {
  std::vector<int64_t> live;
  live.reserve(rows.layout.count);
  for (int64_t row = 0; row < rows.layout.count; ++row)
    if (!rows.masked_out(row)) live.push_back(row);
  return live;
}

// Makes the function that computes the sums of a slice from all of the slice's logits.
template <class T>
auto whole_slices() {
  return [&loops = softmax_rows().of(Tag<T>())](int64_t, const T* logits, int64_t begin, int64_t n, float scale,
                                                const T* next) { return loops.slice(logits + begin, n, scale, next); };
}

// For each row in `live`, merges the states of the row's slices into start(row), and calls done(row, merged state,
// column of the label or -1). A thread's task is one row or, if there are few rows, one slice. In both cases, slices
// are merged from left to right, so the results are bitwise equal.
//
// Each thread calls make_sums() once. The result is called with (row, the row's logits, the first column and the length
// of a slice, log2(e) / temperature, logits to prefetch), and returns the sums of the slice. The prefetched logits are
// what is read next: the next slice or, after the last slice, the next row.
template <class T, class MakeSums, class Start, class Done>
void for_each_state(const LogitsRows& rows, const std::vector<int64_t>& live, const MakeSums& make_sums,
                    const Start& start, const Done& done) {
  const T* logits = static_cast<const T*>(rows.logits);
  const RowLayout& layout = rows.layout;
  const int64_t slices = (layout.columns + kSlice - 1) / kSlice, count = static_cast<int64_t>(live.size());
  const bool few = slices > 1 && count < 8 * static_cast<int64_t>(torch::stable::get_num_threads());

  const auto state_of = [&](auto& sums_of, int64_t row, int64_t slice, const T* next_row) {
    const int64_t begin = slice * kSlice, end = std::min(layout.columns, begin + kSlice);
    const T* p = logits + layout.offset(row);
    const SoftmaxSums sums =
        sums_of(row, p, begin, end - begin, kLog2E / rows.temperatures[row], end < layout.columns ? p + end : next_row);
    return SoftmaxState{sums.max, sums.sum, sums.dot};
  };
  std::vector<SoftmaxState> states(few ? count * slices : 0);
  if (few)
    parallel_for(count * slices, kGrain / kSlice, [&](int64_t begin, int64_t end) {
      auto sums_of = make_sums();
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = live[task / slices];
        states[task] = state_of(sums_of, row, task % slices, logits + layout.offset(row));
      }
    });

  parallel_for(count, few ? count : 1 + kGrain / (layout.columns + 1), [&](int64_t begin, int64_t end) {
    auto sums_of = make_sums();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = live[i];
      const T* next_row = logits + layout.offset(live[i + 1 < end ? i + 1 : i]);
      SoftmaxState state = start(row);
      for (int64_t slice = 0; slice < slices; ++slice) {
        const SoftmaxState part = few ? states[i * slices + slice] : state_of(sums_of, row, slice, next_row);
        state = merge(state, part, 1.f / rows.temperatures[row]);
      }
      done(row, state, rows.column(rows.labels[row]));
    }
  });
}

// Merges the slices of a tile's rows into the rows' states. `make_sums` is as in for_each_state.
template <class T, class MakeSums>
void merge_slices(const LogitsRows& rows, const MakeSums& make_sums, RowState* states) {
  const auto start = [&](int64_t row) { return states[row].get(); };
  const auto done = [&](int64_t row, const SoftmaxState& state, int64_t label) {
    states[row].set(state);
    const T* p = static_cast<const T*>(rows.logits) + rows.layout.offset(row);
    if (label >= 0) states[row].label_logit = to_float(p[label]);
  };
  for_each_state<T>(rows, unmasked(rows), make_sums, start, done);
}

}  // namespace
}  // namespace d3s
