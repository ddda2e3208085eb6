// Defines vectors, and a few operations on them. The including file is compiled for a SIMD level, which decides the
// width of a vector. This header uses the vector extensions of GCC and Clang, and intrinsics for operations that these
// extensions lack. Fast-math must be off: it would remove the rounding trick of exp2_nonpositive, and the whole process
// would then treat denormals differently.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(D3S_GENERIC)  // in tests, D3S_GENERIC selects the code for other machines
#include <arm_neon.h>
#define D3S_NEON
#endif

#include "../core/float_bits.h"
#include "../core/macros.h"

namespace d3s {
namespace {  // internal linkage: see simd_level.h

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats all(float value) { return value - Floats{}; }

// Returns a * b + c. If the machine has a fused multiply-add, the result is rounded only once.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(D3S_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Returns the larger of x and `number`. Where x is NaN, the result is `number`, which must not be NaN.
inline Floats max_number(Floats x, Floats number) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)number);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)number);
#elif defined(__SSE2__)
  return (Floats)_mm_max_ps((__m128)x, (__m128)number);
#elif defined(D3S_NEON)
  return (Floats)vmaxnmq_f32((float32x4_t)x, (float32x4_t)number);
#else
  return x > number ? x : number;
#endif
}

// Returns the larger of x and `number`. Where x is NaN, the result is NaN. `number` must not be NaN.
inline Floats max_or_nan(Floats x, Floats number) {
#if defined(D3S_NEON)
  return (Floats)vmaxq_f32((float32x4_t)x, (float32x4_t)number);
#else
  return max_number(number, x);  // here, max_number returns its second argument where one argument is NaN
#endif
}

// Returns 2^(x * scale) for -125 <= x * scale <= 0, with an error of at most 3 units in the last place. If x is NaN,
// the result is arbitrary, since the low bits of the NaN are added to the exponent. But the product of the result and x
// is still NaN.
inline Floats exp2_nonpositive(Floats x, Floats scale) {
  // Adding 1.5 * 2^23 rounds x * scale to an integer n. The low bits of the sum are n.
  const Floats magic = all(12582912.f);
  const Floats sum = multiply_add(x, scale, magic);
  const Floats n = sum - magic;
  const Floats f = multiply_add(x, scale, -n);  // in [-1/2, 1/2]
  // The polynomial p(f) approximates 2^f: 2^f / p(f) is within 1e-7 of 1. Among the polynomials with p(0) = 1, p has
  // the smallest maximum of the relative error. p(0) = 1 makes e^0 exactly 1.
  Floats p = all(1.3264727e-3f);
  p = multiply_add(p, f, all(9.6715130e-3f));
  p = multiply_add(p, f, all(5.5507336e-2f));
  p = multiply_add(p, f, all(2.4022242e-1f));
  p = multiply_add(p, f, all(6.9314700e-1f));
  p = multiply_add(p, f, all(1.f));
  return (Floats)((Ints)p + ((Ints)sum << 23));
}

// Folds all lanes into one value. Each step folds one half of the lanes onto the other half, always in the same order.
template <class Fold>
inline float fold_lanes(Floats v, const Fold& fold) {
#if defined(__AVX512F__)
  v = fold(v, (Floats)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
  v = fold(v, (Floats)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1));
  v = fold(v, (Floats)_mm512_permute_ps((__m512)v, 0x4e));
  v = fold(v, (Floats)_mm512_permute_ps((__m512)v, 0xb1));
#elif defined(__AVX2__)
  v = fold(v, (Floats)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1));
  v = fold(v, (Floats)_mm256_permute_ps((__m256)v, 0x4e));
  v = fold(v, (Floats)_mm256_permute_ps((__m256)v, 0xb1));
#else
  v = fold(v, Floats{v[2], v[3], v[0], v[1]});
  v = fold(v, Floats{v[1], v[0], v[3], v[2]});
#endif
  return v[0];
}

inline float sum_lanes(Floats v) {
  return fold_lanes(v, [](Floats a, Floats b) { return a + b; });
}

inline float max_lanes(Floats v) {
  return fold_lanes(v, [](Floats a, Floats b) { return max_number(a, b); });
}

// Returns a number whose bit i says whether lane i of `values` is at least `lowest`. NaN is not.
inline uint32_t lanes_from(Floats values, Floats lowest) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)values, (__m512)lowest, _CMP_GE_OQ);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)values, (__m256)lowest, _CMP_GE_OQ)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpge_ps((__m128)values, (__m128)lowest)));
#else
  const Words at_least = (Words)(values >= lowest);
#if defined(D3S_NEON)
  if (vmaxvq_u32((uint32x4_t)at_least) == 0) return 0;
#endif
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= (at_least[i] & 1u) << i;
  return lanes;
#endif
}

// ---- load_pair and store_pair load and store 2 * kLanes elements of a type, as floats. The order of the lanes depends
// on the type, but is the same for load_pair and store_pair.
struct FloatPair {
  Floats a, b;
};
constexpr int64_t kPair = 2 * kLanes;

// Loads the vectors separately: for one memcpy of the pair, GCC would emit a slow chain of small copies through memory.
inline FloatPair load_pair(const float* p) {
  FloatPair pair;
  memcpy(&pair.a, p, sizeof pair.a);
  memcpy(&pair.b, p + kLanes, sizeof pair.b);
  return pair;
}

inline void store_pair(float* p, const FloatPair& pair) {
  memcpy(p, &pair.a, sizeof pair.a);
  memcpy(p + kLanes, &pair.b, sizeof pair.b);
}

// The first vector holds the even elements (the low halves of the words), the second vector holds the odd elements.
inline FloatPair load_pair(const bfloat16* p) {
  Words words;
  memcpy(&words, p, sizeof words);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

// Rounds floats to bfloat16, to nearest even. The result is in the high half of each word.
inline Words round_to_bfloat16(Floats v) {
  const Words bits = (Words)v;
  const Words rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
  return v == v ? rounded : bits | 0x400000u;
}

inline void store_pair(bfloat16* p, const FloatPair& pair) {
  const Words words = (round_to_bfloat16(pair.a) >> 16) | (round_to_bfloat16(pair.b) & 0xffff0000u);
  memcpy(p, &words, sizeof words);
}

#if defined(__AVX512F__)
inline FloatPair load_pair(const float16* p) {
  return {(Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)),
          (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + kLanes)))};
}

inline void store_pair(float16* p, const FloatPair& pair) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)pair.a, _MM_FROUND_TO_NEAREST_INT));
  _mm256_storeu_si256((__m256i*)(p + kLanes), _mm512_cvtps_ph((__m512)pair.b, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
inline FloatPair load_pair(const float16* p) {
  return {(Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + kLanes)))};
}

inline void store_pair(float16* p, const FloatPair& pair) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)pair.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + kLanes), _mm256_cvtps_ph((__m256)pair.b, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(D3S_NEON)
inline FloatPair load_pair(const float16* p) {
  const auto* halves = reinterpret_cast<const float16_t*>(p);
  return {(Floats)vcvt_f32_f16(vld1_f16(halves)), (Floats)vcvt_f32_f16(vld1_f16(halves + kLanes))};
}

inline void store_pair(float16* p, const FloatPair& pair) {
  auto* halves = reinterpret_cast<float16_t*>(p);
  vst1_f16(halves, vcvt_f16_f32((float32x4_t)pair.a));
  vst1_f16(halves + kLanes, vcvt_f16_f32((float32x4_t)pair.b));
}
#else
// Takes the same steps as to_float (core/float_bits.h).
inline Floats load_halves(const float16* p) {
  Halves halves;
  memcpy(&halves, p, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words), magnitude = (bits & 0x7fffu) << 13;
  const Words beyond = (Words)(magnitude >= 0x0f800000u) & 0x7f800000u;  // infinity, NaN
  return (Floats)((bits & 0x8000u) << 16 | (Words)((Floats)magnitude * all(0x1p112f)) | beyond);
}

inline FloatPair load_pair(const float16* p) { return {load_halves(p), load_halves(p + kLanes)}; }

inline void store_pair(float16* p, const FloatPair& pair) {
  float values[kPair];
  store_pair(values, pair);
  for (int i = 0; i < kPair; ++i) p[i] = from_float<float16>(values[i]);
}
#endif

// ---- load_floats and store_floats do the same as load_pair and store_pair, but the lanes are always in memory order.
inline FloatPair load_floats(const float* p) { return load_pair(p); }
inline FloatPair load_floats(const float16* p) { return load_pair(p); }
inline void store_floats(float* p, const FloatPair& pair) { store_pair(p, pair); }
inline void store_floats(float16* p, const FloatPair& pair) { store_pair(p, pair); }

inline void store_floats(bfloat16* p, const FloatPair& pair) {
  const Halves a = __builtin_convertvector(round_to_bfloat16(pair.a) >> 16, Halves);
  const Halves b = __builtin_convertvector(round_to_bfloat16(pair.b) >> 16, Halves);
  memcpy(p, &a, sizeof a);
  memcpy(p + kLanes, &b, sizeof b);
}

inline FloatPair load_floats(const bfloat16* p) {
  Halves a, b;
  memcpy(&a, p, sizeof a);
  memcpy(&b, p + kLanes, sizeof b);
  return {(Floats)(__builtin_convertvector(a, Words) << 16), (Floats)(__builtin_convertvector(b, Words) << 16)};
}

}  // namespace
}  // namespace d3s
