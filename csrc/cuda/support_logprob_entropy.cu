// Computes the rows of logits that have a support. Only the logits of the support are read.
//
//   launch                             kernel              reads                                   -> writes
//   support_rows                       mark_dense_rows     supports, mask                          -> dense, exceeded
//   support_logprob_entropy_           rows_with_support   supports, their logits, exceeded        -> outputs
//   support_logprob_entropy_backward_  write_at_supports   as above, gradients, statistics         -> out
//
// A warp handles a short support, and a block handles a long support. So the order of a row's sums depends only on the
// length of the support. For a tile, rows_with_support reads and writes `states` instead of writing outputs.
#include "../ops/support_logprob_entropy.h"

#include "softmax_rows.h"

namespace d3s {
namespace {  // internal linkage, like the states of core/softmax_state.h

constexpr int kSupportThreads = 256;
constexpr int kSupportWarps = kSupportThreads / kWarp;  // rows of a block
// The maximum number of ids in a short support. A warp loads this many ids in 8 batches, in some 10 us.
constexpr int kLongSupport = 1024;
constexpr int kGathered = 4;  // logits that a thread loads before it uses the first

// The result of one thread, warp or block for its part of a row's support.
struct SupportShare {
  SoftmaxState state;
  int label_at;  // the index of the label in the support, or -1
  bool bad_token;
};

// Returns whether an id of a support is not in the vocabulary. Supports may be unchecked. A bad id has no column, so no
// logit is read for it.
__device__ inline bool is_bad(const SupportRows& rows, int64_t token) { return token < 0 || token >= rows.vocabulary; }

// Returns a warp's share of a support's result. Each thread reads the ids at first, first + step, ... of the support.
template <class T>
__device__ SupportShare warp_share(const SupportRows& rows, int64_t row, const Support& support, int first, int step) {
  const T* logits = row_at<T>(rows, row);
  const int64_t label = rows.labels[row];
  const float temperature = rows.temperatures[row], scale = kLog2E / temperature;
  LaneState lane;
  int label_at = -1, bad_token = 0;
  for (int64_t i = first; i < support.size; i += int64_t{step} * kGathered) {
    int64_t tokens[kGathered];
    float z[kGathered];
#pragma unroll
    for (int j = 0; j < kGathered; ++j) {
      const int64_t place = i + int64_t{step} * j;
      tokens[j] = place < support.size ? support.tokens[place] : INT64_MAX;
    }
#pragma unroll
    for (int j = 0; j < kGathered; ++j) {
      const int64_t place = i + int64_t{step} * j;
      z[j] = rows.column(tokens[j]) >= 0 ? to_float(logits[rows.place(support, place)]) : -INFINITY;
      if (tokens[j] == label) label_at = static_cast<int>(place < INT32_MAX ? place : INT32_MAX);
      bad_token |= tokens[j] != INT64_MAX && is_bad(rows, tokens[j]);
    }
    lane.add(z, scale);
  }
  return {warp_merge(lane.state(scale), 1.f / temperature), warp_reduce(label_at, Max()),
          warp_reduce(bad_token, Max()) != 0};
}

// Merges the shares of a block's warps. All threads of a block call this, and all get the result.
__device__ inline SupportShare block_share(const SupportShare& of_warp, SupportShare* shares, float temperature) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane == 0) shares[warp] = of_warp;
  __syncthreads();
  SupportShare all = lane < kSupportWarps ? shares[lane] : SupportShare{SoftmaxState(), -1, false};
  all.state = warp_merge(all.state, 1.f / temperature);
  all.label_at = warp_reduce(all.label_at, Max());
  all.bad_token = warp_reduce(int{all.bad_token}, Max()) != 0;
  __syncthreads();  // before the next call overwrites the shares
  return all;
}

// Writes the result of a row with a support. Only one thread calls this.
template <class T>
__device__ void finish_support(const SupportRows& rows, int64_t row, const Support& support, const SupportShare& share,
                               const RowSink& sink) {
  const int64_t label = rows.labels[row];
  const SupportSet set = rows.supports.set_of(support, label, rows.vocabulary, share.label_at >= 0, share.bad_token);
  const bool label_in_tile = set.has_label && rows.column(label) >= 0;
  const float temperature = rows.temperatures[row];
  if (set.bad) sink.faults.note(Fault::kSupports);
  if (!sink.states) note_row(temperature, label != kNoTarget && !set.has_label && !set.bad, sink.faults);
  if (set.single()) {
    if (sink.states && rows.column(support.tokens[0]) >= 0) sink.states[row] = RowState::of_single(label_in_tile);
    const float zero = 0.f * temperature;  // NaN for a temperature that is not valid
    if (!sink.states) write_row(row, {zero, zero, zero}, label == kNoTarget || label_in_tile ? zero : NAN, sink);
    return;
  }
  float label_logit = NAN;
  if (label_in_tile) {
    const int64_t place = share.label_at >= 0 ? rows.place(support, share.label_at) : rows.place_of_label(row);
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

// Writes NaN for a row of a batch with more dense rows than the caller's bound.
__device__ inline void write_exceeded(const SupportRows& rows, int64_t row, const RowSink& sink) {
  sink.faults.note(Fault::kDenseRows);
  if (sink.states)
    sink.states[row].dot = NAN;
  else
    write_row(row, {NAN, NAN, NAN}, rows.labels[row] == kNoTarget ? 0.f : NAN, sink);
}

// Writes the results of rows that have a support or are masked out. If the bound is exceeded, writes all rows.
template <class T>
__global__ void __launch_bounds__(kSupportThreads)
    rows_with_support(const __grid_constant__ SupportRows rows, const __grid_constant__ RowSink sink) {
  SupportShare* shares = dynamic_shared<SupportShare>();  // [kSupportWarps]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * kSupportWarps, own = first_row + thread / kWarp;
  const bool exceeded = rows.exceeded && *rows.exceeded;
  if (own < rows.layout.count) {
    if (rows.masked_out(own)) {
      if (lane == 0) write_masked_row(own, sink);
    } else if (exceeded) {
      if (lane == 0) write_exceeded(rows, own, sink);
    } else {
      const Support support = rows.supports[own];
      if (support.size != 0 && support.size <= kLongSupport) {
        // If the set is a single id, no logit is read.
        const int64_t label = rows.labels[own];
        const bool single =
            support.size == 1 && (!rows.supports.include_label || label < 0 || label == support.tokens[0]);
        SupportShare share{SoftmaxState(), single && label == support.tokens[0] ? 0 : -1,
                           single && is_bad(rows, support.tokens[0])};
        if (!single) share = warp_share<T>(rows, own, support, lane, kWarp);
        if (lane == 0) finish_support<T>(rows, own, support, share, sink);
      }
    }
  }
  if (exceeded) return;
  for (int64_t row = first_row; row < first_row + kSupportWarps && row < rows.layout.count; ++row) {
    if (rows.masked_out(row)) continue;
    const Support support = rows.supports[row];
    if (support.size <= kLongSupport) continue;
    const SupportShare of_warp = warp_share<T>(rows, row, support, thread, kSupportThreads);
    const SupportShare share = block_share(of_warp, shares, rows.temperatures[row]);
    if (thread == 0) finish_support<T>(rows, row, support, share, sink);
  }
}

constexpr int kMarkers = 1024;

// One block is enough, since a row takes some 10 bytes.
__global__ void __launch_bounds__(kMarkers)
    mark_dense_rows(const __grid_constant__ Supports supports, int64_t rows, const bool* mask, int64_t bound,
                    bool* dense, bool* exceeded) {
  int* counts = dynamic_shared<int>();  // [kMarkers / kWarp]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  int count = 0;
#pragma unroll 4
  for (int64_t row = thread; row < rows; row += kMarkers) {
    const bool is_dense = supports[row].size == 0 && (!mask || mask[row]);
    dense[row] = is_dense;
    count += is_dense;
  }
  count = warp_reduce(count, Sum());
  if (lane == 0) counts[thread / kWarp] = count;
  __syncthreads();
  if (thread >= kWarp) return;
  count = warp_reduce(counts[lane], Sum());
  if (thread == 0) *exceeded = bound >= 0 && count > bound;
}

__device__ inline int part_has_label(const Support& support, int64_t label, int thread, int threads) {
  int found = 0;
#pragma unroll 4
  for (int64_t i = thread; i < support.size; i += threads) found |= support.tokens[i] == label;
  return found;
}

// Writes the gradient of one row into a row of zeros. A whole warp or block calls this. `label_found` tells whether the
// label is among the ids.
template <class T>
__device__ void write_gradient(const SupportRows& rows, const RowGradients& gradients, int64_t row,
                               const Support& support, bool label_found, int thread, int threads, T* gradient) {
  const int64_t label = rows.labels[row];
  const SupportSet set = rows.supports.set_of(support, label, rows.vocabulary, label_found, false);
  const bool no_label = gradients.of_logprob(row, rows.labels) != 0.f && !set.has_label;
  if (set.bad || no_label || gradients.any_nan(row, rows.labels)) {  // even at the ids outside of the support
    for (int64_t column = thread; column < rows.layout.columns; column += threads)
      gradient[column] = from_float<T>(NAN);
    return;
  }
  if (set.single()) return;
  const RowGradient f = gradient_of_row(rows, gradients, row);
  const T* logits = row_at<T>(rows, row);
  for (int64_t i = thread; i < support.size; i += threads) {
    const int64_t token = support.tokens[i], column = rows.column(token);
    if (column < 0) continue;
    const float z = to_float(logits[column]);
    gradient[column] = from_float<T>(token == label ? f.at_label(z) : f(z));
  }
  const int64_t column = rows.column(label);
  if (thread == 0 && set.label_joins && column >= 0)
    gradient[column] = from_float<T>(f.at_label(to_float(logits[column])));
}

template <class T>
__global__ void __launch_bounds__(kSupportThreads)
    write_at_supports(const __grid_constant__ SupportRows rows, const __grid_constant__ RowGradients gradients, T* out,
                      const __grid_constant__ RowLayout out_layout) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * kSupportWarps, own = first_row + thread / kWarp;
  if (own < rows.layout.count && has_gradient(rows, gradients, own)) {
    const Support support = rows.supports[own];
    if (support.size != 0 && support.size <= kLongSupport) {
      const int found = warp_reduce(part_has_label(support, rows.labels[own], lane, kWarp), Max());
      write_gradient(rows, gradients, own, support, found != 0, lane, kWarp, out + out_layout.offset(own));
    }
  }
  for (int64_t row = first_row; row < first_row + kSupportWarps && row < rows.layout.count; ++row) {
    const Support support = rows.supports[row];
    if (support.size <= kLongSupport || !has_gradient(rows, gradients, row)) continue;
    const int found = __syncthreads_or(part_has_label(support, rows.labels[row], thread, kSupportThreads));
    write_gradient(rows, gradients, row, support, found != 0, thread, kSupportThreads, out + out_layout.offset(row));
  }
}

void reduce_supports(const SupportRows& rows, const RowSink& sink, const char* name, Device& device) {
  dispatch_float(rows.type, [&](auto tag) {
    launch(name, rows_with_support<typename decltype(tag)::type>, ceil_div(rows.layout.count, kSupportWarps),
           kSupportThreads, kSupportWarps * sizeof(SupportShare), device, rows, sink);
  });
}

}  // namespace

void find_dense_rows(const Supports& supports, int64_t rows, const bool* mask, int64_t bound, bool* dense,
                     bool* exceeded, Device& device) {
  launch("support_rows", mark_dense_rows, 1, kMarkers, kMarkers / kWarp * sizeof(int), device, supports, rows, mask,
         bound, dense, exceeded);
}

void support_statistics(const SupportRows& rows, const RowOutputs& outputs, Device& device) {
  RowSink sink;
  sink.outputs = outputs;
  sink.faults = device.faults;
  reduce_supports(rows, sink, "support_logprob_entropy_", device);
}

void merge_supports(const SupportRows& rows, RowState* states, Device& device) {
  RowSink sink;
  sink.states = states;
  sink.faults = device.faults;
  reduce_supports(rows, sink, "support_softmax_state_", device);
}

void add_support_gradients(const SupportRows& rows, const RowGradients& gradients, const GradientOutput& out,
                           Device& device) {
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("support_logprob_entropy_backward_", write_at_supports<T>, ceil_div(rows.layout.count, kSupportWarps),
           kSupportThreads, 0, device, rows, gradients, static_cast<T*>(out.gradient), out.layout);
  });
}

}  // namespace d3s
