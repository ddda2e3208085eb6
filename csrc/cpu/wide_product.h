// A bfloat16 matrix product with a float32 result. On CPUs, torch has no such product. Rounding an LM head's logits to
// bfloat16 would change entropies by hundredths of a nat. Converting the weight to float32 first would cost most of the
// speed.
#pragma once

#include <cstdint>

#include "../core/float_bits.h"

namespace d3s {

struct WideProduct {
  int64_t columns;  // the width of a panel: how many rows of the weight are multiplied at a time
  // Returns the number of words in a packed panel. Word [w][c] holds elements 2 w and 2 w + 1 of weight row c.
  int64_t (*panel_words)(int64_t inner);
  void (*pack)(const bfloat16* weight, int64_t stride, int64_t columns, int64_t inner, uint32_t* panel);
  // out[r][c] = sum_i hidden[r][i] weight[c][i]. The terms are added in the order of i, for any number of rows and
  // columns. A row of `hidden` has (inner + 1) / 2 words of two elements; the last word may be padded with 0.
  void (*multiply)(const uint32_t* hidden, int64_t rows, const uint32_t* panel, int64_t inner, float* out,
                   int64_t out_stride, int64_t columns);
};

const WideProduct& wide_product();  // returns the table for simd_level()

}  // namespace d3s
