// Compiled once for each SIMD level.
#include "softmax_rows.h"

#include <cfloat>
#include <cmath>

#include "simd.h"

namespace d3s {
namespace {

// A distance below the maximum at which a logit no longer counts: 2^-125 of the maximum, the last power of two that
// exp2_nonpositive makes.
inline float floor_distance(float scale) { return -125.f / scale; }

// The last elements of a row that fill no pair of vectors, padded with -inf.
template <class T>
struct Tail {
  T values[kPair];

  Tail(const T* p, int64_t n) {
    for (int64_t i = 0; i < kPair; ++i) values[i] = i < n ? p[i] : from_float<T>(-INFINITY);
  }
};

struct Maximum {
  Floats a = all(-FLT_MAX), b = all(-FLT_MAX);

  void add(const FloatPair& x) {
    a = maximum(x.a, a);  // in this order NaN is passed over; it shows in the sums
    b = maximum(x.b, b);
  }
};

struct Sums {
  Floats sum_a = {}, sum_b = {}, dot_a = {}, dot_b = {};

  void add(const FloatPair& x, Floats max, Floats floor, Floats scale) {
    const Floats d_a = maximum(floor, x.a - max), d_b = maximum(floor, x.b - max);  // in this order NaN stays
    const Floats e_a = exp2_nonpositive(d_a, scale), e_b = exp2_nonpositive(d_b, scale);
    sum_a += e_a;
    sum_b += e_b;
    dot_a = multiply_add(d_a, e_a, dot_a);
    dot_b = multiply_add(d_b, e_b, dot_b);
  }
};

template <class T>
SoftmaxSums chunk(const T* logits, int64_t n, float scale) {
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
  const float max = max_lanes(maximum(maximum(first.a, first.b), maximum(second.a, second.b)));

  Sums sums;
  const Floats maxima = all(max), floors = all(floor_distance(scale)), scales = all(scale);
  for (i = 0; i < whole; i += kPair) {
    // While the arithmetic keeps this chunk busy, the next one comes from memory.
    __builtin_prefetch(logits + kChunk + i);
    if (sizeof(T) * kPair > 64) __builtin_prefetch(reinterpret_cast<const char*>(logits + kChunk + i) + 64);
    sums.add(load_pair(logits + i), maxima, floors, scales);
  }
  if (whole < n) sums.add(load_pair(tail.values), maxima, floors, scales);
  return {max, sum_lanes(sums.sum_a + sums.sum_b), sum_lanes(sums.dot_a + sums.dot_b)};
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
    const Floats d = maximum(floor, raw);
    const Floats gradient = exp2_nonpositive(d, scale) * multiply_add(d, slope, offset);
    return raw < floor ? Floats{} : gradient;
  }

  FloatPair of(const FloatPair& x) const { return {of(x.a), of(x.b)}; }
};

template <class T>
void gradient(const T* logits, int64_t n, const GradientRow& row, T* out) {
  const Gradient line(row);
  const int64_t whole = n / kPair * kPair;
  for (int64_t i = 0; i < whole; i += kPair) store_pair(out + i, line.of(load_pair(logits + i)));
  if (whole == n) return;
  Tail<T> tail(logits + whole, n - whole);
  store_pair(tail.values, line.of(load_pair(tail.values)));
  for (int64_t i = whole; i < n; ++i) out[i] = tail.values[i - whole];
}

}  // namespace

namespace D3S_LEVEL {
extern const SoftmaxRows softmax_rows = {
    {chunk<float>, gradient<float>}, {chunk<bfloat16>, gradient<bfloat16>}, {chunk<float16>, gradient<float16>}};
}

}  // namespace d3s
