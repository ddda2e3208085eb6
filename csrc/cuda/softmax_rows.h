// What the kernels over all tokens (logprob_entropy.cu) and over supports (support_*.cu) share: the inner loop of a
// row's softmax state, the memory that gets a row's results, and a row's gradient.
#pragma once

#include "../core/softmax_state.h"
#include "../ops/logprob_entropy.h"
#include "collective.h"
#include "score_keys.h"
#include "vectors.h"

namespace d3s {

// ---- the softmax state of one thread --------------------------------------------------------------------------------

// The inner loop of all kernels that compute entropies. In this loop, one thread computes its share of a row's softmax
// state. It finds the maximum of a group of vectors of logits, rescales its sums to the new maximum once, and then adds
// the elements. An element costs one exponential. The loop never waits for another thread.

// A distance d for which 2^d is 0 in float32. For a -inf logit, the distance is -inf and e is 0, and their product
// would be NaN. So distances below this value are raised to this value before they are multiplied by e. For a NaN
// logit, e is NaN, so the sums still become NaN.
constexpr float kLowestDistance = -200.f;

// The softmax state of one thread. The terms of eight elements are added up in order, and then their sum is added to
// the total. If most logits were equal, the rounding errors in one long sum would all have the same sign. Packed
// arithmetic (Pair) is used for the distances of two neighbouring elements, and for the two terms of an element. Even
// and odd elements never have separate sums. So the results are bitwise equal with and without packed arithmetic.
struct LaneState {
  float max = -FLT_MAX;
  // S and T * scale, with S and T as in core/softmax_state.h; scale = log2(e) / temperature turns distances into
  // exponents of 2.
  Pair sums = {0.f, 0.f};

  template <class T, int kCount>
  __device__ __forceinline__ void add(const uint4 (&vectors)[kCount], float scale) {
    raise(fmaxf(max, largest<T>(vectors)), scale);
    constexpr int kTogether = 8 / kPerVector<T>;
    Pair group;
#pragma unroll
    for (int i = 0; i < kCount; i += kTogether) {
      Pair own;
      bool begins = true;  // a compile-time constant, since the loops are unrolled
#pragma unroll
      for (int j = i; j < i + kTogether; ++j)
        for_pairs<T>(vectors[j], [&](Pair z) { add_below_max(own, z, scale, begins), begins = false; });
      group = i == 0 ? own : group + own;
    }
    sums = sums + group;
  }

  template <int kCount>
  __device__ __forceinline__ void add(const float (&logits)[kCount], float scale) {
    float top = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) top = fmaxf(top, logits[i]);
    raise(top, scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_below_max(sums, logits[i], scale);
  }

  __device__ SoftmaxState state(float scale) const { return {max, sums.low, sums.high / scale}; }

 private:
  __device__ __forceinline__ void raise(float new_max, float scale) {
    const float move = (max - new_max) * scale, factor = exp2_fast(move);
    const float safe_move = factor > 0.f ? move : 0.f;  // -inf * 0 would be NaN
    sums = both(factor) * Pair{sums.low, fmaf(safe_move, sums.low, sums.high)};
    max = new_max;
  }
  // Adds the terms of two elements to the sum `to`. If `begins` is true, the sum begins with these elements: the terms
  // of the first element are then stored instead of added to 0, which saves an instruction.
  __device__ __forceinline__ void add_below_max(Pair& to, Pair z, float scale, bool begins) const {
    const Pair distance = (z - both(max)) * both(scale);
    const Pair e = {exp2_fast(distance.low), exp2_fast(distance.high)};
    const Pair d = {fmaxf(distance.low, kLowestDistance), fmaxf(distance.high, kLowestDistance)};
    // hidden_one(scale) is 1, unless the temperature is not valid. Then the scale is NaN, and the sums are NaN anyway.
    to = begins ? weighted(e.low, d.low, hidden_one(scale)) : add_weighted(to, e.low, d.low, hidden_one(scale));
    to = add_weighted(to, e.high, d.high, hidden_one(scale));
  }
  __device__ __forceinline__ void add_below_max(Pair& to, float z, float scale) const {
    const float distance = (z - max) * scale, e = exp2_fast(distance);
    to = add_weighted(to, e, fmaxf(distance, kLowestDistance), hidden_one(scale));
  }
};

// Merges the states of the warp's lanes. The results of all lanes are bitwise equal.
__device__ __forceinline__ SoftmaxState warp_merge(const SoftmaxState& own, float inverse_temperature) {
  const float max = warp_reduce(own.max, Max());
  const SoftmaxState moved = rebase(own, max, inverse_temperature);
  return {max, warp_reduce(moved.sum, Sum()), warp_reduce(moved.dot, Sum())};
}

// ---- the results of a row
// ---------------------------------------------------------------------------------------------

struct RowSink {
  RowOutputs outputs;
  KeyOutput keys;
  RowState* states = nullptr;  // if set, the rows of a tile are merged into these states, and no outputs are written
  Faults faults;
};

__device__ inline void write_row(int64_t row, const RowStatistics& statistics, float logprob, const RowSink& sink) {
  sink.outputs.write(row, statistics, logprob);
  if (sink.keys.keys) sink.keys.keys[row] = key_of_entropy(sink.keys.scores, row, statistics.entropy);
}

__device__ inline void write_masked_row(int64_t row, const RowSink& sink) {
  sink.outputs.write(row, {0.f, 0.f, 0.f}, 0.f);
  if (sink.keys.keys) sink.keys.keys[row] = kAbsent;
}

// Notes the fault that made a row's results NaN.
__device__ inline void note_row(float temperature, bool bad_label, const Faults& faults) {
  if (temperature != temperature) faults.note(Fault::kTemperature);
  if (bad_label) faults.note(Fault::kLabels);
}

template <class T>
__device__ const T* row_at(const LogitsRows& rows, int64_t row) {
  return static_cast<const T*>(rows.logits) + rows.layout.offset(row);
}

// ---- the gradient of a row
// --------------------------------------------------------------------------------------------

namespace {  // internal linkage, like the states of core/softmax_state.h

constexpr int kGradientThreads = 256;

// Computes the gradients of the logits of one row.
struct RowGradient {
  GradientLine line;
  float max, scale, temperature;

  __device__ RowGradient(const RowStatistics& row, float g_logprob, float g_entropy, float temperature, bool defined)
      : line(gradient_line(g_logprob, g_entropy, row, temperature)),
        max(defined ? row.max : NAN),  // NaN makes the whole gradient NaN
        scale(kLog2E / temperature),
        temperature(temperature) {}

  __device__ Pair operator()(Pair z) const {
    const Pair distance = z - both(max), exponent = distance * both(scale);
    const Pair on_line = fma(both(line.slope), distance, both(line.offset));
    return {product(exp2_fast(exponent.low), on_line.low), product(exp2_fast(exponent.high), on_line.high)};
  }
  __device__ float operator()(float z) const { return (*this)(both(z)).low; }
  __device__ float at_label(float z) const { return label_gradient(line, z - max, temperature); }

 private:
  // Returns e * on_line. For a logit of -inf, e is 0, and the result is 0, even if on_line is infinite. If e is NaN,
  // the result is NaN.
  __device__ static float product(float e, float on_line) { return e > 0.f ? e * on_line : e; }
};

// Sets n elements to `number`.
template <class T>
__device__ void fill(T* p, int n, float number) {
  const T value = from_float<T>(number);
  uint32_t word = 0;
  if constexpr (sizeof(T) == 4)
    word = bits_of_float(value);
  else
    word = value.bits | static_cast<uint32_t>(value.bits) << 16;
  const int head = min(elements_to_vector(p), n), vectors = (n - head) / kPerVector<T>;
  for (int i = static_cast<int>(threadIdx.x); i < head; i += kGradientThreads) p[i] = value;
  for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kGradientThreads)
    store_streaming(reinterpret_cast<uint4*>(p + head) + v, make_uint4(word, word, word, word));
  for (int i = head + vectors * kPerVector<T> + static_cast<int>(threadIdx.x); i < n; i += kGradientThreads)
    p[i] = value;
}

__device__ inline bool has_gradient(const LogitsRows& rows, const RowGradients& gradients, int64_t row) {
  return !rows.masked_out(row) && !(gradients.of_logprob(row, rows.labels) == 0.f && gradients.of_entropy(row) == 0.f);
}

__device__ inline RowGradient gradient_of_row(const LogitsRows& rows, const RowGradients& gradients, int64_t row) {
  const float g_logprob = gradients.of_logprob(row, rows.labels), g_entropy = gradients.of_entropy(row);
  const bool bad_label = g_logprob != 0.f && rows.labels.bad(row, rows.vocabulary);
  return RowGradient(gradients.statistics(row), g_logprob, g_entropy, rows.temperatures[row],
                     !bad_label && !gradients.any_nan(row, rows.labels));
}

}  // namespace

}  // namespace d3s
