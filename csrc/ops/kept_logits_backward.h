// The gradient of kept logits, implemented in cpu/ and cuda/. ops/kept_logits_backward.cpp has checked the arguments.
// Nothing here depends on torch.
#pragma once

#include "logprob_entropy.h"

namespace d3s {

// The results. From them, sum_for_rows and add_for_tokens (kept_products.h) compute the gradients of the hidden states
// and of the weight and bias.
struct KeptGradientOutput {
  float* grad = nullptr;      // for each place: the gradient of its logit before the soft cap
  int32_t* rows = nullptr;    // for each place: the place's row, or -1 if the place has no gradient
  int32_t* tokens = nullptr;  // for each place: the column of the place's token
  bool* undefined = nullptr;  // for each row: whether its gradient is NaN; a row with a bad span has no places
};

// Computes the gradient of kept logits (LogitsRows::kept_alone). If `softcap` is above 0, the gradient includes the
// derivative of the soft cap.
void kept_gradients(const LogitsRows& rows, const RowGradients& gradients, float softcap, const KeptGradientOutput& out,
                    Device& device);

// Returns dz / dx of the soft cap z = cap * tanh(x / cap), or 1 if there is no soft cap.
D3S_HOST_DEVICE float softcap_slope(float z, float softcap) {
  return softcap > 0.f ? 1.f - (z / softcap) * (z / softcap) : 1.f;
}

}  // namespace d3s
