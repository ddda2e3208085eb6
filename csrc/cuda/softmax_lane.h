// The inner loop of every entropy on a GPU: one thread's share of a softmax state, taken in vectors.
//
// The thread finds the maximum of a group of vectors, rescales its sums to the new maximum once, and then adds the
// elements, for one exponential each. The loop never waits for another thread.
#pragma once

#include "../core/softmax_state.h"
#include "collective.h"
#include "vectors.h"

namespace d3s {

// For d below this, 2^d is 0 in float32. It replaces the distance of a -inf logit, since -inf * 0 would be NaN. A NaN
// logit still reaches the sums, through e.
constexpr float kLowestDistance = -200.f;

struct LaneState {
  float max = -FLT_MAX;
  float sum = 0.f;
  float scaled_dot = 0.f;  // T * scale, with scale = log2(e) / temperature: distances are exponents of 2

  template <class T, int kCount>
  __device__ __forceinline__ void add(const uint4 (&vectors)[kCount], float scale) {
    raise(fmaxf(max, largest<T>(vectors)), scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) for_elements<T>(vectors[i], [&](float z) { add_below_max(z, scale); });
  }

  template <int kCount>
  __device__ __forceinline__ void add(const float (&logits)[kCount], float scale) {
    float top = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) top = fmaxf(top, logits[i]);
    raise(top, scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_below_max(logits[i], scale);
  }

  __device__ SoftmaxState state(float scale) const { return {max, sum, scaled_dot / scale}; }

 private:
  __device__ __forceinline__ void raise(float new_max, float scale) {
    const float move = (max - new_max) * scale, factor = exp2_fast(move);
    scaled_dot = factor * fmaf(factor > 0.f ? move : 0.f, sum, scaled_dot);  // -inf * 0 would be NaN
    sum *= factor;
    max = new_max;
  }
  __device__ __forceinline__ void add_below_max(float z, float scale) {
    const float distance = (z - max) * scale, e = exp2_fast(distance);
    sum += e;
    scaled_dot = fmaf(fmaxf(distance, kLowestDistance), e, scaled_dot);
  }
};

// Merges the states of the warp's lanes. All lanes get the same bits.
__device__ __forceinline__ SoftmaxState warp_merge(const SoftmaxState& own, float inverse_temperature) {
  const float max = warp_reduce(own.max, Max());
  const SoftmaxState moved = rebase(own, max, inverse_temperature);
  return {max, warp_reduce(moved.sum, Sum()), warp_reduce(moved.dot, Sum())};
}

}  // namespace d3s
