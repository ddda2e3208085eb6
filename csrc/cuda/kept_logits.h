// Computes the results of rows that have a span of a sampling mask. Only the kept logits of these rows are read. A warp
// handles a short span, and a block handles a long span. So the order of a row's sums depends only on the length of the
// span.
#pragma once

#include "row_gradient.h"
#include "softmax_lane.h"

namespace d3s {
namespace {  // internal linkage, like the states of core/softmax_state.h

constexpr int kSpanThreads = 256;
constexpr int kSpanWarps = kSpanThreads / kWarp;  // rows of a block
// The maximum number of tokens in a short span. A warp loads this many tokens in 8 batches, in some 10 us.
constexpr int kLongSpan = 1024;
constexpr int kGathered = 4;  // logits that a thread loads before it uses the first

// The result of one thread, warp or block for its part of a row's span.
struct KeptShare {
  SoftmaxState state;
  int label_at;  // the index of the label in the span, or -1
  bool bad_token;
};

// Returns whether an id of a span is not a token. Spans may be unchecked. A bad id has no column, so no logit is read
// for it.
__device__ inline bool is_bad(const LogitsRows& rows, int64_t token) { return token < 0 || token >= rows.vocabulary; }

// Returns a warp's share of a span's result. Each thread reads the tokens first, first + step, ... of the span.
template <class T>
__device__ KeptShare warp_kept_share(const LogitsRows& rows, int64_t row, const Span& span, int first, int step) {
  const T* logits = row_at<T>(rows, row);
  const int64_t label = rows.labels[row];
  const float temperature = rows.temperatures[row], scale = kLog2E / temperature;
  LaneState lane;
  int label_at = -1, bad_token = 0;
  for (int64_t i = first; i < span.size; i += int64_t{step} * kGathered) {
    int64_t tokens[kGathered];
    float z[kGathered];
#pragma unroll
    for (int j = 0; j < kGathered; ++j) {
      const int64_t place = i + int64_t{step} * j;
      tokens[j] = place < span.size ? span.tokens[place] : INT64_MAX;
    }
#pragma unroll
    for (int j = 0; j < kGathered; ++j) {
      const int64_t place = i + int64_t{step} * j;
      z[j] = rows.column(tokens[j]) >= 0 ? to_float(logits[rows.place(span, place)]) : -INFINITY;
      if (tokens[j] == label) label_at = static_cast<int>(place < INT32_MAX ? place : INT32_MAX);
      bad_token |= tokens[j] != INT64_MAX && is_bad(rows, tokens[j]);
    }
    lane.add(z, scale);
  }
  return {warp_merge(lane.state(scale), 1.f / temperature), warp_reduce(label_at, Max()),
          warp_reduce(bad_token, Max()) != 0};
}

// Merges the shares of a block's warps. All threads of a block call this, and all get the result.
__device__ inline KeptShare block_kept_share(const KeptShare& of_warp, KeptShare* shares, float temperature) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane == 0) shares[warp] = of_warp;
  __syncthreads();
  KeptShare all = lane < kSpanWarps ? shares[lane] : KeptShare{SoftmaxState(), -1, false};
  all.state = warp_merge(all.state, 1.f / temperature);
  all.label_at = warp_reduce(all.label_at, Max());
  all.bad_token = warp_reduce(int{all.bad_token}, Max()) != 0;
  __syncthreads();  // before the next call overwrites the shares
  return all;
}

// Writes the result of a row with a span. Only one thread calls this.
template <class T>
__device__ void finish_span(const LogitsRows& rows, int64_t row, const Span& span, const KeptShare& share,
                            const RowSink& sink) {
  const int64_t label = rows.labels[row];
  const KeptSet set = rows.spans.set_of(span, label, rows.vocabulary, share.label_at >= 0, share.bad_token);
  const bool label_in_tile = set.has_label && rows.column(label) >= 0;
  const float temperature = rows.temperatures[row];
  if (set.bad) sink.faults.note(Fault::kSamplingMask);
  if (!sink.states) note_row(temperature, label != kNoTarget && !set.has_label && !set.bad, sink.faults);
  if (set.single()) {
    if (sink.states && rows.column(span.tokens[0]) >= 0) sink.states[row] = RowState::of_single(label_in_tile);
    const float zero = 0.f * temperature;  // NaN for a temperature that is not valid
    if (!sink.states) write_row(row, {zero, zero, zero}, label == kNoTarget || label_in_tile ? zero : NAN, sink);
    return;
  }
  float label_logit = NAN;
  if (label_in_tile) {
    const int64_t place = share.label_at >= 0 ? rows.place(span, share.label_at) : rows.place_of_label(row);
    label_logit = to_float(row_at<T>(rows, row)[place]);
  }
  SoftmaxState state = share.state;
  if (set.label_joins && label_in_tile) {
    LaneState one;
    one.add({label_logit}, kLog2E / temperature);
    state = merge(state, one.state(kLog2E / temperature), 1.f / temperature);
  }
  if (set.bad) state.dot = NAN;
  if (sink.states) {
    sink.states[row].set(merge(sink.states[row].get(), state, 1.f / temperature));
    if (label_in_tile) sink.states[row].label_logit = label_logit;
    return;
  }
  const RowStatistics statistics = finish(state, temperature);
  // A label that is not in the set gives NaN.
  write_row(row, statistics, label == kNoTarget ? 0.f : log_probability(label_logit, statistics, temperature), sink);
}

// Writes the results of rows that have a span or are masked out. Counts the other rows in `dense_rows`, unless this
// pointer is null.
template <class T>
__global__ void __launch_bounds__(kSpanThreads)
    rows_with_span(const __grid_constant__ LogitsRows rows, const __grid_constant__ RowSink sink, int* dense_rows) {
  KeptShare* shares = dynamic_shared<KeptShare>();  // [kSpanWarps]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * kSpanWarps, own = first_row + thread / kWarp;
  if (own < rows.layout.count) {
    if (rows.masked_out(own)) {
      if (lane == 0) write_masked_row(own, sink);
    } else {
      const Span span = rows.spans[own];
      if (span.size == 0 && dense_rows && lane == 0) atomicAdd(dense_rows, 1);
      if (span.size == 0 && rows.kept_alone && lane == 0) write_masked_row(own, sink);
      if (span.size != 0 && span.size <= kLongSpan) {
        // If there is a single kept token, its logit is not read.
        const int64_t label = rows.labels[own];
        const bool single = span.size == 1 && (!rows.spans.include_label || label < 0 || label == span.tokens[0]);
        KeptShare share{SoftmaxState(), single && label == span.tokens[0] ? 0 : -1,
                        single && is_bad(rows, span.tokens[0])};
        if (!single) share = warp_kept_share<T>(rows, own, span, lane, kWarp);
        if (lane == 0) finish_span<T>(rows, own, span, share, sink);
      }
    }
  }
  for (int64_t row = first_row; row < first_row + kSpanWarps && row < rows.layout.count; ++row) {
    if (rows.masked_out(row)) continue;
    const Span span = rows.spans[row];
    if (span.size <= kLongSpan) continue;
    const KeptShare of_warp = warp_kept_share<T>(rows, row, span, thread, kSpanThreads);
    const KeptShare share = block_kept_share(of_warp, shares, rows.temperatures[row]);
    if (thread == 0) finish_span<T>(rows, row, span, share, sink);
  }
}

// Sets all results to NaN if there are more dense rows than max_dense_rows.
__global__ void enforce_bound(const __grid_constant__ LogitsRows rows, const __grid_constant__ RowSink sink,
                              const int* dense_rows) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows.layout.count || !rows.spans.exceeded_by(*dense_rows) || rows.masked_out(row)) return;
  sink.faults.note(Fault::kDenseRows);
  if (sink.states)
    sink.states[row].dot = NAN;
  else
    write_row(row, {NAN, NAN, NAN}, rows.labels[row] == kNoTarget ? 0.f : NAN, sink);
}

// Writes the gradient of a piece [begin, end) of a row with a span. All threads of a block call this.
template <class T>
__device__ void write_kept_gradients(const LogitsRows& rows, const RowGradients& gradients, int64_t row, int begin,
                                     int end, T* gradient) {
  const T* logits = row_at<T>(rows, row);
  const Span span = rows.spans[row];
  const int64_t label = rows.labels[row], thread = threadIdx.x;
  int found = 0;
  for (int64_t i = thread; i < span.size; i += kGradientThreads) found |= span.tokens[i] == label;
  const bool label_found = __syncthreads_or(found) != 0;
  const KeptSet set = rows.spans.set_of(span, label, rows.vocabulary, label_found, false);
  const bool no_label = gradients.of_logprob(row, rows.labels) != 0.f && !set.has_label;
  const bool undefined = set.bad || no_label || gradients.any_nan(row, rows.labels);
  fill(gradient + begin, end - begin, undefined ? NAN : 0.f);
  if (undefined || set.single()) return;
  __syncthreads();  // the zeros must be written before the gradients
  const RowGradient f = gradient_of_row(rows, gradients, row);
  const auto in_piece = [&](int64_t column) { return column >= begin && column < end; };
  for (int64_t i = thread; i < span.size; i += kGradientThreads) {
    const int64_t token = span.tokens[i], column = rows.column(token);
    if (!in_piece(column)) continue;
    const float z = to_float(logits[column]);
    gradient[column] = from_float<T>(token == label ? f.at_label(z) : f(z));
  }
  const int64_t column = rows.column(label);
  if (thread == 0 && set.label_joins && in_piece(column))
    gradient[column] = from_float<T>(f.at_label(to_float(logits[column])));
}

}  // namespace
}  // namespace d3s
