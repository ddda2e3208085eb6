// Checks the arguments of logprob_entropy, of its backward op, and of the ops that work tile by tile. Allocates the
// results.
#include "logits_argument.h"

namespace d3s {

namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Allocates logprob, entropy, row_max and log_sum, each with one float32 value for each row.
FourTensors new_outputs(const std::vector<int64_t>& sizes, const Tensor& like) {
  const auto output = [&] { return empty(sizes, ScalarType::Float, like); };
  return {output(), output(), output(), output()};
}

RowOutputs pointers(const FourTensors& outputs) {
  return {mutable_data<float>(std::get<0>(outputs)), mutable_data<float>(std::get<1>(outputs)),
          mutable_data<float>(std::get<2>(outputs)), mutable_data<float>(std::get<3>(outputs))};
}

FourTensors logprob_entropy(const Tensor& logits, const OptionalTensor& labels, const TemperatureArgument& temperature,
                            const OptionalTensor& mask) {
  const LogitsArgument argument(logits, labels, temperature, mask);
  FourTensors outputs = new_outputs(leading_sizes(logits, argument.dims), logits);
  TorchDevice device(logits, labels ? PublicOp::kLogprobEntropy : PublicOp::kEntropy);
  row_statistics(argument.rows, pointers(outputs), {}, device);
  return outputs;
}

std::tuple<Tensor, Tensor> logprob_entropy_no_grad(const Tensor& logits, const OptionalTensor& labels,
                                                   const TemperatureArgument& temperature, const OptionalTensor& mask) {
  const LogitsArgument argument(logits, labels, temperature, mask);
  const auto sizes = leading_sizes(logits, argument.dims);
  const Tensor logprob = empty(sizes, ScalarType::Float, logits), entropy = empty(sizes, ScalarType::Float, logits);
  TorchDevice device(logits, labels ? PublicOp::kLogprobEntropy : PublicOp::kEntropy);
  row_statistics(argument.rows, {mutable_data<float>(logprob), mutable_data<float>(entropy)}, {}, device);
  return {logprob, entropy};
}

Tensor logprob_entropy_backward(const GradientArguments& given, const TemperatureArgument& temperature,
                                const OptionalTensor& mask, const Tile& tile) {
  const Tensor& logits = given.logits;
  const LogitsArgument argument(logits, given.labels, temperature, mask, tile);
  const CheckedGradients gradients(given, argument.dims);
  TorchDevice device(logits);
  const Tensor out = empty(leading_sizes(logits, logits.dim()), logits.scalar_type(), logits);
  row_gradients(argument.rows, gradients.rows, {out.mutable_data_ptr(), argument.rows.type, rows_of("logits", out)},
                device);
  return out;
}

// Requires rows that do not overlap.
void require_apart(const char* argument, const Tensor& written) {
  const int64_t dims = written.dim() - 1;
  for (int64_t i = 0; i < dims; ++i)
    require(written.size(i) <= 1 || written.stride(i) >= written.size(dims), argument,
            "its rows overlap; takes a tensor that can be written in place");
}

// Returns where the in-place op writes the gradient: over the logits. If the logits are float32 and the gradient is in
// half precision, the gradient fills only the front half of each row.
GradientOutput gradient_in_place(const Tensor& logits, const LogitsRows& rows,
                                 const std::optional<ScalarType>& grad_dtype) {
  GradientOutput out{logits.mutable_data_ptr(), rows.type, rows.layout};
  if (!grad_dtype || *grad_dtype == logits.scalar_type()) return out;
  require(rows.type == FloatType::kFloat32 && (*grad_dtype == ScalarType::BFloat16 || *grad_dtype == ScalarType::Half),
          "grad_dtype", "got ", dtype_name(*grad_dtype),
          "; takes the dtype of the logits, or bfloat16 or float16 for float32 logits");
  out.type = float_type(*grad_dtype);
  for (int d = 0; d < out.layout.dims; ++d) out.layout.strides[d] *= 2;
  return out;
}

void logprob_entropy_backward_(const GradientArguments& given, const Tile& tile, const TemperatureArgument& temperature,
                               const std::optional<ScalarType>& grad_dtype) {
  const Tensor& logits = given.logits;
  const LogitsArgument argument(logits, given.labels, temperature, {}, tile);
  require_apart("logits", logits);
  const CheckedGradients gradients(given, argument.dims);
  const GradientOutput out = gradient_in_place(logits, argument.rows, grad_dtype);
  TorchDevice device(logits);
  row_gradients(argument.rows, gradients.rows, out, device);
}

// Returns whether the memory between the first and the last elements of two tensors overlaps.
bool may_share_memory(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); };
  const auto end = [&](const Tensor& tensor) {
    int64_t elements = 1;
    for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
    return begin(tensor) + elements * (tensor.scalar_type() == ScalarType::Float ? 4 : 2);
  };
  return a.numel() > 0 && b.numel() > 0 && begin(a) < end(b) && begin(b) < end(a);
}

// Checks where the op writes the gradient of packed rows.
GradientOutput gradient_of_packed(const Tensor& gradient, const Tensor& logits) {
  require(logits.dim() == 2, "logits", "got shape ", shape(logits), "; takes [rows, V]");
  require(gradient.dim() == 2 && gradient.size(1) == logits.size(1), "grad_logits", "got shape ", shape(gradient),
          "; takes [packed rows, V] for logits of shape ", shape(logits));
  const ScalarType type = gradient.scalar_type();
  require(type == logits.scalar_type() || (logits.scalar_type() == ScalarType::Float && is_float(type)), "grad_logits",
          "got dtype ", dtype(gradient), "; takes the dtype of the logits, or bfloat16 or float16 for float32 logits");
  require_same_device("grad_logits", gradient, logits);
  require_apart("grad_logits", gradient);
  require(!may_share_memory(gradient, logits), "grad_logits", "shares memory with the logits; takes memory of its own");
  return {gradient.mutable_data_ptr(), float_type(type), rows_of("grad_logits", gradient)};
}

// Checks which row of the logits each packed row has. The result points into `owner`.
PackedRows packed_rows(const Tensor& rows, const Tensor& gradient, int64_t count, OptionalTensor& owner) {
  require(rows.scalar_type() == ScalarType::Long, "rows", "got dtype ", dtype(rows), "; takes int64");
  owner = require_per_row("rows", rows, gradient, 1);
  if (const OptionalTensor known = on_host(*owner)) {
    const PackedRows values{data<int64_t>(*known), count};
    for (int64_t i = 0; i < rows.numel(); ++i)
      require(!values.bad(i), "rows", "got ", values.rows[i], " at ", i, "; takes a row of the logits, in [0, ", count,
              ")");
  }
  return {data<int64_t>(*owner), count};
}

void logprob_entropy_backward_rows_(const GradientArguments& given, const Tensor& rows, const Tensor& grad_logits,
                                    const Tile& tile, const TemperatureArgument& temperature) {
  const Tensor& logits = given.logits;
  require_float("logits", logits);
  const GradientOutput out = gradient_of_packed(grad_logits, logits);
  OptionalTensor owner;
  const PackedRows packed = packed_rows(rows, grad_logits, logits.size(0), owner);
  // The other arguments have one value for each packed row, and so for each row of the gradient.
  LogitsArgument argument(grad_logits, given.labels, temperature, {}, tile);
  argument.rows.logits = logits.const_data_ptr();
  argument.rows.type = float_type(logits);
  argument.rows.layout = rows_of("logits", logits);
  GradientArguments of_packed = given;
  of_packed.logits = grad_logits;
  const CheckedGradients gradients(of_packed, argument.dims);
  TorchDevice device(logits);
  packed_row_gradients(argument.rows, packed, gradients.rows, out, device);
}

void softmax_state_(const Tensor& state, const Tensor& logits, const OptionalTensor& labels, const Tile& tile,
                    const TemperatureArgument& temperature, const OptionalTensor& mask) {
  const LogitsArgument argument(logits, labels, temperature, mask, tile);
  require_states_of(state, logits, argument.rows.layout.count);
  TorchDevice device(logits, PublicOp::kLinearLogprobEntropy);
  merge_tile(argument.rows, mutable_data<RowState>(state), device);
}

FourTensors softmax_state_finish(const Tensor& state, const TemperatureArgument& temperature) {
  require_state(state, true);
  const int64_t count = state.size(state.dim() - 2);
  FourTensors outputs = new_outputs({count}, state);
  OptionalTensor owner;
  const Temperatures temperatures = temperatures_of(temperature, std::get<0>(outputs), 1, owner);
  TorchDevice device(state, PublicOp::kLinearLogprobEntropy);
  finish_states({data<RowState>(state), state.dim() == 3 ? state.size(0) : 1, count}, temperatures, pointers(outputs),
                device);
  return outputs;
}

}  // namespace

// Over all ids of the vocabulary: ops that compute values for each row of logits [..., V].
D3S_REGISTER(
    "logprob_entropy(Tensor logits, Tensor? labels, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None) -> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    logprob_entropy)
// The same without the results that only the gradient needs.
D3S_REGISTER(
    "logprob_entropy_no_grad(Tensor logits, Tensor? labels, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None) -> (Tensor logprob, Tensor entropy)",
    logprob_entropy_no_grad)
D3S_REGISTER(
    "logprob_entropy_backward(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, float temperature=1.0, Tensor? temperature_tensor=None, "
    "Tensor? mask=None, SymInt? first_token=None) -> (Tensor grad_logits)",
    logprob_entropy_backward)
// The same ops for a tile of the vocabulary. The first column of the tile is id first_token; without first_token,
// the columns are the whole vocabulary. softmax_state_ merges the tile into states [rows, 4]. softmax_state_finish also
// takes the states [shards, rows, 4] of vocabulary shards, and merges the shards in order. logprob_entropy_backward_
// overwrites the tile with the gradient of the tile. If grad_dtype is half as wide as the dtype of the logits, the
// gradient fills the front half of each row. logprob_entropy_backward writes the gradient to a new tensor instead.
D3S_REGISTER(
    "logprob_entropy_backward_(Tensor? grad_logprob, Tensor? grad_entropy, Tensor(a!) logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, SymInt? first_token=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, ScalarType? grad_dtype=None) -> ()",
    logprob_entropy_backward_)
// logprob_entropy_backward_rows_ reads the logits [m, V] of the rows `rows`, for example of those rows of a forward
// that have a gradient. It writes their gradient to grad_logits [n, V], which must have memory of its own. All values
// besides the logits are those of the n rows. The result has the bits of logprob_entropy_backward_ for logits[rows].
D3S_REGISTER(
    "logprob_entropy_backward_rows_(Tensor? grad_logprob, Tensor? grad_entropy, Tensor logits, Tensor? labels, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, Tensor rows, Tensor(a!) grad_logits, SymInt? first_token=None, "
    "float temperature=1.0, Tensor? temperature_tensor=None) -> ()",
    logprob_entropy_backward_rows_)
D3S_REGISTER(
    "softmax_state_(Tensor(a!) state, Tensor logits, Tensor? labels, SymInt? first_token=None, float temperature=1.0, "
    "Tensor? temperature_tensor=None, Tensor? mask=None) -> ()",
    softmax_state_)
D3S_REGISTER(
    "softmax_state_finish(Tensor state, float temperature=1.0, Tensor? temperature_tensor=None) "
    "-> (Tensor logprob, Tensor entropy, Tensor row_max, Tensor log_sum)",
    softmax_state_finish)

}  // namespace d3s
