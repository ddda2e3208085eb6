// The inner loop of all kernels that compute entropies. In this loop, one thread computes its share of a row's softmax
// state. It finds the maximum of a group of vectors of logits, rescales its sums to the new maximum once, and then adds
// the elements. An element costs one exponential. The loop never waits for another thread.
#pragma once

#include "../core/softmax_state.h"
#include "collective.h"
#include "vectors.h"

namespace d3s {

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

}  // namespace d3s
