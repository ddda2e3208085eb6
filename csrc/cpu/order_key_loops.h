// Loops over scores and their order keys (core/order_key.h). There is one table of these loops for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/float_bits.h"

namespace d3s {

constexpr int64_t kKeysPadding = 16;  // the number of keys in the widest vector

struct OrderKeyLoops {
  // keys[i] = order_key(|advantage| * scores[i]), or 0 where the mask is false or the score is NaN. The advantage is
  // advantages[i], or `advantage` if `advantages` is null. `mask` may be null. Returns how many keys are not 0. n must
  // be below 2^31.
  template <class T>
  using FromScores = int64_t (*)(const T* scores, const float* advantages, float advantage, const bool* mask, int64_t n,
                                 uint32_t* keys);
  FromScores<float> from_float32;
  FromScores<bfloat16> from_bf16;
  FromScores<float16> from_fp16;

  // keys[i] = order_key(values[i]), or UINT32_MAX where the mask is false or the value is not finite. `mask` may be
  // null. Returns how many keys are not UINT32_MAX. n must be below 2^31.
  template <class T>
  using FiniteKeys = int64_t (*)(const T* values, const bool* mask, int64_t n, uint32_t* keys);
  FiniteKeys<float> finite_float32;
  FiniteKeys<bfloat16> finite_bf16;
  FiniteKeys<float16> finite_fp16;

  // Returns how many keys are at least `pivot`.
  int64_t (*count_from)(const uint32_t* keys, int64_t n, uint32_t pivot);
  // Copies the keys in [low, high] to `out`, in order, and returns how many there are. `out` must have room for n keys.
  int64_t (*copy_between)(const uint32_t* keys, int64_t n, uint32_t low, uint32_t high, uint32_t* out);
  // Returns the smallest key that is at least `pivot`, or UINT32_MAX if there is none.
  uint32_t (*lowest_from)(const uint32_t* keys, int64_t n, uint32_t pivot);
  // below[i] = how many of the n keys are less than keys[i]. The length of each array must be at least n, rounded up to
  // a multiple of kKeysPadding.
  void (*count_below)(const uint32_t* keys, int64_t n, uint32_t* below);
  // mask[i] = keys[i] >= pivot.
  void (*write_mask)(const uint32_t* keys, int64_t n, uint32_t pivot, bool* mask);

  FromScores<float> from(Tag<float>) const { return from_float32; }
  FromScores<bfloat16> from(Tag<bfloat16>) const { return from_bf16; }
  FromScores<float16> from(Tag<float16>) const { return from_fp16; }
  FiniteKeys<float> finite(Tag<float>) const { return finite_float32; }
  FiniteKeys<bfloat16> finite(Tag<bfloat16>) const { return finite_bf16; }
  FiniteKeys<float16> finite(Tag<float16>) const { return finite_fp16; }
};

const OrderKeyLoops& order_key_loops();  // returns the table for simd_level()

}  // namespace d3s
