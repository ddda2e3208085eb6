// The kernels of logprob_entropy and logprob_entropy_backward. Each of these two ops makes one pass over the logits.
//
// A row is cut into slices of a fixed size. In a slice, every thread of a block has a softmax state. The states are
// merged over the lanes of each warp, then over the warps, and finally over the slices, from left to right. If there
// are many rows, a block handles a whole row, with a single barrier at the end of the row. If there are few rows, each
// slice gets a block. Both variants add in the same order, so a row's result is bitwise equal in any batch.
//
//   launch                     kernel            reads                                   -> writes
//   logprob_entropy            whole_rows        logits, labels                          -> outputs, keys
//   logprob_entropy (slices)   single_slices     logits                                  -> slice_states
//   logprob_entropy (merge)    merge_slices      slice_states, labels and their logits   -> outputs, keys
//   softmax_state_finish       finish_all        states                                  -> outputs
//   logprob_entropy_backward   write_gradients   logits, labels, gradients, statistics   -> out
//   … in half precision        narrow_gradients  as above                                -> front half of logits
//   … of packed rows           packed_gradients  as above, and the rows                  -> out
//
// For a tile, the kernels read and write `states` instead of writing outputs and keys.
#include "row_slices.h"

namespace d3s {
namespace {

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kAligned>)
    whole_rows(const __grid_constant__ LogitsRows rows, const __grid_constant__ RowSink sink) {
  SoftmaxState* shares = dynamic_shared<SoftmaxState>();  // [slices][kWarps]
  const int64_t row = blockIdx.x;
  if (rows.masked_out(row)) {
    if (threadIdx.x == 0) write_masked_row(row, sink);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int columns = static_cast<int>(rows.layout.columns), slices = slices_of(columns);
  const float temperature = rows.temperatures[row];
  const RowReader<T, kAligned> reader(row_at<T>(rows, row), columns);
  for (int slice = 0; slice < slices; ++slice) {
    const SoftmaxState share = warp_share(reader, columns, slice, temperature);
    if (threadIdx.x % kWarp == 0) shares[slice * kWarps + warp] = share;
  }
  __syncthreads();
  if (warp > 0) return;
  SoftmaxState state = sink.states ? sink.states[row].get() : SoftmaxState();
  for (int slice = 0; slice < slices; ++slice)
    state = merge(state, merge_shares(shares + slice * kWarps, temperature), 1.f / temperature);
  if (threadIdx.x == 0) finish_row<T>(rows, row, state, sink);
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kAligned>)
    single_slices(const __grid_constant__ LogitsRows rows, SoftmaxState* slice_states) {
  SoftmaxState* shares = dynamic_shared<SoftmaxState>();  // [kWarps]
  const int columns = static_cast<int>(rows.layout.columns), slices = slices_of(columns);
  const int64_t row = blockIdx.x / slices;
  if (rows.masked_out(row)) return;
  const float temperature = rows.temperatures[row];
  const RowReader<T, kAligned> reader(row_at<T>(rows, row), columns);
  const SoftmaxState share = warp_share(reader, columns, static_cast<int>(blockIdx.x % slices), temperature);
  if (threadIdx.x % kWarp == 0) shares[threadIdx.x / kWarp] = share;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const SoftmaxState state = merge_shares(shares, temperature);
  if (threadIdx.x == 0) slice_states[blockIdx.x] = state;
}

// The maximum number of slices whose shares fit in the default amount of shared memory; enough for 8 million ids.
constexpr int64_t kMostSlices = kSharedWithoutAsking / (kWarps * sizeof(SoftmaxState));

void reduce_rows(const LogitsRows& rows, const RowSink& sink, Device& device) {
  require_columns(rows.layout.columns);
  if (rows.layout.count == 0) return;
  const int64_t count = rows.layout.count, slices = slices_of(static_cast<int>(rows.layout.columns));
  // If more than half of the rows fit on the GPU at the same time, one block for each row would leave some
  // multiprocessors without work: either from the start, or while the last rows finish.
  const int64_t resident = int64_t{device_attribute(device, cudaDevAttrMultiProcessorCount)} * kBlocksPerSm<true>;
  const bool few = slices > 1 && (count < 2 * resident || slices > kMostSlices);
  dispatch_rows(rows, [&](auto tag, auto aligned) {
    using T = typename decltype(tag)::type;
    constexpr bool kAligned = decltype(aligned)::value;
    if (!few) {
      launch("logprob_entropy", whole_rows<T, kAligned>, count, kThreads,
             (slices > 0 ? slices : 1) * kWarps * sizeof(SoftmaxState), device, rows, sink);
      return;
    }
    const int64_t tasks = count * slices;
    auto* states = device.scratch_of<SoftmaxState>(tasks);
    launch("logprob_entropy (slices)", single_slices<T, kAligned>, tasks, kThreads, kWarps * sizeof(SoftmaxState),
           device, rows, states);
    constexpr int kMergers = 128;
    launch("logprob_entropy (merge)", merge_slices<T>, ceil_div(count, kMergers), kMergers, 0, device, rows,
           static_cast<const SoftmaxState*>(states), sink);
  });
}

__global__ void finish_all(const __grid_constant__ RowStates states, const __grid_constant__ Temperatures temperatures,
                           const __grid_constant__ RowOutputs outputs, const __grid_constant__ Faults faults) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= states.count) return;
  const RowState state = states.merged(row, temperatures[row]);
  const RowStatistics statistics = finish(state.get(), temperatures[row]);
  outputs.write(row, statistics, log_probability(state.label_logit, statistics, temperatures[row]));
  note_row(temperatures[row], false, faults);
}

// ---- backward --------------------------------------------------------------------------------------------------

// A thread loads kInFlight vectors of logits before it uses the first. From is the type of the logits, T that of the
// gradient, which may be half as wide.
template <class From>
constexpr int kGradientStride = kGradientThreads * kInFlight * kPerVector<From>;
constexpr int kStridesPerPiece = 4;  // 64 KB, so that many elements share the fixed cost of a piece
template <class From>
constexpr int kPiece = kGradientStride<From> * kStridesPerPiece;
template <class From, class T>
constexpr int kLoadsPerStore = kPerVector<T> / kPerVector<From>;

template <class From, class T>
__device__ uint4 gradient_of(const uint4 (&logits)[kLoadsPerStore<From, T>], const RowGradient& row) {
  float g[kPerVector<T>];
  int i = 0;
#pragma unroll
  for (int load = 0; load < kLoadsPerStore<From, T>; ++load)
    for_pairs<From>(logits[load], [&](Pair z) {
      const Pair gradient = row(z);
      g[i++] = gradient.low;
      g[i++] = gradient.high;
    });
  return vector_of<T>(g);
}

// Loads the vector at p; `shift` is the misalignment of p. If the gradient overwrites the logits, the gradient and the
// logits have the same alignment, so `shift` is 0. Then each vector is read only by the thread that later writes it.
template <class T>
__device__ uint4 load_logits(const T* p, int shift) {
  const auto* from = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(p) - shift);
  return shift == 0 ? load_plain(from) : shifted(load_plain(from), load_plain(from + 1), shift);
}

// Writes the gradient of a piece [begin, end) of a dense row, whose logits are in row `place` of all logits.
template <class From, class T, bool kAligned>
__device__ void write_piece(const LogitsRows& rows, const RowGradients& gradients, int64_t row, int64_t place,
                            int begin, int end, T* gradient) {
  constexpr int kVector = kPerVector<T>, kLoads = kLoadsPerStore<From, T>, kStores = kInFlight / kLoads;
  const int columns = static_cast<int>(rows.layout.columns), thread = static_cast<int>(threadIdx.x);
  const From* logits = row_at<From>(rows, place);
  const RowGradient f = gradient_of_row(rows, gradients, row);
  const int label = static_cast<int>(rows.column(rows.labels[row]));
  const auto write_one = [&](int i) {
    const float z = to_float(logits[i]);
    gradient[i] = from_float<T>(i == label ? f.at_label(z) : f(z));
  };

  // Vectors begin where the gradient's address is a multiple of 16. The elements before the first and after the last
  // vector are handled one by one. If the logits are misaligned where a vector begins, the vector is combined from two
  // aligned vectors of logits, which must both be in the row.
  const int first = kAligned ? begin : min(begin + elements_to_vector(gradient + begin), end);
  const int shift = kAligned ? 0 : misalignment(logits + first), margin = shift == 0 ? 0 : kVector;
  const int first_whole = first < margin ? first + kVector : first;
  const int vectors = (end - first_whole - (end + margin <= columns ? 0 : margin)) / kVector;  // may be negative
  for (int i = begin + thread; i < min(first_whole, end); i += kGradientThreads) write_one(i);
  for (int i = first_whole + max(vectors, 0) * kVector + thread; i < end; i += kGradientThreads) write_one(i);

  // At the end, the thread whose vector contains the label writes the label's gradient again. The thread reads the
  // label's logit here, since the loop may overwrite this logit.
  const int at = label - first_whole;
  const bool has_label = at >= 0 && at < vectors * kVector && at / kVector % kGradientThreads == thread;
  T* const label_place = has_label ? gradient + label : nullptr;
  const T of_label = from_float<T>(has_label ? f.at_label(to_float(logits[label])) : 0.f);
  const From* from = logits + first_whole + thread * kVector;
  T* to = gradient + first_whole + thread * kVector;
  for (int left = vectors - thread; left > 0; left -= kGradientThreads * kStores) {
    uint4 z[kStores][kLoads];
#pragma unroll
    for (int j = 0; j < kStores; ++j) {
      if (j * kGradientThreads >= left) continue;
#pragma unroll
      for (int load = 0; load < kLoads; ++load)
        z[j][load] = load_logits(from + j * kGradientThreads * kVector + load * kPerVector<From>, shift);
    }
#pragma unroll
    for (int j = 0; j < kStores; ++j) {
      if (j * kGradientThreads >= left) break;
      store_streaming(reinterpret_cast<uint4*>(to + j * kGradientThreads * kVector), gradient_of<From, T>(z[j], f));
    }
    from += kGradientStride<From>;
    to += kGradientStride<From>;
  }
  if (label_place) *label_place = of_label;
}

// Six blocks fit on a multiprocessor, with 40 registers for each thread. While some blocks wait for a row's statistics,
// the other blocks keep the memory busy. The code for misaligned rows needs 48 registers, so only five blocks fit.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kGradientThreads, kAligned ? 6 : 5)
    write_gradients(const __grid_constant__ LogitsRows rows, const __grid_constant__ RowGradients gradients, T* out,
                    const __grid_constant__ RowLayout out_layout) {
  const int columns = static_cast<int>(rows.layout.columns);
  const auto pieces = static_cast<unsigned>(ceil_div(columns, kPiece<T>));
  const int64_t row = blockIdx.x / pieces;
  const int begin = static_cast<int>(blockIdx.x % pieces) * kPiece<T>, end = min(begin + kPiece<T>, columns);
  T* gradient = out + out_layout.offset(row);
  if (!has_gradient(rows, gradients, row))  // the logits are not read
    fill(gradient + begin, end - begin, 0.f);
  else
    write_piece<T, T, kAligned>(rows, gradients, row, row, begin, end, gradient);
}

// Writes the gradients of packed rows, of which blockIdx.x / pieces is one, to memory of their own.
template <class From, class T, bool kAligned>
__global__ void __launch_bounds__(kGradientThreads, kAligned ? 6 : 5)
    packed_gradients(const __grid_constant__ LogitsRows rows, const __grid_constant__ PackedRows packed,
                     const __grid_constant__ RowGradients gradients, T* out,
                     const __grid_constant__ RowLayout out_layout) {
  const int columns = static_cast<int>(rows.layout.columns);
  const auto pieces = static_cast<unsigned>(ceil_div(columns, kPiece<From>));
  const int64_t row = blockIdx.x / pieces;
  const int begin = static_cast<int>(blockIdx.x % pieces) * kPiece<From>, end = min(begin + kPiece<From>, columns);
  T* gradient = out + out_layout.offset(row);
  if (!has_gradient(rows, gradients, row))
    fill(gradient + begin, end - begin, 0.f);
  else if (packed.bad(row))
    fill(gradient + begin, end - begin, NAN);
  else
    write_piece<From, T, kAligned>(rows, gradients, row, packed.rows[row], begin, end, gradient);
}

// The float32 logits at neighbouring columns from which a thread computes one vector of the gradient. In rows that do
// not begin at a multiple of 16 bytes, these are the logits of a single column.
template <class T, bool kAligned>
struct NarrowVector {
  static constexpr int kColumns = kPerVector<T>;
  uint4 z[kLoadsPerStore<float, T>];

  __device__ void load(const float* p) {
#pragma unroll
    for (int i = 0; i < kLoadsPerStore<float, T>; ++i) z[i] = load_plain(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ void store(T* p, const RowGradient& f) const {
    store_streaming(reinterpret_cast<uint4*>(p), gradient_of<float, T>(z, f));
  }
};

template <class T>
struct NarrowVector<T, false> {
  static constexpr int kColumns = 1;
  float z;

  __device__ void load(const float* p) { z = *p; }
  __device__ void store(T* p, const RowGradient& f) const { *p = from_float<T>(f(z)); }
};

constexpr int kNarrowInFlight = 16;  // logits that a thread loads before it uses the first
constexpr int kNarrowStep = kGradientThreads * kNarrowInFlight;

// Writes a row's gradient over the front half of the same row. A block goes through the row from left to right. A step
// reads kNarrowStep logits, and then writes their gradient. The gradient of column i lies over the logit of column
// i / 2. So a step may write once all threads have read the logits before half of the step's last column.
//
// `read_by_all` counts logits that every thread has read, of its own columns, before the last barrier. While it reaches
// up to half of a step's end, the step needs no barrier: what it overwrites was read before the last barrier, and it
// writes after that barrier, however far apart the threads are since then. Otherwise, a barrier between the reads and
// the writes of the step raises `read_by_all` to the step's end. So after a barrier in step s, the next barrier is in
// step 2 s + 2: a row of 151,936 logits has barriers in the steps 0, 2, 6, 14 and 30 of 38.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kGradientThreads, kAligned ? 6 : 5)
    narrow_gradients(const __grid_constant__ LogitsRows rows, const __grid_constant__ RowGradients gradients, T* out,
                     const __grid_constant__ RowLayout out_layout) {
  using Vector = NarrowVector<T, kAligned>;
  constexpr int kVectors = kNarrowInFlight / Vector::kColumns;
  const int columns = static_cast<int>(rows.layout.columns), thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const float* logits = row_at<float>(rows, row);
  T* gradient = out + out_layout.offset(row);
  if (!has_gradient(rows, gradients, row)) {
    fill(gradient, columns, 0.f);
    return;
  }
  const RowGradient f = gradient_of_row(rows, gradients, row);
  const int label = static_cast<int>(rows.column(rows.labels[row]));
  // The columns after the last whole vector take a thread each, and the label takes one thread. These threads read
  // their logits before the first barrier, and write their gradients after the last one.
  const int whole = columns - columns % Vector::kColumns;
  const int own = thread == kGradientThreads - 1 ? label : whole + thread;
  const bool has_own = own >= 0 && own < columns;
  const float own_logit = has_own ? logits[own] : 0.f;
  int read_by_all = 0;
  for (int begin = 0; begin < whole; begin += kNarrowStep) {
    const int first = begin + thread * Vector::kColumns, end = begin + kNarrowStep;
    Vector vectors[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = first + j * kGradientThreads * Vector::kColumns;
      if (column < whole) vectors[j].load(logits + column);
    }
    if (end / 2 > read_by_all) {
      __syncthreads();
      read_by_all = end;
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = first + j * kGradientThreads * Vector::kColumns;
      if (column < whole) vectors[j].store(gradient + column, f);
    }
  }
  __syncthreads();
  if (has_own) gradient[own] = from_float<T>(own == label ? f.at_label(own_logit) : f(own_logit));
}

}  // namespace

// The thread that computes a row's entropy also computes its key, so no kernel loads H, A and the mask again.
const bool kMakesKeys = true;

void row_statistics(const LogitsRows& rows, const RowOutputs& outputs, const KeyOutput& keys, Device& device) {
  RowSink sink;
  sink.outputs = outputs;
  sink.keys = keys;
  sink.faults = device.faults;
  reduce_rows(rows, sink, device);
}

void merge_tile(const LogitsRows& rows, RowState* states, Device& device) {
  RowSink sink;
  sink.states = states;
  sink.faults = device.faults;
  reduce_rows(rows, sink, device);
}

void finish_states(const RowStates& states, const Temperatures& temperatures, const RowOutputs& outputs,
                   Device& device) {
  constexpr int kFinishers = 128;
  launch("softmax_state_finish", finish_all, ceil_div(states.count, kFinishers), kFinishers, 0, device, states,
         temperatures, outputs, device.faults);
}

void row_gradients(const LogitsRows& rows, const RowGradients& gradients, const GradientOutput& out, Device& device) {
  require_columns(rows.layout.columns);
  dispatch_gradient(rows.type, out.type, [&](auto logits, auto gradient) {
    using T = typename decltype(gradient)::type;
    constexpr bool kNarrow = !std::is_same_v<typename decltype(logits)::type, T>;
    const auto start = [&](auto kernel, int64_t blocks) {
      launch("logprob_entropy_backward", kernel, blocks, kGradientThreads, 0, device, rows, gradients,
             static_cast<T*>(out.gradient), out.layout);
    };
    const int64_t blocks = rows.layout.count * ceil_div(rows.layout.columns, kPiece<T>);
    if constexpr (kNarrow)
      start(is_aligned<float>(rows.logits, rows.layout) ? narrow_gradients<T, true> : narrow_gradients<T, false>,
            rows.layout.count);
    else if (is_aligned<T>(rows.logits, rows.layout) && is_aligned<T>(out.gradient, out.layout))
      start(write_gradients<T, true>, blocks);
    else
      start(write_gradients<T, false>, blocks);
  });
}

void packed_row_gradients(const LogitsRows& rows, const PackedRows& packed, const RowGradients& gradients,
                          const GradientOutput& out, Device& device) {
  require_columns(rows.layout.columns);
  dispatch_gradient(rows.type, out.type, [&](auto logits, auto gradient) {
    using From = typename decltype(logits)::type;
    using T = typename decltype(gradient)::type;
    const bool aligned = is_aligned<From>(rows.logits, rows.layout) && is_aligned<T>(out.gradient, out.layout);
    launch("logprob_entropy_backward_rows_",
           aligned ? packed_gradients<From, T, true> : packed_gradients<From, T, false>,
           out.layout.count * ceil_div(rows.layout.columns, kPiece<From>), kGradientThreads, 0, device, rows, packed,
           gradients, static_cast<T*>(out.gradient), out.layout);
  });
}

}  // namespace d3s
