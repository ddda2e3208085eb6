// wide_product_ computes out = hidden @ weight.T, with bfloat16 inputs and a float32 result. The panels of the weight
// are divided among the threads.
#include "wide_product.h"

#include <memory>

#include "../torch_abi.h"

namespace d3s {
namespace {

// Copies rows of odd length into words of two elements, and pads the last word with 0. Other rows need no copy.
std::vector<uint32_t> padded_words(const bfloat16* hidden, int64_t rows, int64_t inner) {
  const int64_t words = (inner + 1) / 2;
  std::vector<uint32_t> padded(inner % 2 ? rows * words : 0);
  for (int64_t r = 0; r < rows && inner % 2; ++r)
    memcpy(padded.data() + r * words, hidden + r * inner, inner * sizeof(bfloat16));
  return padded;
}

void wide_product_(const Tensor& hidden, const Tensor& weight, const Tensor& out) {
  require(hidden.dim() == 2 && hidden.scalar_type() == ScalarType::BFloat16, "hidden", "got shape ", shape(hidden),
          " of ", dtype(hidden), "; takes bfloat16 [rows, H]");
  require(weight.dim() == 2 && weight.scalar_type() == ScalarType::BFloat16 && weight.size(1) == hidden.size(1),
          "weight", "got shape ", shape(weight), " of ", dtype(weight), "; takes bfloat16 [V, ", hidden.size(1), "]");
  const int64_t rows = hidden.size(0), columns = weight.size(0), inner = hidden.size(1);
  require(out.dim() == 2 && out.scalar_type() == ScalarType::Float && out.size(0) == hidden.size(0) &&
              out.size(1) == weight.size(0) && (out.size(1) <= 1 || out.stride(1) == 1),
          "out", "got shape ", shape(out), " of ", dtype(out), "; takes float32 [", hidden.size(0), ", ",
          weight.size(0), "], rows of stride 1");
  require(rows <= 1 || out.stride(0) >= columns, "out", "its rows overlap; takes a tensor that can be written");
  const Tensor a = packed(hidden), b = packed(weight);
  const WideProduct& loops = wide_product();
  const std::vector<uint32_t> padded = padded_words(data<bfloat16>(a), rows, inner);
  const uint32_t* words = inner % 2 ? padded.data() : data<uint32_t>(a);
  float* to = mutable_data<float>(out);
  const int64_t stride = out.stride(0);
  const int64_t panels = (columns + loops.columns - 1) / loops.columns;
  parallel_for(panels, 1, [&](int64_t first, int64_t last) {
    const std::unique_ptr<uint32_t[]> panel(new uint32_t[loops.panel_words(inner) + 1]);
    for (int64_t p = first; p < last; ++p) {
      const int64_t begin = p * loops.columns;
      const int64_t count = columns - begin < loops.columns ? columns - begin : loops.columns;
      loops.pack(data<bfloat16>(b) + begin * inner, inner, count, inner, panel.get());
      loops.multiply(words, rows, panel.get(), inner, to + begin, stride, count);
    }
  });
}

}  // namespace

// Computes out = hidden @ weight.T, with bfloat16 inputs and a float32 result. This op exists only on CPUs, where torch
// has no such product.
D3S_REGISTER("wide_product_(Tensor hidden, Tensor weight, Tensor(a!) out) -> ()", wide_product_)

}  // namespace d3s
