// The arguments of the ops over logits, and their checks. Values on a GPU are checked only with D3S_KERNELS_CHECK=1.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "logprob_entropy.h"

namespace d3s {

// If `tensor` is not set, `number` is the temperature of all rows. If `tensor` is set, it is used instead of `number`,
// and is 0-d or has one temperature for each row.
struct TemperatureArgument {
  double number = 1.0;
  OptionalTensor tensor;
};

// Tells which ids the columns of logits have: consecutive ids from `first_token` on. If `first_token` is not set, the
// columns are the whole vocabulary.
struct Tile {
  OptionalInt first_token;
};

// The logits, the gradients of the results, and the other tensors from which the gradient of the logits is computed.
struct GradientArguments {
  OptionalTensor grad_logprob, grad_entropy;
  Tensor logits;
  OptionalTensor labels;
  Tensor entropy, row_max, log_sum;
};

template <>
struct Parameter<TemperatureArgument> : Together<TemperatureArgument, double, OptionalTensor> {};
template <>
struct Parameter<Tile> : Together<Tile, OptionalInt> {};
template <>
struct Parameter<GradientArguments>
    : Together<GradientArguments, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor> {};

// Checks temperatures. The result points into a tensor that `owner` keeps alive.
inline Temperatures temperatures_of(const TemperatureArgument& temperature, const Tensor& like, int64_t row_dims,
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

inline Labels labels_of(const OptionalTensor& labels) {
  if (!labels) return {};
  if (labels->scalar_type() == ScalarType::Long) return {data<int64_t>(*labels), nullptr};
  return {nullptr, data<int32_t>(*labels)};
}

// The rows of logits with their labels, temperatures and mask, checked. The object owns the tensors that `rows` points
// into, except the logits.
class LogitsArgument {
 public:
  // `columns` is the number of ids in the vocabulary or tile, if this is not the last dimension of `logits`.
  LogitsArgument(const Tensor& logits, const OptionalTensor& labels, const TemperatureArgument& temperature,
                 const OptionalTensor& mask = {}, const Tile& tile = {}, const OptionalInt& columns = {})
      : dims(logits.dim() - 1) {
    require_float("logits", logits);
    rows.layout = rows_of("logits", logits);
    if (columns) rows.layout.columns = *columns;
    rows.logits = logits.const_data_ptr();
    rows.type = float_type(logits);
    rows.temperatures = temperatures_of(temperature, logits, dims, temperatures_);
    rows.vocabulary = rows.layout.columns;
    if (tile.first_token) {
      require(*tile.first_token >= 0, "first_token", "got ", *tile.first_token, "; takes at least 0");
      rows.first_token = *tile.first_token;
      rows.vocabulary = INT64_MAX;  // unknown
    }
    if (labels) take_labels(*labels, logits);
    this->mask = require_mask("mask", mask, logits, dims);
    rows.mask = data<bool>(this->mask);
  }

  int64_t dims;  // the number of leading dimensions of the logits; each index into these dimensions is a row
  LogitsRows rows;
  OptionalTensor labels, mask;  // contiguous

 private:
  void take_labels(const Tensor& given, const Tensor& logits) {
    const auto type = given.scalar_type();
    require(type == ScalarType::Long || type == ScalarType::Int, "labels", "got dtype ", dtype(given),
            "; takes int64 or int32");
    labels = require_per_row("labels", given, logits, dims);
    rows.labels = labels_of(labels);
    const OptionalTensor known = on_host(*labels);
    if (!known) return;
    const Labels values = labels_of(known);
    const std::string end = rows.vocabulary < INT64_MAX ? std::to_string(rows.vocabulary) : "V";
    for (int64_t row = 0; row < rows.layout.count; ++row)
      require(!values.bad(row, rows.vocabulary), "labels", "got ", values[row], " at row ", row,
              "; takes -100 (no target) or a token in [0, ", end, ")");
  }

  OptionalTensor temperatures_;
};

// The tensors from which the gradient of each row is computed. The object owns the tensors that `rows` points into.
class CheckedGradients {
 public:
  CheckedGradients(const GradientArguments& given, int64_t dims) {
    const auto checked = [&](const char* argument, const Tensor& tensor) {
      require(tensor.scalar_type() == ScalarType::Float, argument, "got dtype ", dtype(tensor), "; takes float32");
      owners_.push_back(require_per_row(argument, tensor, given.logits, dims));
      return data<float>(owners_.back());
    };
    if (given.grad_logprob) rows.g_logprob = checked("grad_logprob", *given.grad_logprob);
    if (given.grad_entropy) rows.g_entropy = checked("grad_entropy", *given.grad_entropy);
    rows.entropy = checked("entropy", given.entropy);
    rows.row_max = checked("row_max", given.row_max);
    rows.log_sum = checked("log_sum", given.log_sum);
  }

  RowGradients rows;

 private:
  std::vector<Tensor> owners_;
};

// Requires a state of shape [rows, 4]. If `shards` is true, shape [shards, rows, 4] is allowed too.
inline void require_state(const Tensor& state, bool shards) {
  constexpr int64_t kFloats = sizeof(RowState) / sizeof(float);
  const bool several = shards && state.dim() == 3;
  require(state.scalar_type() == ScalarType::Float && (several || state.dim() == 2) &&
              state.size(state.dim() - 1) == kFloats && state.is_contiguous() && !(several && state.size(0) == 0),
          "state", "got shape ", shape(state), " of ", dtype(state), "; takes contiguous float32 [rows, 4]",
          shards ? " or [shards, rows, 4]" : "");
}

// Requires one state for each row of the logits.
inline void require_states_of(const Tensor& state, const Tensor& logits, int64_t rows) {
  require_state(state, false);
  require(rows == state.size(0), "logits", "got shape ", shape(logits), "; takes [..., tile] with the rows of state, ",
          shape(state));
  require_same_device("state", state, logits);
}

}  // namespace d3s
