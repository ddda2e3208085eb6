// Computes log-probabilities at given ids.
//
//   launch                     kernel           reads                                   -> writes
//   token_softmax_state_       tail_slices      logits, ids                             -> slice_states, taken
//   token_softmax_state_ …     merge_slices     slice_states, labels and their logits   -> states
//   token_logprobs_finish      finish_rows      states, taken, ids                      -> outputs
//   token_logprobs_gradient    gradient_rows    gradients, results, ids                 -> values, gradients of the
//   tail put_token_gradients_       put_values       values, ids, labels                     -> gradient of a tile
//
// tail_slices has a bit for each column of its slice: whether the column is a given id. A vector of logits costs one
// more load from shared memory than in the kernels of logprob_entropy.
#include "../ops/token_logprobs.h"

#include "row_slices.h"

namespace d3s {
namespace {

constexpr int kWords = kSlice / 32;

// The elements of a slice that are not among the row's given ids; the others are -inf.
struct TailElements {
  const uint32_t* given;  // a bit for each column of the slice
  int begin;              // the first column of the slice

  template <class T>
  __device__ __forceinline__ uint4 of(const uint4& vector, int column) const {
    const int place = column - begin;
    const uint32_t bits = given[place / 32] >> (place % 32) & ((1u << kPerVector<T>)-1);
    if (bits == 0) return vector;
    float z[kPerVector<T>];
    int i = 0;
    for_elements<T>(vector, [&](float element) {
      z[i] = bits >> i & 1u ? -INFINITY : element;
      ++i;
    });
    return vector_of<T>(z);
  }
};

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kAligned>)
    tail_slices(const __grid_constant__ LogitsRows rows, const __grid_constant__ TokenIds ids,
                SoftmaxState* slice_states, float* taken, const __grid_constant__ Faults faults) {
  struct Room {
    SoftmaxState shares[kWarps];
    uint32_t given[kWords];
  };
  Room& room = *dynamic_shared<Room>();
  const int columns = static_cast<int>(rows.layout.columns), slices = slices_of(columns);
  const int64_t row = blockIdx.x / slices;
  if (rows.masked_out(row)) return;
  const int slice = static_cast<int>(blockIdx.x % slices), begin = slice * kSlice;
  for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kThreads) room.given[i] = 0;
  __syncthreads();
  const T* logits = row_at<T>(rows, row);
  for (int64_t i = threadIdx.x; i < ids.width; i += kThreads) {
    const int64_t id = ids.at(row, i), column = rows.column(id), place = column - begin;
    if (slice == 0 && id != TokenIds::kFill && (id < 0 || id >= rows.vocabulary)) faults.note(Fault::kTokenIds);
    if (column < 0 || place < 0 || place >= kSlice) continue;
    atomicOr(&room.given[place / 32], 1u << (place % 32));
    taken[row * ids.width + i] = to_float(logits[column]);
  }
  __syncthreads();
  const float temperature = rows.temperatures[row];
  const RowReader<T, kAligned> reader(logits, columns);
  const SoftmaxState share = warp_share(reader, columns, slice, temperature, TailElements{room.given, begin});
  if (threadIdx.x % kWarp == 0) room.shares[threadIdx.x / kWarp] = share;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const SoftmaxState state = merge_shares(room.shares, temperature);
  if (threadIdx.x == 0) slice_states[blockIdx.x] = state;
}

// In the kernels below, a warp handles a row, and a lane handles each 32nd id of the row.
constexpr int kRowThreads = 256;
constexpr int kRowsOfBlock = kRowThreads / kWarp;

__device__ int64_t row_of_warp() { return int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / kWarp; }

__global__ void __launch_bounds__(kRowThreads)
    finish_rows(const __grid_constant__ RowStates tails, const __grid_constant__ TakenLogits taken,
                const __grid_constant__ TokenIds ids, const __grid_constant__ Temperatures temperatures,
                const __grid_constant__ TokenOutputs outputs, const __grid_constant__ Faults faults) {
  const int64_t row = row_of_warp();
  if (row >= tails.count) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float temperature = temperatures[row], scale = kLog2E / temperature;
  const RowState tail = tails.merged(row, temperature);
  LaneState own;
  for (int64_t i = lane; i < ids.width; i += kWarp) {
    const bool counts = ids.at(row, i) != TokenIds::kFill && !ids.repeated(row, i);
    own.add({counts ? taken.at(row, i) : -INFINITY}, scale);
  }
  const SoftmaxState given = warp_merge(own.state(scale), 1.f / temperature);
  const RowStatistics whole = finish(merge(tail.get(), given, 1.f / temperature), temperature);
  for (int64_t i = lane; i < ids.width; i += kWarp)
    outputs.logprobs[row * ids.width + i] =
        ids.at(row, i) == TokenIds::kFill ? -INFINITY : log_probability(taken.at(row, i), whole, temperature);
  if (lane > 0) return;
  outputs.write(row, tail, whole, temperature);
  note_row(temperature, false, faults);
}

__global__ void __launch_bounds__(kRowThreads) gradient_rows(const __grid_constant__ TokenGradients given, int64_t rows,
                                                             const __grid_constant__ TokenGradientOutputs outputs) {
  const int64_t row = row_of_warp();
  if (row >= rows) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t width = given.ids.width, label = given.labels[row];
  const float of_label = given.of_label(row);
  float of_ids = 0.f;
  int any = 0, label_is_given = 0;
  for (int64_t i = lane; i < width; i += kWarp) {
    const float g = given.of_id(row, i);
    of_ids += g;
    any |= g != 0.f;
    label_is_given |= label != kNoTarget && given.ids.at(row, i) == label;
  }
  of_ids = warp_reduce(of_ids, Sum());
  any = warp_reduce(any, Max());
  label_is_given = warp_reduce(label_is_given, Max());
  const TokenGradient gradient = given.of(row, of_ids, any != 0);
  float* values = outputs.values + row * (width + 1);
  for (int64_t i = lane; i < width; i += kWarp) {
    const int64_t id = given.ids.at(row, i);
    float own = 0.f;  // every copy of an id gets the same sum
    for (int64_t j = 0; j < width; ++j)
      if (given.ids.at(row, j) == id) own += given.of_id(row, j);
    if (label != kNoTarget && id == label) own += of_label;
    values[i] = gradient.at_given(given.logprobs[row * width + i], own);
    if (label != kNoTarget && id == label) values[width] = values[i];
  }
  if (lane > 0) return;
  outputs.write(row, gradient);
  if (!label_is_given)
    values[width] = label == kNoTarget ? 0.f : gradient.at_label_in_tail(given.logprob[row], of_label);
}

// Equal ids of a row have equal values, so it does not matter which of them is written last.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    put_values(const __grid_constant__ LogitsRows rows, const __grid_constant__ TokenIds ids, const float* values,
               T* gradient) {
  const int64_t row = row_of_warp();
  if (row >= rows.layout.count) return;
  T* to = gradient + rows.layout.offset(row);
  for (int64_t i = threadIdx.x % kWarp; i <= ids.width; i += kWarp) {
    const int64_t id = i < ids.width ? ids.at(row, i) : rows.labels[row], column = rows.column(id);
    if (id >= 0 && column >= 0) to[column] = from_float<T>(values[row * (ids.width + 1) + i]);
  }
}

}  // namespace

void merge_tail(const LogitsRows& rows, const TokenIds& ids, RowState* states, float* taken, Device& device) {
  require_columns(rows.layout.columns);
  const int64_t count = rows.layout.count, slices = slices_of(static_cast<int>(rows.layout.columns));
  if (count == 0 || slices == 0) return;
  RowSink sink;
  sink.states = states;
  sink.faults = device.faults;
  auto* slice_states = device.scratch_of<SoftmaxState>(count * slices);
  dispatch_rows(rows, [&](auto tag, auto aligned) {
    using T = typename decltype(tag)::type;
    launch("token_softmax_state_", tail_slices<T, decltype(aligned)::value>, count * slices, kThreads,
           kWarps * sizeof(SoftmaxState) + kWords * sizeof(uint32_t), device, rows, ids, slice_states, taken,
           device.faults);
    constexpr int kMergers = 128;
    launch("token_softmax_state_ (merge)", merge_slices<T>, ceil_div(count, kMergers), kMergers, 0, device, rows,
           static_cast<const SoftmaxState*>(slice_states), sink);
  });
}

void finish_tokens(const RowStates& tails, const TakenLogits& taken, const TokenIds& ids,
                   const Temperatures& temperatures, const TokenOutputs& outputs, Device& device) {
  launch("token_logprobs_finish", finish_rows, ceil_div(tails.count, kRowsOfBlock), kRowThreads, 0, device, tails,
         taken, ids, temperatures, outputs, device.faults);
}

void token_gradients(const TokenGradients& given, int64_t rows, const TokenGradientOutputs& outputs, Device& device) {
  launch("token_logprobs_gradient", gradient_rows, ceil_div(rows, kRowsOfBlock), kRowThreads, 0, device, given, rows,
         outputs);
}

void put_token_gradients(const LogitsRows& rows, const TokenIds& ids, const float* values, void* gradient,
                         Device& device) {
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("put_token_gradients_", put_values<T>, ceil_div(rows.layout.count, kRowsOfBlock), kRowThreads, 0, device,
           rows, ids, values, static_cast<T*>(gradient));
  });
}

}  // namespace d3s
