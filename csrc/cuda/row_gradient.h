// Helpers of the kernels that write a row's gradient.
#pragma once

#include "row_sink.h"
#include "vectors.h"

namespace d3s {
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
