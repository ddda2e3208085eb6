// The gradient of support logits, implemented in cpu/ and cuda/. ops/support_logits_backward.cpp has checked the
// arguments. Nothing here depends on torch.
#pragma once

#include "support_logprob_entropy.h"

namespace d3s {

// The results. From them, sum_for_rows and add_for_tokens (support_products.h) compute the gradients of the hidden
// states and of the weight and bias.
struct SupportGradientOutput {
  float* grad = nullptr;      // for each place: the gradient of its logit before the soft cap
  int32_t* rows = nullptr;    // for each place: the place's row, or -1 if the place has no gradient
  int32_t* tokens = nullptr;  // for each place: the column of the place's id
  bool* undefined = nullptr;  // for each row: whether its gradient is NaN; a row with a bad support has no places
};

// Computes the gradient of support logits (SupportRows::listed). If `softcap` is above 0, the gradient includes the
// derivative of the soft cap.
void support_gradients(const SupportRows& rows, const RowGradients& gradients, float softcap,
                       const SupportGradientOutput& out, Device& device);

// Returns dz / dx of the soft cap z = cap * tanh(x / cap), or 1 if there is no soft cap.
D3S_HOST_DEVICE float softcap_slope(float z, float softcap) {
  return softcap > 0.f ? 1.f - (z / softcap) * (z / softcap) : 1.f;
}

}  // namespace d3s
