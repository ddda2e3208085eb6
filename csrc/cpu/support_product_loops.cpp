// This file is compiled once for each SIMD level.
#include "support_product_loops.h"

#include "simd.h"

namespace d3s {
namespace {

inline void add_product(FloatPair& sum, const FloatPair& a, const FloatPair& b) {
  sum.a = multiply_add(a.a, b.a, sum.a);
  sum.b = multiply_add(a.b, b.b, sum.b);
}

// Loads the last n elements, which are too few for a pair of vectors, and pads them with 0.
template <class T>
FloatPair load_rest(const T* p, int64_t n) {
  T values[kPair] = {};
  memcpy(values, p, n * sizeof(T));
  return load_pair(values);
}

template <class T>
float dot(const T* a, const T* b, int64_t n) {
  FloatPair first = {}, second = {};  // two sums, since multiply-adds to the same sum wait for each other
  int64_t i = 0;
  for (; i + 2 * kPair <= n; i += 2 * kPair) {
    add_product(first, load_pair(a + i), load_pair(b + i));
    add_product(second, load_pair(a + i + kPair), load_pair(b + i + kPair));
  }
  if (i + kPair <= n) {
    add_product(first, load_pair(a + i), load_pair(b + i));
    i += kPair;
  }
  if (i < n) add_product(second, load_rest(a + i, n - i), load_rest(b + i, n - i));
  return sum_lanes((first.a + first.b) + (second.a + second.b));
}

template <class T>
void add_scaled(const T* x, float factor, int64_t n, float* sum) {
  const Floats factors = all(factor);
  int64_t i = 0;
  for (; i + kPair <= n; i += kPair) {
    FloatPair total = load_pair(sum + i);
    add_product(total, load_floats(x + i), {factors, factors});
    store_pair(sum + i, total);
  }
  for (; i < n; ++i) {
    const Floats one = multiply_add(all(to_float(x[i])), factors, all(sum[i]));
    sum[i] = one[0];
  }
}

template <class T>
void add_to(const float* sum, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + kPair <= n; i += kPair) {
    const FloatPair old = load_floats(out + i), more = load_pair(sum + i);
    store_floats(out + i, {old.a + more.a, old.b + more.b});
  }
  for (; i < n; ++i) out[i] = from_float<T>(to_float(out[i]) + sum[i]);
}

}  // namespace

namespace D3S_LEVEL {
extern const SupportProducts support_products = {{dot<float>, add_scaled<float>, add_to<float>},
                                                 {dot<bfloat16>, add_scaled<bfloat16>, add_to<bfloat16>},
                                                 {dot<float16>, add_scaled<float16>, add_to<float16>}};
}

}  // namespace d3s
