// The softmax state (m, S, T) of some logits z of a row, at temperature t:
//
//     m = max z,   S = sum e^((z - m) / t),   T = sum (z - m) e^((z - m) / t)
//
// The states of parts of a row are merged in the same way for CPU threads, GPU blocks, vocabulary tiles and ranks. The
// row's merged state gives the entropy and, with the label's logit z_y, the log-probability:
//
//     H = log S - T / (t S),     logprob(y) = (z_y - m) / t - log S
//
// H is the sum of two terms, log S and -T / (t S), and each term is >= 0. So the terms do not cancel, whatever constant
// is added to all logits.
//
// Special values: for a -inf logit, a loop may add e^(-86) to S instead of 0, since clamping the distance z - m is
// cheaper than selecting 0. This e^(-86) is negligible beside S >= 1, and finish() removes its contribution to T / S.
// If all logits of a row are -inf, S is below 1/2. If a logit is NaN or +inf, T becomes NaN and stays NaN, but S may be
// any value (see exp2_nonpositive in cpu/simd.h).
#pragma once

#include <cfloat>
#include <cmath>

#include "macros.h"

namespace d3s {
namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

constexpr float kLog2E = 1.44269504088896340736f;

struct SoftmaxState {
  float max = -FLT_MAX;  // not -inf: -inf - -inf would be NaN
  float sum = 0.f;
  float dot = 0.f;
};

struct RowStatistics {
  float entropy;
  float max;
  float log_sum;
};

// Returns the same state, but relative to `max`, which is at least `state.max`. If the factor underflows to 0, both
// sums become exactly 0, even if `move` is -inf.
D3S_HOST_DEVICE SoftmaxState rebase(const SoftmaxState& state, float max, float inverse_temperature) {
  const float move = state.max - max;
  const float factor = exp2f(move * (kLog2E * inverse_temperature));
  const float safe_move = factor > 0.f ? move : 0.f;  // -inf * 0 would be NaN
  return {max, factor * state.sum, factor * (state.dot + safe_move * state.sum)};
}

D3S_HOST_DEVICE SoftmaxState merge(const SoftmaxState& a, const SoftmaxState& b, float inverse_temperature) {
  const bool a_leads = a.max >= b.max;
  const SoftmaxState leader = a_leads ? a : b;  // copies: with references, a GPU would keep both states in memory
  const SoftmaxState follower = a_leads ? b : a;
  const SoftmaxState moved = rebase(follower, leader.max, inverse_temperature);
  return {leader.max, leader.sum + moved.sum, leader.dot + moved.dot};
}

D3S_HOST_DEVICE RowStatistics finish(const SoftmaxState& state, float temperature) {
  const bool undefined = state.sum < 0.5f || state.dot != state.dot;  // no logit above -inf; or a NaN or +inf logit
  const float sum = undefined ? NAN : state.sum;
  const float log_sum = logf(sum);
  const float mean = state.dot / (temperature * sum);
  const float entropy = log_sum - (mean > -1e-30f ? 0.f : mean);  // removes terms of clamped -inf logits; NaN stays NaN
  return {entropy < 0.f ? 0.f : entropy, state.max, log_sum};
}

// Returns the log-probability of the id whose logit is z.
D3S_HOST_DEVICE float log_probability(float z, const RowStatistics& row, float temperature) {
  return (z - row.max) / temperature - row.log_sum;
}

// The derivative of g_logprob * logprob(y) + g_entropy * H with respect to the logit z of an id with probability p is
//     dz = (g_logprob (1{y} - p) - g_entropy p (log p + H)) / t.
// Here, 1{y} is 1 for the label y, and 0 for all other ids. With d = z - m, dz is computed as e^(d / t) * (offset +
// slope * d): one exponential and one fused multiply-add. For the label, `target` is added.
struct GradientLine {
  float offset;
  float slope;
  float target;  // added if the id is the label
};

D3S_HOST_DEVICE GradientLine gradient_line(float g_logprob, float g_entropy, const RowStatistics& row,
                                           float temperature) {
  const float scale = expf(-row.log_sum) / temperature;
  return {-scale * (g_logprob + g_entropy * (row.entropy - row.log_sum)), -scale * g_entropy / temperature,
          g_logprob / temperature};
}

// Returns the gradient of the label's logit. `distance` is the label's logit minus the maximum of the row.
D3S_HOST_DEVICE float label_gradient(const GradientLine& line, float distance, float temperature) {
  const float e = expf(distance / temperature);
  return line.target + (e == 0.f ? 0.f : e * (line.offset + line.slope * distance));  // 0 * inf would be NaN
}

}  // namespace
}  // namespace d3s
