// Loops over the elements of two matrix rows, or of a matrix row and a float32 sum. There is one table of these loops
// for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/float_bits.h"

namespace d3s {

template <class T>
struct SupportProductLoops {
  // Returns sum_i a[i] b[i] in float32. The order of the additions depends only on n.
  float (*dot)(const T* a, const T* b, int64_t n);
  // sum[i] += factor x[i]
  void (*add_scaled)(const T* x, float factor, int64_t n, float* sum);
  // out[i] += sum[i], rounded once
  void (*add_to)(const float* sum, int64_t n, T* out);
};

struct SupportProducts {
  SupportProductLoops<float> float32;
  SupportProductLoops<bfloat16> bf16;
  SupportProductLoops<float16> fp16;

  const SupportProductLoops<float>& of(Tag<float>) const { return float32; }
  const SupportProductLoops<bfloat16>& of(Tag<bfloat16>) const { return bf16; }
  const SupportProductLoops<float16>& of(Tag<float16>) const { return fp16; }
};

const SupportProducts& support_products();  // returns the table for simd_level()

}  // namespace d3s
