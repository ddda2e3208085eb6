// Checks the arguments of logprob_entropy, of its backward op, and of the ops that work tile by tile. Allocates the
// results.
#include "arguments.h"

namespace d3s {

Temperatures temperatures_of(const TemperatureArgument& temperature, const Tensor& like, int64_t row_dims,
                             OptionalTensor& owner) {
  const OptionalTensor& tensor = temperature.tensor;
  const auto good = [](double t) { return t >= Temperatures::kLowest && t <= Temperatures::kHighest; };
  Temperatures temperatures;
  if (!tensor) {
    const double number = temperature.number;
    require(good(number), "temperature", "got ", number, "; takes a number above 0, in [1e-15, 1e15]");
    temperatures.one = static_cast<float>(number);
    return temperatures;
  }
  require(tensor->scalar_type() == ScalarType::Float, "temperature", "got dtype ", dtype(*tensor), "; takes float32");
  require_same_device("temperature", *tensor, like);
  owner = tensor->dim() == 0 ? *tensor : require_per_row("temperature", *tensor, like, row_dims);
  temperatures.values = data<float>(*owner);
  temperatures.per_row = tensor->dim() > 0;
  if (const OptionalTensor known = on_host(*owner)) {
    const float* values = data<float>(*known);
    const int64_t n = known->numel();
    for (int64_t i = 0; i < n; ++i)
      require(good(values[i]), "temperature", "got ", values[i], " at row ", i,
              "; takes numbers above 0, in [1e-15, 1e15]");
  }
  return temperatures;
}

LogitsArgument::LogitsArgument(const Tensor& logits, const TemperatureArgument& temperature) : logits_(logits) {
  require_float("logits", logits);
  rows.layout = rows_of("logits", logits);
  rows.vocabulary = rows.layout.columns;
  rows.logits = logits.const_data_ptr();
  rows.type = float_type(logits);
  dims = logits.dim() - 1;
  rows.temperatures = temperatures_of(temperature, logits, dims, temperatures_);
}

namespace {

Labels labels_of(const OptionalTensor& labels) {
  if (!labels) return {};
  if (labels->scalar_type() == ScalarType::Long) return {data<int64_t>(*labels), nullptr};
  return {nullptr, data<int32_t>(*labels)};
}

}  // namespace

void LogitsArgument::set_tile(const Tile& tile) {
  if (!tile.first_token) return;
  require(*tile.first_token >= 0, "first_token", "got ", *tile.first_token, "; takes at least 0");
  rows.first_token = *tile.first_token;
  rows.vocabulary = INT64_MAX;  // unknown
}

void LogitsArgument::set_labels(const OptionalTensor& labels) {
  if (!labels) return;
  const auto type = labels->scalar_type();
  require(type == ScalarType::Long || type == ScalarType::Int, "labels", "got dtype ", dtype(*labels),
          "; takes int64 or int32");
  labels_ = require_per_row("labels", *labels, logits_, dims);
  rows.labels = labels_of(labels_);
  if (const OptionalTensor known = on_host(*labels_)) {
    const Labels values = labels_of(known);
    const std::string end = rows.vocabulary < INT64_MAX ? std::to_string(rows.vocabulary) : "V";
    for (int64_t row = 0; row < rows.layout.count; ++row)
      require(!values.bad(row, rows.vocabulary), "labels", "got ", values[row], " at row ", row,
              "; takes -100 (no target) or a token in [0, ", end, ")");
  }
}

void LogitsArgument::set_mask(const OptionalTensor& mask) {
  mask_ = require_mask("mask", mask, logits_, dims);
  rows.mask = data<bool>(mask_);
}

void LogitsArgument::set_kept_alone(const SamplingMask& given, int64_t tokens) {
  require(given.ids && given.offsets, "kept_of", "got ", tokens, " without a sampling mask; takes it with one");
  require(tokens >= 0, "kept_of", "got ", tokens, "; takes at least 0");
  const int64_t count = rows.layout.count, places = given.ids->numel() + count;
  require(rows.type == FloatType::kFloat32 && dims == 1 && logits_.size(1) == places, "logits", "got shape ",
          shape(logits_), " of ", dtype(logits_), "; takes float32 [rows, places], all ", places, " for each row");
  rows.kept_alone = true;
  rows.layout.columns = rows.vocabulary = tokens;
}

void LogitsArgument::set_spans(const SamplingMask& given) {
  require_sampling_mask(given, logits_, rows.layout.count);
  if (!given.ids) return;
  tokens_ = packed(*given.ids);
  offsets_ = packed(*given.offsets);
  rows.spans = spans_of(given, *tokens_, *offsets_);
  const OptionalTensor known_tokens = on_host(*tokens_), known_offsets = on_host(*offsets_);
  if (!known_tokens || !known_offsets) return;
  const OptionalTensor labels = labels_ ? on_host(*labels_) : labels_, mask = mask_ ? on_host(*mask_) : mask_;
  require_offsets(*known_offsets, rows.layout.count, known_tokens->numel());
  require_spans(spans_of(given, *known_tokens, *known_offsets), labels_of(labels), data<bool>(mask), rows.layout.count,
                rows.vocabulary);
}

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
                            const OptionalTensor& mask, const SamplingMask& sampling_mask, const OptionalInt& kept_of) {
  LogitsArgument argument(logits, temperature);
  if (kept_of) argument.set_kept_alone(sampling_mask, *kept_of);
  argument.set_labels(labels);
  argument.set_mask(mask);
  argument.set_spans(sampling_mask);
  FourTensors outputs = new_outputs(leading_sizes(logits, argument.dims), logits);
  TorchDevice device(logits, kept_of  ? PublicOp::kLinearLogprobEntropy
                             : labels ? PublicOp::kLogprobEntropy
                                      : PublicOp::kEntropy);
  row_statistics(argument.rows, pointers(outputs), {}, device);
  return outputs;
}

Tensor logprob_entropy_backward(const GradientArguments& given, const TemperatureArgument& temperature,
                                const OptionalTensor& mask, const Tile& tile, const SamplingMask& sampling_mask) {
  const Tensor& logits = given.logits;
  LogitsArgument argument(logits, temperature);
  argument.set_tile(tile);
  argument.set_labels(given.labels);
  argument.set_mask(mask);
  argument.set_spans(sampling_mask);
  const CheckedGradients gradients(given, argument.dims);
  TorchDevice device(logits);
  const Tensor out = empty(leading_sizes(logits, logits.dim()), logits.scalar_type(), logits);
  row_gradients(argument.rows, gradients.rows, {out.mutable_data_ptr(), argument.rows.type, rows_of("logits", out)},
                device);
  return out;
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
  LogitsArgument argument(logits, temperature);
  argument.set_tile(tile);
  for (int64_t i = 0; i < argument.dims; ++i)
    require(logits.size(i) <= 1 || logits.stride(i) >= logits.size(argument.dims), "logits",
            "its rows overlap; takes a tensor that can be written in place");
  argument.set_labels(given.labels);
  const CheckedGradients gradients(given, argument.dims);
  const GradientOutput out = gradient_in_place(logits, argument.rows, grad_dtype);
  TorchDevice device(logits);
  row_gradients(argument.rows, gradients.rows, out, device);
}

// Requires a state of shape [rows, 4]. If `shards` is true, shape [shards, rows, 4] is allowed too.
void require_state(const Tensor& state, bool shards) {
  constexpr int64_t kFloats = sizeof(RowState) / sizeof(float);
  const bool several = shards && state.dim() == 3;
  require(state.scalar_type() == ScalarType::Float && (several || state.dim() == 2) &&
              state.size(state.dim() - 1) == kFloats && state.is_contiguous() && !(several && state.size(0) == 0),
          "state", "got shape ", shape(state), " of ", dtype(state), "; takes contiguous float32 [rows, 4]",
          shards ? " or [shards, rows, 4]" : "");
}

void softmax_state_(const Tensor& state, const Tensor& logits, const OptionalTensor& labels, const Tile& tile,
                    const TemperatureArgument& temperature, const OptionalTensor& mask,
                    const SamplingMask& sampling_mask, const OptionalInt& kept_of) {
  LogitsArgument argument(logits, temperature);
  if (kept_of) argument.set_kept_alone(sampling_mask, *kept_of);
  argument.set_tile(tile);
  require_state(state, false);
  require(argument.rows.layout.count == state.size(0), "logits", "got shape ", shape(logits),
          "; takes [..., tile] with the rows of state, ", shape(state));
  require_same_device("state", state, logits);
  argument.set_labels(labels);
  argument.set_mask(mask);
  argument.set_spans(sampling_mask);
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

D3S_REGISTER("logprob_entropy", logprob_entropy)
D3S_REGISTER("logprob_entropy_backward", logprob_entropy_backward)
D3S_REGISTER("logprob_entropy_backward_", logprob_entropy_backward_)
D3S_REGISTER("softmax_state_", softmax_state_)
D3S_REGISTER("softmax_state_finish", softmax_state_finish)

}  // namespace d3s
