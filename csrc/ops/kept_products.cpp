// Products of the kept rows of an LM head's weight: their arguments and results, on every device.
#include "kept_products.h"

#include "arguments.h"
#include "checked_spans.h"

namespace d3s {
namespace {

Matrix matrix_of(const char* argument, const Tensor& tensor) {
  require_float(argument, tensor);
  require(tensor.dim() == 2 && (tensor.size(1) <= 1 || tensor.stride(1) == 1), argument, "got shape ", shape(tensor),
          "; takes rows of stride 1, in two dimensions");
  return {tensor.const_data_ptr(), float_type(tensor), tensor.size(0), tensor.size(1), tensor.stride(0)};
}

const int32_t* ids_of(const char* argument, const Tensor& tensor, const Tensor& like) {
  require(tensor.dim() == 1 && tensor.scalar_type() == ScalarType::Int && tensor.is_contiguous(), argument,
          "got shape ", shape(tensor), " of ", dtype(tensor), "; takes contiguous int32 [n]");
  require_same_device(argument, tensor, like);
  return data<int32_t>(tensor);
}

Pairs pairs_of(const Tensor& rows, const Tensor& tokens, const Tensor& like, int64_t hidden_rows, int64_t vocabulary) {
  const Pairs pairs{ids_of("rows", rows, like), ids_of("tokens", tokens, like), rows.numel()};
  require(tokens.numel() == pairs.count, "tokens", "got ", tokens.numel(), "; takes one for each pair, ", pairs.count);
  const OptionalTensor known_rows = on_host(rows), known_tokens = on_host(tokens);
  if (!known_rows || !known_tokens) return pairs;
  const Pairs known{data<int32_t>(*known_rows), data<int32_t>(*known_tokens), pairs.count};
  for (int64_t i = 0; i < known.count; ++i) {
    require(known.rows[i] >= -1 && known.rows[i] < hidden_rows, "rows", "got ", known.rows[i], " at ", i,
            "; takes -1 or a row in [0, ", hidden_rows, ")");
    require(known.rows[i] < 0 || known.has(i, hidden_rows, vocabulary), "tokens", "got ", known.tokens[i], " at ", i,
            "; takes tokens in [0, ", vocabulary, ")");
  }
  return pairs;
}

const float* grad_of(const Tensor& grad, int64_t pairs, const Tensor& like) {
  require(grad.dim() == 1 && grad.scalar_type() == ScalarType::Float && grad.numel() == pairs && grad.is_contiguous(),
          "grad", "got shape ", shape(grad), " of ", dtype(grad), "; takes contiguous float32, one for each pair, ",
          pairs);
  require_same_device("grad", grad, like);
  return data<float>(grad);
}

// The pairs of each row. Those after the last offset belong to no row.
Segments rows_of_pairs(const Tensor& offsets, const Tensor& tokens) {
  require(offsets.dim() == 1 && offsets.numel() > 0 && offsets.is_contiguous() &&
              (offsets.scalar_type() == ScalarType::Int || offsets.scalar_type() == ScalarType::Long),
          "offsets", "got shape ", shape(offsets), " of ", dtype(offsets),
          "; takes contiguous int32 or int64 [rows + 1]");
  require_same_device("offsets", offsets, tokens);
  Segments segments;
  segments.count = offsets.numel() - 1;
  segments.limit = tokens.numel();
  if (offsets.scalar_type() == ScalarType::Int)
    segments.offsets32 = data<int32_t>(offsets);
  else
    segments.offsets64 = data<int64_t>(offsets);
  if (const OptionalTensor known = on_host(offsets)) require_offsets(*known, segments.count, segments.limit);
  return segments;
}

void require_alike(const Matrix& hidden, const Matrix& weight) {
  require(hidden.type == weight.type && hidden.columns == weight.columns, "weight",
          "got another dtype or width than hidden; takes the same");
}

Tensor kept_logits(const Tensor& hidden, const Tensor& weight, const Tensor& rows, const Tensor& tokens) {
  const Matrix h = matrix_of("hidden", hidden), w = matrix_of("weight", weight);
  require_alike(h, w);
  require_same_device("weight", weight, hidden);
  const Pairs pairs = pairs_of(rows, tokens, hidden, h.rows, w.rows);
  const Tensor out = empty({pairs.count}, ScalarType::Float, hidden);
  TorchDevice device(hidden);
  pair_products(h, w, pairs, mutable_data<float>(out), device);
  return out;
}

Tensor kept_hidden_grad(const Tensor& grad, const Tensor& weight, const Tensor& tokens, const Tensor& offsets) {
  const Matrix w = matrix_of("weight", weight);
  const int32_t* ids = ids_of("tokens", tokens, weight);
  const float* g = grad_of(grad, tokens.numel(), weight);
  const Segments segments = rows_of_pairs(offsets, tokens);
  if (const OptionalTensor known = on_host(tokens))
    for (int64_t i = 0; i < known->numel(); ++i)
      require(data<int32_t>(*known)[i] < w.rows, "tokens", "got ", data<int32_t>(*known)[i], " at ", i,
              "; takes tokens in [0, ", w.rows, "), and numbers below 0 for none");
  const Tensor out = empty({segments.count, w.columns}, ScalarType::Float, weight);
  TorchDevice device(weight);
  sum_for_rows(g, w, ids, segments, mutable_data<float>(out), device);
  return out;
}

void kept_weight_grad_(const Tensor& grad, const Tensor& hidden, const Tensor& rows, const Tensor& tokens,
                       const Tensor& out) {
  const Matrix h = matrix_of("hidden", hidden), to = matrix_of("out", out);
  require((to.type == h.type || to.type == FloatType::kFloat32) && to.columns == h.columns, "out", "got shape ",
          shape(out), " of ", dtype(out), "; takes [V, ", h.columns, "] in the dtype of hidden or float32");
  require(to.rows <= 1 || to.stride >= to.columns, "out", "its rows overlap; takes a tensor that can be written");
  require_same_device("out", out, hidden);
  const Pairs pairs = pairs_of(rows, tokens, hidden, h.rows, to.rows);
  const float* g = grad_of(grad, pairs.count, hidden);
  TorchDevice device(hidden);
  add_for_tokens(g, h, pairs, {out.mutable_data_ptr(), to.type, to.rows, to.columns, to.stride}, device);
}

}  // namespace

D3S_REGISTER(m) {
  m.impl("kept_logits", TORCH_BOX(&kept_logits));
  m.impl("kept_hidden_grad", TORCH_BOX(&kept_hidden_grad));
  m.impl("kept_weight_grad_", TORCH_BOX(&kept_weight_grad_));
}

}  // namespace d3s
