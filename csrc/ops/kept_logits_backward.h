// The gradient of kept logits. Each back-end implements it, in cpu/kept_logits_backward.cpp and
// cuda/kept_logits_backward.cu. The arguments have been checked by ops/kept_logits_backward.cpp. Nothing here depends
// on torch.
#pragma once

#include "logprob_entropy.h"

namespace d3s {

// The results. They are the inputs of sum_for_rows and add_for_tokens (kept_products.h).
struct KeptGradientOutput {
  float* grad = nullptr;      // for each place: the gradient of the product of a hidden state and a weight row
  int32_t* rows = nullptr;    // for each place: its row; -1 if the place has no gradient
  int32_t* tokens = nullptr;  // for each place: the column of its token
  bool* undefined = nullptr;  // for each row: whether its gradient is NaN, even if the row has no places (bad span)
};

// Computes the gradient of kept logits (LogitsRows::kept_alone). If `softcap` is above 0, the gradient includes the
// derivative of the soft cap.
void kept_gradients(const LogitsRows& rows, const RowGradients& gradients, float softcap, const KeptGradientOutput& out,
                    Device& device);

// dz / dx of the soft cap z = cap * tanh(x / cap).
D3S_HOST_DEVICE float softcap_slope(float z, float softcap) {
  return softcap > 0.f ? 1.f - (z / softcap) * (z / softcap) : 1.f;
}

}  // namespace d3s
