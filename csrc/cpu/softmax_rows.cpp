// This file is compiled once for each SIMD level.
#include "softmax_rows.h"

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace d3s {
namespace {

// Returns the lowest allowed distance from the maximum. Lower distances are raised to this limit. At the limit,
// exp2_nonpositive returns 2^-125, the smallest value that it can compute.
inline float floor_distance(float scale) { return -125.f / scale; }

// The last elements of a row or slice, if they are too few for a pair of vectors. They are padded with -inf. memcpy
// copies them, because a gradient may overwrite logits of another type, and the compiler could then reorder plain reads
// and writes.
template <class T>
struct Tail {
  T values[kPair];

  Tail(const T* p, int64_t n) {
    for (int64_t i = 0; i < kPair; ++i) values[i] = from_float<T>(-INFINITY);
    if (n > 0) memcpy(values, p, n * sizeof(T));
  }
};

struct Maximum {
  Floats a = all(-FLT_MAX), b = all(-FLT_MAX);

  void add(const FloatPair& x) {
    a = max_number(x.a, a);  // the maximum drops NaN, but the dot still becomes NaN
    b = max_number(x.b, b);
  }
};

struct Sums {
  Floats sum_a = {}, sum_b = {}, dot_a = {}, dot_b = {};

  void add(const FloatPair& x, Floats max, Floats floor, Floats scale) {
    const Floats d_a = max_or_nan(x.a - max, floor), d_b = max_or_nan(x.b - max, floor);
    const Floats e_a = exp2_nonpositive(d_a, scale), e_b = exp2_nonpositive(d_b, scale);
    sum_a += e_a;
    sum_b += e_b;
    dot_a = multiply_add(d_a, e_a, dot_a);
    dot_b = multiply_add(d_b, e_b, dot_b);
  }
};

// The number of elements that are added up separately, before their sum is added to the total. If terms of 1e-8 were
// added one by one to a total of 1, they would be lost.
constexpr int64_t kRun = 16 * kPair;

template <class T>
SoftmaxSums slice(const T* logits, int64_t n, float scale, const T* next) {
  const int64_t whole = n / kPair * kPair;
  const Tail<T> tail(logits + whole, n - whole);

  Maximum first, second;
  first.add(load_pair(tail.values));
  int64_t i = 0;
  for (; i + 2 * kPair <= whole; i += 2 * kPair) {
    first.add(load_pair(logits + i));
    second.add(load_pair(logits + i + kPair));
  }
  if (i < whole) first.add(load_pair(logits + i));
  const float max = max_lanes(max_number(max_number(first.a, first.b), max_number(second.a, second.b)));

  const Floats maxima = all(max), floors = all(floor_distance(scale)), scales = all(scale);
  Floats sum = {}, dot = {};
  for (int64_t begin = 0; begin < whole; begin += kRun) {
    const int64_t end = whole - begin < kRun ? whole : begin + kRun;
    Sums run;
    for (i = begin; i < end; i += kPair) {
      // Prefetches the next logits, so that memory is busy during the arithmetic.
      for (int64_t line = 0; line < static_cast<int64_t>(kPair * sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(next + i) + line);
      run.add(load_pair(logits + i), maxima, floors, scales);
    }
    sum += run.sum_a + run.sum_b;
    dot += run.dot_a + run.dot_b;
  }
  if (whole < n) {
    Sums run;
    run.add(load_pair(tail.values), maxima, floors, scales);
    sum += run.sum_a + run.sum_b;
    dot += run.dot_a + run.dot_b;
  }
  return {max, sum_lanes(sum), sum_lanes(dot)};
}

struct Gradient {
  Floats max, scale, floor, offset, slope;

  explicit Gradient(const GradientRow& row)
      : max(all(row.max)),
        scale(all(row.scale)),
        floor(all(floor_distance(row.scale))),
        offset(all(row.offset)),
        slope(all(row.slope)) {}

  Floats of(Floats x) const {
    const Floats raw = x - max;
    const Floats d = max_or_nan(raw, floor);
    const Floats gradient = exp2_nonpositive(d, scale) * multiply_add(d, slope, offset);
    return raw < floor ? Floats{} : gradient;
  }

  FloatPair of(const FloatPair& x) const { return {of(x.a), of(x.b)}; }
};

template <class From, class To>
void store_gradient(To* out, const FloatPair& gradient) {
  if constexpr (std::is_same_v<From, To>)
    store_pair(out, gradient);
  else
    store_floats(out, gradient);
}

template <class From, class To>
void gradient(const From* logits, int64_t n, const GradientRow& row, To* out) {
  const Gradient line(row);
  const int64_t whole = n / kPair * kPair;
  for (int64_t i = 0; i < whole; i += kPair) store_gradient<From>(out + i, line.of(load_pair(logits + i)));
  if (whole == n) return;
  const Tail<From> tail(logits + whole, n - whole);
  To last[kPair];
  store_gradient<From>(last, line.of(load_pair(tail.values)));
  memcpy(out + whole, last, (n - whole) * sizeof(To));
}

}  // namespace

namespace D3S_LEVEL {
extern const SoftmaxRows softmax_rows = {{slice<float>, gradient<float, float>, gradient<float, float>},
                                         {slice<bfloat16>, gradient<bfloat16, bfloat16>, gradient<float, bfloat16>},
                                         {slice<float16>, gradient<float16, float16>, gradient<float, float16>}};
}

}  // namespace d3s
