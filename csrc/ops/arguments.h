// Checks the arguments that several ops share, and converts them to the form that the back-ends take.
#pragma once

#include "../torch_abi.h"
#include "logprob_entropy.h"
#include "rollouts.h"
#include "sampling_mask.h"
#include "topk_mask.h"

namespace d3s {

// ---- arguments of a schema that belong together ------------------------------------------------------------------

// A number that is passed in either as `number` or as the 0-d tensor `tensor`.
template <class Number>
struct NumberOrTensor {
  std::optional<Number> number;
  OptionalTensor tensor;
};
using RatioArgument = NumberOrTensor<double>;
using KeepArgument = NumberOrTensor<int64_t>;

// If `tensor` is not set, `number` is the temperature of all rows. If `tensor` is set, it is used instead of `number`,
// and is 0-d or has one temperature for each row.
struct TemperatureArgument {
  double number = 1.0;
  OptionalTensor tensor;
};

// The segments that an op selects from. If `pooled` is true, the op selects from all of them together.
struct SegmentsArgument {
  OptionalTensor offsets;
  OptionalInt max_segment;  // an upper bound on the length of a segment
  bool pooled;
};

// Tells which tokens the columns of logits are: consecutive tokens from `first_token` on. If `first_token` is not set,
// the columns are the whole vocabulary.
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

struct SoftcapArgument {
  OptionalFloat number;

  // Returns the soft cap, or 0 if there is none.
  float checked() const {
    require(!number || *number > 0, "logit_softcap", "takes a number above 0");
    return static_cast<float>(number.value_or(0));
  }
};

template <class Number>
struct Parameter<NumberOrTensor<Number>> : Together<NumberOrTensor<Number>, std::optional<Number>, OptionalTensor> {};
template <>
struct Parameter<TemperatureArgument> : Together<TemperatureArgument, double, OptionalTensor> {};
template <>
struct Parameter<SegmentsArgument> : Together<SegmentsArgument, OptionalTensor, OptionalInt, bool> {};
template <>
struct Parameter<Tile> : Together<Tile, OptionalInt> {};
template <>
struct Parameter<GradientArguments>
    : Together<GradientArguments, OptionalTensor, OptionalTensor, Tensor, OptionalTensor, Tensor, Tensor, Tensor> {};
template <>
struct Parameter<SoftcapArgument> : Together<SoftcapArgument, OptionalFloat> {};

// ---- checked arguments --------------------------------------------------------------------------------------------

// The rows of logits with their labels, mask and spans. The object owns the tensors that `rows` points into, except the
// logits.
class LogitsArgument {
 public:
  LogitsArgument(const Tensor& logits, const TemperatureArgument& temperature);

  // Call this function first, and only if `logits` contains only the logits of kept tokens. `tokens` is the number of
  // tokens in the vocabulary or tile.
  void set_kept_alone(const SamplingMask& sampling_mask, int64_t tokens);
  void set_tile(const Tile& tile);  // call it before set_labels

  void set_labels(const OptionalTensor& labels);
  void set_mask(const OptionalTensor& mask);
  void set_spans(const SamplingMask& sampling_mask);  // call it after set_labels and set_mask

  int64_t dims;  // the number of leading dimensions of the logits; each index into these dimensions is a row
  LogitsRows rows;

 private:
  const Tensor& logits_;
  OptionalTensor temperatures_, labels_, mask_, offsets_, tokens_;
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

// Checks temperatures. The result points into a tensor that `owner` keeps alive.
Temperatures temperatures_of(const TemperatureArgument& temperature, const Tensor& like, int64_t row_dims,
                             OptionalTensor& owner);

// Returns the number of values to keep, which must be at least 1. If the number is in a 0-d tensor, kernels read it on
// the device.
Keep keep_of(const char* argument, const KeepArgument& keep, const Tensor& like);

// Returns the quota of an op that takes either a ratio or `k`.
Quota quota_of(const RatioArgument& ratio, const KeepArgument& k, const Tensor& like);

// The segments that an op selects from: either the `given` segments, or one segment with all values.
struct PooledSegments {
  PooledSegments(const Tensor& values, const SegmentsArgument& argument, const char* name)
      : given(segments_of(values, argument.offsets, name)),
        selected(argument.pooled ? pool(values) : given),
        pooled(argument.pooled),
        longest(argument.pooled || given.ragged() ? values.numel() : given.length) {
    const OptionalInt& most = argument.max_segment;
    require(!most || *most >= 0, "max_segment", "got ", most.value_or(0), "; takes at least 0");
    if (selected.ragged() && most && *most < longest) longest = *most;
    if (argument.pooled) together = given.count;
  }

  // Returns the shape of a result with one element for each selected segment of `values`.
  std::vector<int64_t> shape_in(const Tensor& values) const {
    if (pooled) return {};
    return given.ragged() ? std::vector<int64_t>{given.count} : leading_sizes(values, values.dim() - 1);
  }

  Segments given, selected;
  bool pooled;
  int64_t longest;       // an upper bound on the length of a selected segment; only for launch sizes on GPUs
  int64_t together = 1;  // how many given segments one selected segment contains
};

// Returns whether there is one advantage for all tokens, for each sequence, or for each token. If the shape of
// `advantages` fits both sequences and tokens, there is one advantage for each token.
Scores::Advantages kind_of(const Tensor& advantages, const Tensor& entropy, const Segments& sequences);

}  // namespace d3s
