// The loops over a row's logits. There is one table of these loops for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/float_bits.h"

namespace d3s {

// The number of logits in a slice. A row is always cut at multiples of this number, so that its results are bitwise
// equal on any number of threads and in any batch. 8192 logits stay in the nearest caches between the pass for the
// maximum and the pass for the sums.
constexpr int64_t kSlice = 8192;

struct SoftmaxSums {  // the fields of a SoftmaxState, which has internal linkage (core/softmax_state.h)
  float max, sum, dot;
};

struct GradientRow {
  float max, scale;     // e^((z - max) / t) = 2^((z - max) scale)
  float offset, slope;  // see GradientLine
};

template <class T>
struct SoftmaxLoops {
  // Returns the state of n <= kSlice logits. `scale` is log2(e) / t. Prefetches `next`, the caller's next logits.
  SoftmaxSums (*slice)(const T* logits, int64_t n, float scale, const T* next);
  // gradient[i] = 2^(d scale) (offset + slope d), where d = logits[i] - max. For a logit of -inf, gradient[i] = 0.
  // `gradient` and `logits` may be the same array.
  void (*gradient)(const T* logits, int64_t n, const GradientRow& row, T* gradient);
  // Computes the same gradient from float32 logits. `gradient` may overwrite the front of `logits`.
  void (*narrow_gradient)(const float* logits, int64_t n, const GradientRow& row, T* gradient);
};

struct SoftmaxRows {
  SoftmaxLoops<float> float32;
  SoftmaxLoops<bfloat16> bf16;
  SoftmaxLoops<float16> fp16;

  const SoftmaxLoops<float>& of(Tag<float>) const { return float32; }
  const SoftmaxLoops<bfloat16>& of(Tag<bfloat16>) const { return bf16; }
  const SoftmaxLoops<float16>& of(Tag<float16>) const { return fp16; }
};

const SoftmaxRows& softmax_rows();  // returns the table for simd_level()

}  // namespace d3s
