// Checks the arguments of the ops that compute log-probabilities at given ids. Allocates the results.
#include "token_logprobs.h"

#include "logits_argument.h"

namespace d3s {
namespace {

// Checks given ids, [rows, K]. The result points into `owner`.
TokenIds token_ids_of(const Tensor& ids, int64_t rows, const LogitsRows* of, const Tensor& like,
                      OptionalTensor& owner) {
  const auto type = ids.scalar_type();
  require(type == ScalarType::Int || type == ScalarType::Long, "token_ids", "got dtype ", dtype(ids),
          "; takes int32 or int64");
  require(ids.dim() == 2 && ids.size(0) == rows, "token_ids", "got shape ", shape(ids), "; takes [", rows,
          ", K], K ids for each row");
  require_same_device("token_ids", ids, like);
  owner = packed(ids);
  const auto pointers = [&](const Tensor& tensor) {
    return type == ScalarType::Int ? TokenIds{data<int32_t>(tensor), nullptr, ids.size(1)}
                                   : TokenIds{nullptr, data<int64_t>(tensor), ids.size(1)};
  };
  if (const OptionalTensor known = of ? on_host(*owner) : OptionalTensor()) {
    const TokenIds values = pointers(*known);
    const std::string end = of->vocabulary < INT64_MAX ? std::to_string(of->vocabulary) : "V";
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < values.width; ++i) {
        const int64_t id = values.at(row, i);
        require(id >= TokenIds::kFill && id < of->vocabulary, "token_ids", "got ", id, " at row ", row,
                "; takes -1 (no id) or a token in [0, ", end, ")");
      }
  }
  return pointers(*owner);
}

// Requires contiguous float32 values of shape [rows, width].
void require_matrix(const char* argument, const Tensor& tensor, int64_t rows, int64_t width, const Tensor& like) {
  require(tensor.scalar_type() == ScalarType::Float && tensor.dim() == 2 && tensor.size(0) == rows &&
              tensor.size(1) == width && tensor.is_contiguous(),
          argument, "got shape ", shape(tensor), " of ", dtype(tensor), "; takes contiguous float32 [", rows, ", ",
          width, "]");
  require_same_device(argument, tensor, like);
}

void token_softmax_state_(const Tensor& state, const Tensor& taken, const Tensor& logits, const OptionalTensor& labels,
                          const Tensor& token_ids, const Tile& tile, const TemperatureArgument& temperature,
                          const OptionalTensor& mask) {
  const LogitsArgument argument(logits, labels, temperature, mask, tile);
  const int64_t count = argument.rows.layout.count;
  require_states_of(state, logits, count);
  OptionalTensor owner;
  const TokenIds ids = token_ids_of(token_ids, count, &argument.rows, logits, owner);
  require_matrix("taken", taken, count, ids.width, logits);
  TorchDevice device(logits, PublicOp::kTokenLogprobs);
  merge_tail(argument.rows, ids, mutable_data<RowState>(state), mutable_data<float>(taken), device);
}

using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SixTensors token_logprobs_finish(const Tensor& state, const Tensor& taken, const Tensor& token_ids,
                                 const TemperatureArgument& temperature) {
  require_state(state, true);
  const int64_t count = state.size(state.dim() - 2), shards = state.dim() == 3 ? state.size(0) : 1;
  OptionalTensor owner;
  const TokenIds ids = token_ids_of(token_ids, count, nullptr, state, owner);
  require(taken.scalar_type() == ScalarType::Float && taken.dim() == state.dim() && taken.is_contiguous() &&
              same_shape(taken, state, state.dim() - 1) && taken.size(taken.dim() - 1) == ids.width,
          "taken", "got shape ", shape(taken), " of ", dtype(taken),
          "; takes contiguous float32 [rows, K] or [shards, rows, K], as state has shards or none");
  require_same_device("taken", taken, state);
  const auto per_row = [&] { return empty({count}, ScalarType::Float, state); };
  SixTensors outputs = {
      empty({count, ids.width}, ScalarType::Float, state), per_row(), per_row(), per_row(), per_row(), per_row()};
  OptionalTensor owner_of_temperature;
  const Temperatures temperatures = temperatures_of(temperature, std::get<1>(outputs), 1, owner_of_temperature);
  TorchDevice device(state, PublicOp::kTokenLogprobs);
  finish_tokens({data<RowState>(state), shards, count}, {data<float>(taken), shards, count, ids.width}, ids,
                temperatures,
                {mutable_data<float>(std::get<0>(outputs)), mutable_data<float>(std::get<1>(outputs)),
                 mutable_data<float>(std::get<2>(outputs)), mutable_data<float>(std::get<3>(outputs)),
                 mutable_data<float>(std::get<4>(outputs)), mutable_data<float>(std::get<5>(outputs))},
                device);
  return outputs;
}

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

FourTensors token_logprobs_gradient(const OptionalTensor& grad_logprobs, const OptionalTensor& grad_tail_logprob,
                                    const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy,
                                    const Tensor& token_ids, const OptionalTensor& labels, const Tensor& logprobs,
                                    const Tensor& tail_logprob, const Tensor& logprob, const Tensor& entropy,
                                    const TemperatureArgument& temperature, const OptionalTensor& mask) {
  require(tail_logprob.dim() == 1, "tail_logprob", "got shape ", shape(tail_logprob), "; takes [rows]");
  const int64_t count = tail_logprob.numel();
  std::vector<Tensor> owners;
  const auto kept = [&](const Tensor& tensor) -> const Tensor& { return owners.emplace_back(tensor); };
  owners.reserve(16);
  const auto per_row = [&](const char* argument, const Tensor& tensor) {
    require(tensor.scalar_type() == ScalarType::Float, argument, "got dtype ", dtype(tensor), "; takes float32");
    return data<float>(kept(require_per_row(argument, tensor, tail_logprob, 1)));
  };
  const auto per_id = [&](const char* argument, const Tensor& tensor) {
    const Tensor& matrix = kept(packed(tensor));
    require_matrix(argument, matrix, count, token_ids.size(token_ids.dim() - 1), tail_logprob);
    return data<float>(matrix);
  };
  TokenGradients given;
  OptionalTensor owner;
  given.ids = token_ids_of(token_ids, count, nullptr, tail_logprob, owner);
  if (grad_logprobs) given.g_logprobs = per_id("grad_logprobs", *grad_logprobs);
  if (grad_tail_logprob) given.g_tail_logprob = per_row("grad_tail_logprob", *grad_tail_logprob);
  if (grad_logprob) given.g_logprob = per_row("grad_logprob", *grad_logprob);
  if (grad_entropy) given.g_entropy = per_row("grad_entropy", *grad_entropy);
  given.logprobs = per_id("logprobs", logprobs);
  given.tail_logprob = per_row("tail_logprob", tail_logprob);
  given.logprob = per_row("logprob", logprob);
  given.entropy = per_row("entropy", entropy);
  OptionalTensor owner_of_labels, owner_of_temperature;
  if (labels) {
    require(labels->scalar_type() == ScalarType::Long || labels->scalar_type() == ScalarType::Int, "labels",
            "got dtype ", dtype(*labels), "; takes int64 or int32");
    owner_of_labels = require_per_row("labels", *labels, tail_logprob, 1);
    given.labels = labels_of(owner_of_labels);
  }
  given.temperatures = temperatures_of(temperature, tail_logprob, 1, owner_of_temperature);
  const OptionalTensor unmasked = require_mask("mask", mask, tail_logprob, 1);
  given.mask = data<bool>(unmasked);
  const auto output = [&] { return empty({count}, ScalarType::Float, tail_logprob); };
  FourTensors outputs = {output(), output(), output(),
                         empty({count, given.ids.width + 1}, ScalarType::Float, tail_logprob)};
  TorchDevice device(tail_logprob);
  token_gradients(given, count,
                  {mutable_data<float>(std::get<0>(outputs)), mutable_data<float>(std::get<1>(outputs)),
                   mutable_data<float>(std::get<2>(outputs)), mutable_data<float>(std::get<3>(outputs))},
                  device);
  return outputs;
}

void put_token_gradients_(const Tensor& gradient, const Tensor& token_ids, const OptionalTensor& labels,
                          const Tensor& values, const Tile& tile) {
  require(gradient.dim() == 2, "gradient", "got shape ", shape(gradient), "; takes [rows, tile]");
  const LogitsArgument argument(gradient, labels, {}, {}, tile);
  const int64_t count = argument.rows.layout.count;
  OptionalTensor owner;
  const TokenIds ids = token_ids_of(token_ids, count, nullptr, gradient, owner);
  require_matrix("values", values, count, ids.width + 1, gradient);
  TorchDevice device(gradient);
  put_token_gradients(argument.rows, ids, data<float>(values), gradient.mutable_data_ptr(), device);
}

}  // namespace

// Steps of token_logprobs, whose rows have the ids token_ids [rows, K]; -1 stands for no id. token_softmax_state_
// merges the columns of a tile that are not among the row's ids into states [rows, 4], and writes the logits at the ids
// to `taken` [rows, K], which starts as NaN. token_logprobs_finish computes the results, also from the states and
// logits of several vocabulary shards. tail_max and tail_log_sum are the maximum and log S of the row without its ids.
D3S_REGISTER(
    "token_softmax_state_(Tensor(a!) state, Tensor(b!) taken, Tensor logits, Tensor? labels, Tensor token_ids, "
    "SymInt? first_token=None, float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None) -> ()",
    token_softmax_state_)
D3S_REGISTER(
    "token_logprobs_finish(Tensor state, Tensor taken, Tensor token_ids, float temperature=1.0, "
    "Tensor? temperature_tensor=None) -> (Tensor logprobs, Tensor tail_logprob, Tensor logprob, Tensor entropy, "
    "Tensor tail_max, Tensor tail_log_sum)",
    token_logprobs_finish)
// Steps of the gradient: core/token_gradient.h says how the results are used. put_token_gradients_ writes the values at
// the ids and labels of a tile over the gradient that logprob_entropy_backward has written.
D3S_REGISTER(
    "token_logprobs_gradient(Tensor? grad_logprobs, Tensor? grad_tail_logprob, Tensor? grad_logprob, "
    "Tensor? grad_entropy, Tensor token_ids, Tensor? labels, Tensor logprobs, Tensor tail_logprob, Tensor logprob, "
    "Tensor entropy, float temperature=1.0, Tensor? temperature_tensor=None, Tensor? mask=None) "
    "-> (Tensor tail_grad_logprob, Tensor tail_grad_entropy, Tensor tail_entropy, Tensor values)",
    token_logprobs_gradient)
D3S_REGISTER(
    "put_token_gradients_(Tensor(a!) gradient, Tensor token_ids, Tensor? labels, Tensor values, "
    "SymInt? first_token=None) -> ()",
    put_token_gradients_)

}  // namespace d3s
