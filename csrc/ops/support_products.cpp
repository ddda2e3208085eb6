// Checks the arguments of support_logits, support_hidden_grad_ and support_weight_grad_, and prepares their results.
#include "support_products.h"

#include "softcap_argument.h"
#include "support_argument.h"

namespace d3s {
namespace {

Matrix matrix_of(const char* argument, const Tensor& tensor) {
  require_float(argument, tensor);
  require(tensor.dim() == 2 && (tensor.size(1) <= 1 || tensor.stride(1) == 1), argument, "got shape ", shape(tensor),
          "; takes rows of stride 1, in two dimensions");
  return {tensor.const_data_ptr(), float_type(tensor), tensor.size(0), tensor.size(1), tensor.stride(0)};
}

Matrix output_of(const char* argument, const Tensor& tensor, const Matrix& like, int64_t rows, int64_t columns) {
  Matrix out = matrix_of(argument, tensor);
  require((out.type == like.type || out.type == FloatType::kFloat32) && out.rows == rows && out.columns == columns,
          argument, "got shape ", shape(tensor), " of ", dtype(tensor), "; takes [", rows, ", ", columns,
          "] in the dtype of the head or float32");
  require(out.rows <= 1 || out.stride >= out.columns, argument, "its rows overlap; takes a tensor that can be written");
  out.values = tensor.mutable_data_ptr();
  return out;
}

Tensor support_logits_op(const Tensor& hidden, const Tensor& weight, const Tensor& labels,
                         const SupportArgument& support, const OptionalTensor& bias, const SoftcapArgument& softcap,
                         const OptionalTensor& mask, const Tile& tile, ScalarType logits_dtype) {
  SupportHead head;
  head.hidden = matrix_of("hidden", hidden);
  head.weight = matrix_of("weight", weight);
  require(head.hidden.type == head.weight.type && head.hidden.columns == head.weight.columns, "weight",
          "got another dtype or width than hidden; takes the same");
  require_same_device("weight", weight, hidden);
  OptionalTensor bias_owner;
  if (bias) {
    require(bias->dim() == 1 && bias->size(0) == head.weight.rows && bias->scalar_type() == weight.scalar_type(),
            "bias", "got shape ", shape(*bias), " of ", dtype(*bias), "; takes [", head.weight.rows,
            "] in the dtype of weight");
    require_same_device("bias", *bias, hidden);
    bias_owner = packed(*bias);
    head.bias = {const_cast<void*>(bias_owner->const_data_ptr()), head.weight.type};
  }
  head.softcap = softcap.checked();
  head.logits_type = float_type(logits_dtype);
  // The logits do not exist yet, so labels, mask and supports are checked against the rows of `hidden`.
  const SupportRowsArgument argument(
      LogitsArgument(hidden, labels, TemperatureArgument(), mask, tile, head.weight.rows), hidden, support);
  head.rows = argument.rows;
  const Tensor out = empty({head.places()}, ScalarType::Float, hidden);
  TorchDevice device(hidden, PublicOp::kLinearLogprobEntropy);
  support_logits(head, mutable_data<float>(out), device);
  return out;
}

SupportGradient gradient_of(const Tensor& grad, const Tensor& rows, const Tensor& tokens, const Tensor& like,
                            int64_t row_count, int64_t token_count) {
  const auto checked = [&](const char* argument, const Tensor& tensor, ScalarType type) {
    require(
        tensor.dim() == 1 && tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == grad.numel(),
        argument, "got shape ", shape(tensor), " of ", dtype(tensor), "; takes contiguous ", dtype_name(type),
        " with one for each place");
    require_same_device(argument, tensor, like);
  };
  checked("grad", grad, ScalarType::Float);
  checked("rows", rows, ScalarType::Int);
  checked("tokens", tokens, ScalarType::Int);
  require(grad.numel() <= INT32_MAX, "grad", "got ", grad.numel(), " places; takes fewer than 2^31");
  const SupportGradient gradient{data<float>(grad), data<int32_t>(rows), data<int32_t>(tokens), grad.numel()};
  const OptionalTensor known_rows = on_host(rows), known_tokens = on_host(tokens);
  if (!known_rows || !known_tokens) return gradient;
  const SupportGradient known{nullptr, data<int32_t>(*known_rows), data<int32_t>(*known_tokens), grad.numel()};
  for (int64_t i = 0; i < known.places; ++i)
    require(known.rows[i] < 0 || known.has(i, row_count, token_count), "rows", "got ", known.rows[i], " and token ",
            known.tokens[i], " at ", i, "; takes a row in [0, ", row_count, ") and a token in [0, ", token_count,
            "), or a row below 0 for none");
  return gradient;
}

void support_hidden_grad_(const Tensor& grad, const Tensor& weight, const Tensor& rows, const Tensor& tokens,
                          const Tensor& given_offsets, const Tensor& undefined, const Tensor& out) {
  const Matrix w = matrix_of("weight", weight);
  const Tensor offsets = packed(given_offsets);
  require(offsets.dim() == 1 && offsets.numel() > 0 &&
              (offsets.scalar_type() == ScalarType::Int || offsets.scalar_type() == ScalarType::Long),
          "offsets", "got shape ", shape(offsets), " of ", dtype(offsets), "; takes int32 or int64 [rows + 1]");
  require_same_device("offsets", offsets, weight);
  const int64_t count = offsets.numel() - 1;
  const SupportGradient gradient = gradient_of(grad, rows, tokens, weight, count, w.rows);
  require(gradient.places >= count, "grad", "got ", gradient.places,
          " places; takes one for each row after the others, ", count);
  require(undefined.dim() == 1 && undefined.numel() == count && undefined.scalar_type() == ScalarType::Bool &&
              undefined.is_contiguous(),
          "undefined", "got shape ", shape(undefined), " of ", dtype(undefined), "; takes contiguous bool [rows], ",
          count);
  require_same_device("undefined", undefined, weight);
  Segments supports;
  supports.count = count;
  supports.limit = gradient.places - count;
  if (offsets.scalar_type() == ScalarType::Int)
    supports.offsets32 = data<int32_t>(offsets);
  else
    supports.offsets64 = data<int64_t>(offsets);
  if (const OptionalTensor known = on_host(offsets)) require_offsets_of_ids(*known, count, supports.limit);
  require_same_device("out", out, weight);
  const Matrix to = output_of("out", out, w, count, w.columns);
  TorchDevice device(weight);
  sum_for_rows(gradient, w, supports, data<bool>(undefined), to, device);
}

void support_weight_grad_(const Tensor& grad, const Tensor& hidden, const Tensor& rows, const Tensor& tokens,
                          const Tensor& out, const OptionalTensor& bias_out) {
  const Matrix h = matrix_of("hidden", hidden), to = output_of("out", out, h, out.size(0), h.columns);
  require_same_device("out", out, hidden);
  Vector bias;
  if (bias_out) {
    require_float("bias_out", *bias_out);
    require(bias_out->dim() == 1 && bias_out->size(0) == to.rows && bias_out->is_contiguous(), "bias_out", "got shape ",
            shape(*bias_out), "; takes contiguous [", to.rows, "]");
    require_same_device("bias_out", *bias_out, hidden);
    bias = {bias_out->mutable_data_ptr(), float_type(*bias_out)};
  }
  const SupportGradient gradient = gradient_of(grad, rows, tokens, hidden, h.rows, to.rows);
  TorchDevice device(hidden);
  add_for_tokens(gradient, h, to, bias, device);
}

}  // namespace

// For an LM head, support_logits computes only the logits of the supports. It returns a list: first one logit for each
// id, then one logit for the label of each row. If such a list is passed to the ops of support_logprob_entropy.cpp,
// `support_of` is the number of ids in the vocabulary or tile. From the lists that support_logits_backward returns,
// support_hidden_grad_ computes the gradient of the hidden states, and support_weight_grad_ the gradients of weight and
// bias.
D3S_REGISTER(
    "support_logits(Tensor hidden, Tensor weight, Tensor labels, Tensor support_ids, Tensor support_offsets, "
    "bool include_label=False, Tensor? bias=None, float? logit_softcap=None, Tensor? mask=None, "
    "SymInt? first_token=None, ScalarType logits_dtype=float) -> Tensor",
    support_logits_op)
D3S_REGISTER(
    "support_hidden_grad_(Tensor grad, Tensor weight, Tensor rows, Tensor tokens, Tensor offsets, Tensor undefined, "
    "Tensor(a!) out) -> ()",
    support_hidden_grad_)
D3S_REGISTER(
    "support_weight_grad_(Tensor grad, Tensor hidden, Tensor rows, Tensor tokens, Tensor(a!) out, "
    "Tensor(b!)? bias_out=None) -> ()",
    support_weight_grad_)

}  // namespace d3s
