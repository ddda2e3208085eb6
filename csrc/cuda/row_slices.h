// A row of logits is cut into slices of a fixed size. In a slice, every thread of a block has a softmax state, and the
// states are merged over the lanes of each warp, then over the warps. Which thread adds which element depends only on
// the element's column, so a row's result is bitwise equal in any batch.
#pragma once

#include "softmax_rows.h"

namespace d3s {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
// Three blocks have 1,536 threads, and each thread has 64 bytes in flight. This is three times as much as is needed to
// hide the memory latency. The code for misaligned rows takes more registers, so only two of its blocks fit.
template <bool kAligned>
constexpr int kBlocksPerSm = kAligned ? 3 : 2;
constexpr int kInFlight = 4;   // vectors that a thread loads before it uses the first
constexpr int kSlice = 32768;  // elements; Tiles in d3s_kernels/_lm_head/tiles.py cuts at multiples of kSlice

template <class T>
constexpr int kStride = kThreads * kInFlight * kPerVector<T>;  // elements that a block loads at a time

D3S_HOST_DEVICE int slices_of(int columns) { return static_cast<int>(ceil_div(columns, kSlice)); }

// All elements of a slice, as they were loaded.
struct AllElements {
  template <class T>
  __device__ __forceinline__ uint4 of(const uint4& vector, int) const {
    return vector;
  }
};

// Returns the state of the warp's share of a slice, merged over the lanes. `elements.of(vector, i)` may replace
// elements of a vector that was loaded from the columns from i on; for example, -inf leaves an element out.
template <class T, bool kAligned, class Elements = AllElements>
__device__ SoftmaxState warp_share(const RowReader<T, kAligned>& reader, int columns, int slice, float temperature,
                                   const Elements& elements = {}) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr int kShare = kStride<T> / kWarps;    // 2 KB of neighbouring elements
  constexpr int kApart = kWarp * kPerVector<T>;  // from one vector of a lane to the lane's next vector
  constexpr int kReach =
      kApart * (kInFlight - 1) + kPerVector<T>;  // the length of the range that contains a lane's vectors
  // `own` is the index of the lane's first element, which is `ahead` elements after the warp's first element. `end` is
  // moved by `ahead` too, so that all lanes of a warp leave the loop in the same iteration.
  const int ahead = lane * kPerVector<T>;
  const int end = min((slice + 1) * kSlice, columns) + ahead;
  const float scale = kLog2E / temperature;
  LaneState state;
  for (int own = slice * kSlice + warp * kShare + ahead; own < end; own += kStride<T>) {
    uint4 vectors[kInFlight];
    if (reader.inside(own, kReach)) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) vectors[i] = reader.whole(own + i * kApart);
    } else {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) vectors[i] = reader.edge(own + i * kApart);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) vectors[i] = elements.template of<T>(vectors[i], own + i * kApart);
    state.template add<T>(vectors, scale);
  }
  return warp_merge(state.state(scale), 1.f / temperature);
}

// Merges the shares of a slice's warps.
__device__ SoftmaxState merge_shares(const SoftmaxState* shares, float temperature) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return warp_merge(lane < kWarps ? shares[lane] : SoftmaxState(), 1.f / temperature);
}

// Writes a row's result; for a tile, writes the row's state. Only one thread calls this.
template <class T>
__device__ void finish_row(const LogitsRows& rows, int64_t row, const SoftmaxState& state, const RowSink& sink) {
  const int64_t label = rows.column(rows.labels[row]);
  const T* p = row_at<T>(rows, row);
  if (sink.states) {
    sink.states[row].set(state);
    if (label >= 0) sink.states[row].label_logit = to_float(p[label]);
    return;
  }
  const float temperature = rows.temperatures[row];
  const RowStatistics statistics = finish(state, temperature);
  // An unchecked label that is no id of the vocabulary gives NaN.
  const bool bad_label = label < 0 && rows.labels.bad(row, rows.vocabulary);
  const float logprob =
      label >= 0 ? log_probability(to_float(p[label]), statistics, temperature) : (bad_label ? NAN : 0.f);
  write_row(row, statistics, logprob, sink);
  note_row(temperature, bad_label, sink.faults);
}

// Merges the states of the slices of each row, and writes the row's result.
template <class T>
__global__ void merge_slices(const __grid_constant__ LogitsRows rows, const SoftmaxState* slice_states,
                             const __grid_constant__ RowSink sink) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows.layout.count) return;
  if (rows.masked_out(row)) {
    write_masked_row(row, sink);
    return;
  }
  const int slices = slices_of(static_cast<int>(rows.layout.columns));
  const float inverse_temperature = 1.f / rows.temperatures[row];
  SoftmaxState state = sink.states ? sink.states[row].get() : SoftmaxState();
  for (int slice = 0; slice < slices; ++slice)
    state = merge(state, slice_states[row * slices + slice], inverse_temperature);
  finish_row<T>(rows, row, state, sink);
}

// Returns whether every row begins at a multiple of 16 bytes.
template <class T>
bool is_aligned(const void* values, const RowLayout& layout) {
  if (misalignment(values) != 0) return false;
  for (int d = 0; d < layout.dims; ++d)
    if (layout.strides[d] % kPerVector<T> != 0) return false;
  return true;
}

// Calls body(Tag<T>, aligned), where `aligned` is a compile-time constant.
template <class Body>
void dispatch_rows(const LogitsRows& rows, const Body& body) {
  dispatch_float(rows.type, [&](auto tag) {
    if (is_aligned<typename decltype(tag)::type>(rows.logits, rows.layout))
      body(tag, std::true_type());
    else
      body(tag, std::false_type());
  });
}

constexpr int64_t kMostColumns = INT32_MAX - 2 * kSlice;  // indices in a row, and past the row's end, are ints

inline void require_columns(int64_t columns) {
  if (columns > kMostColumns)
    throw std::invalid_argument("logits: got rows of " + std::to_string(columns) +
                                " tokens; takes fewer than 2^31 on a GPU");
}

}  // namespace
}  // namespace d3s
