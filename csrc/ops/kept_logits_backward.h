// The gradient of kept logits, as each back-end implements it: cpu/kept_logits_backward.cpp,
// cuda/kept_logits_backward.cu. Arguments come checked, from ops/kept_logits_backward.cpp. Nothing here knows torch.
#pragma once

#include "logprob_entropy.h"

namespace d3s {

// The inputs of the backward's products (kept_products.h).
struct KeptGradientOutput {
  float* grad = nullptr;      // for each place: the gradient of the product of hidden state and weight row
  int32_t* rows = nullptr;    // the place's row; -1 if it has no gradient
  int32_t* tokens = nullptr;  // the column of the place's token
  bool* undefined = nullptr;  // for each row: whether its gradient is NaN. A row with a bad span has no places
};

// The gradient of kept logits (LogitsRows::kept_alone). If `softcap` is above 0, the gradient goes through the soft
// cap.
void kept_gradients(const LogitsRows& rows, const RowGradients& gradients, float softcap, const KeptGradientOutput& out,
                    Device& device);

// dz / dx of the soft cap z = cap * tanh(x / cap).
D3S_HOST_DEVICE float softcap_slope(float z, float softcap) {
  return softcap > 0.f ? 1.f - (z / softcap) * (z / softcap) : 1.f;
}

}  // namespace d3s
