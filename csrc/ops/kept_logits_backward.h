// The gradient of kept logits, as each back-end implements it: cpu/kept_logits_backward.cpp,
// cuda/kept_logits_backward.cu. Arguments come checked, from ops/kept_logits_backward.cpp. Nothing here knows torch.
#pragma once

#include "logprob_entropy.h"

namespace d3s {

// What the products of the backward take: kept_products.h.
struct KeptGradientOutput {
  float* grad = nullptr;      // for each place: of the product of hidden states and weight
  int32_t* rows = nullptr;    // the place's row; -1 if it has no gradient
  int32_t* tokens = nullptr;  // and its token, counted from first_token on
  bool* undefined = nullptr;  // for each row: its gradient is NaN, at each of its places, of which a bad span has none
};

// The gradient of logits of the kept tokens alone (LogitsRows::kept_alone) of the tile from first_token on, through a
// soft cap if that is above 0.
void kept_gradients(const LogitsRows& rows, const RowGradients& gradients, int64_t first_token, float softcap,
                    const KeptGradientOutput& out, Device& device);

// Through z = cap * tanh(x / cap).
D3S_HOST_DEVICE float softcap_slope(float z, float softcap) {
  return softcap > 0.f ? 1.f - (z / softcap) * (z / softcap) : 1.f;
}

}  // namespace d3s
