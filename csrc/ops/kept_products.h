// Products of the kept rows of an LM head's weight: a pair is a row of the hidden states and a token that was kept for
// it. cpu/kept_products.cpp, cuda/kept_products.cu. Arguments come checked, from ops/kept_products.cpp. Nothing here
// knows torch.
#pragma once

#include "../core/float_bits.h"
#include "../core/segments.h"
#include "device.h"

namespace d3s {

struct Matrix {
  const void* values = nullptr;
  FloatType type = FloatType::kFloat32;
  int64_t rows = 0, columns = 0;
  int64_t stride = 0;  // between rows; columns lie side by side
};

struct Pairs {
  const int32_t* rows = nullptr;
  const int32_t* tokens = nullptr;
  int64_t count = 0;

  // Whether a pair is one. Some stand for nothing, with a row of -1; on a GPU, values may be unchecked.
  D3S_HOST_DEVICE bool has(int64_t pair, int64_t hidden_rows, int64_t vocabulary) const {
    return rows[pair] >= 0 && rows[pair] < hidden_rows && tokens[pair] >= 0 && tokens[pair] < vocabulary;
  }
};

// The product of both rows of each pair; 0 for one that stands for nothing.
D3S_KERNEL(void pair_products(const Matrix& hidden, const Matrix& weight, const Pairs& pairs, float* out,
                              Device& device))

// out[row] = the sum of grad[pair] weight[token] over the pairs of a row: a segment, in their order. Tokens that are
// none are left out.
D3S_KERNEL(void sum_for_rows(const float* grad, const Matrix& weight, const int32_t* tokens, const Segments& segments,
                             float* out, Device& device))

// out[token] += the sum of grad[pair] hidden[row] over the pairs of a token, in their order. `out` has the type of
// `hidden` or float32.
D3S_KERNEL(void add_for_tokens(const float* grad, const Matrix& hidden, const Pairs& pairs, const Matrix& out,
                               Device& device))

}  // namespace d3s
