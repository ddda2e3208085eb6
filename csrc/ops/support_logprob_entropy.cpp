// Checks the arguments of support_rows and of the ops that compute the rows with a support.
#include "support_logprob_entropy.h"

#include "support_argument.h"

namespace d3s {
namespace {

// Returns two tensors: for each row, whether the dense ops have to compute it; and whether there are more such rows
// than the bound.
std::tuple<Tensor, Tensor> support_rows(const Tensor& values, const Tensor& ids, const Tensor& offsets,
                                        const OptionalInt& max_dense_rows, const OptionalTensor& mask) {
  require(values.dim() >= 1, "values", "got a 0-d tensor; takes [..., n]");
  const int64_t dims = values.dim() - 1;
  int64_t rows = 1;
  for (int64_t i = 0; i < dims; ++i) rows *= values.size(i);
  const int64_t bound = max_dense_rows.value_or(0);
  require(bound >= 0, "max_dense_rows", "got ", bound, "; takes at least 0");
  require_supports(ids, offsets, values, rows);
  const OptionalTensor unmasked = require_mask("mask", mask, values, dims);
  const Tensor cuts = packed(offsets);
  if (const OptionalTensor known = on_host(cuts)) require_offsets_of_ids(*known, rows, ids.numel());
  const Tensor dense = empty(leading_sizes(values, dims), ScalarType::Bool, values),
               exceeded = empty({1}, ScalarType::Bool, values);
  TorchDevice device(values);
  find_dense_rows(supports_of(ids, cuts, false), rows, data<bool>(unmasked), max_dense_rows.value_or(-1),
                  mutable_data<bool>(dense), mutable_data<bool>(exceeded), device);
  return {dense, exceeded};
}

float* output_of(const char* argument, const Tensor& output, const Tensor& logits, int64_t dims) {
  require(output.scalar_type() == ScalarType::Float && output.is_contiguous(), argument, "got ", dtype(output),
          "; takes contiguous float32");
  require_per_row(argument, output, logits, dims);
  return mutable_data<float>(output);
}

void support_logprob_entropy_(const Tensor& logprob, const Tensor& entropy, const Tensor& row_max,
                              const Tensor& log_sum, const Tensor& logits, const OptionalTensor& labels,
                              const SupportArgument& support, const TemperatureArgument& temperature,
                              const OptionalTensor& mask, const OptionalTensor& exceeded,
                              const OptionalInt& support_of) {
  SupportRowsArgument argument(logits, labels, support, temperature, mask, {}, support_of);
  argument.set_exceeded(exceeded, logits);
  const auto output = [&](const char* name, const Tensor& values) {
    return output_of(name, values, logits, argument.dims());
  };
  const RowOutputs outputs = {output("logprob", logprob), output("entropy", entropy), output("row_max", row_max),
                              output("log_sum", log_sum)};
  TorchDevice device(logits, support_of ? PublicOp::kLinearLogprobEntropy
                             : labels   ? PublicOp::kLogprobEntropy
                                        : PublicOp::kEntropy);
  support_statistics(argument.rows, outputs, device);
}

void support_softmax_state_(const Tensor& state, const Tensor& logits, const OptionalTensor& labels,
                            const SupportArgument& support, const Tile& tile, const TemperatureArgument& temperature,
                            const OptionalTensor& mask, const OptionalTensor& exceeded, const OptionalInt& support_of) {
  SupportRowsArgument argument(logits, labels, support, temperature, mask, tile, support_of);
  argument.set_exceeded(exceeded, logits);
  require_states_of(state, logits, argument.rows.layout.count);
  TorchDevice device(logits, PublicOp::kLinearLogprobEntropy);
  merge_supports(argument.rows, mutable_data<RowState>(state), device);
}

void support_logprob_entropy_backward_(const GradientArguments& given, const Tensor& grad_logits,
                                       const SupportArgument& support, const TemperatureArgument& temperature,
                                       const OptionalTensor& mask, const Tile& tile) {
  const Tensor& logits = given.logits;
  const SupportRowsArgument argument(logits, given.labels, support, temperature, mask, tile, {});
  const CheckedGradients gradients(given, argument.dims());
  require(grad_logits.scalar_type() == logits.scalar_type() && grad_logits.dim() == logits.dim() &&
              same_shape(grad_logits, logits, logits.dim()) && grad_logits.is_contiguous(),
          "grad_logits", "got shape ", shape(grad_logits), " of ", dtype(grad_logits),
          "; takes a contiguous tensor like the logits, ", shape(logits));
  require_same_device("grad_logits", grad_logits, logits);
  TorchDevice device(logits);
  add_support_gradients(argument.rows, gradients.rows,
                        {grad_logits.mutable_data_ptr(), argument.rows.type, rows_of("grad_logits", grad_logits)},
                        device);
}

}  // namespace

// Some rows have a support, the ids that could have been sampled. The results of such a row are over these ids.
// support_rows says which rows the ops of logprob_entropy.cpp have to compute, and whether there are more of these rows
// than max_dense_rows; the leading dimensions of `values` are the rows. The ops after support_rows write the other rows
// into the results of the ops of logprob_entropy.cpp. If `exceeded` is true, they write NaN for all rows.
// support_logprob_entropy_backward_ takes a gradient that is 0 in the rows with a support.
D3S_REGISTER(
    "support_rows(Tensor values, Tensor support_ids, Tensor support_offsets, SymInt? max_dense_rows=None, "
    "Tensor? mask=None) -> (Tensor dense, Tensor exceeded)",
    support_rows)
D3S_REGISTER(
    "support_logprob_entropy_(Tensor(a!) logprob, Tensor(b!) entropy, Tensor(c!) row_max, Tensor(d!) log_sum, "
    "Tensor logits, Tensor? labels, Tensor support_ids, Tensor support_offsets, bool include_label=False, "
    "float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None, Tensor? exceeded=None, "
    "SymInt? support_of=None) -> ()",
    support_logprob_entropy_)
D3S_REGISTER(
    "support_softmax_state_(Tensor(a!) state, Tensor logits, Tensor? labels, Tensor support_ids, "
    "Tensor support_offsets, bool include_label=False, SymInt? first_token=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, Tensor? mask=None, Tensor? exceeded=None, SymInt? support_of=None) -> ()",
    support_softmax_state_)
D3S_REGISTER(
    "support_logprob_entropy_backward_(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, Tensor(a!) grad_logits, Tensor support_ids, "
    "Tensor support_offsets, bool include_label=False, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None, SymInt? first_token=None) -> ()",
    support_logprob_entropy_backward_)

}  // namespace d3s
