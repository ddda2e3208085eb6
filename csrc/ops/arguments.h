// Arguments that several ops share: checks them and converts them to the form that the back-ends take.
#pragma once

#include "../torch_abi.h"
#include "logprob_entropy.h"
#include "rollouts.h"
#include "topk_mask.h"

namespace d3s {

// ---- arguments of a schema that travel together ------------------------------------------------------------------

// A number, or the 0-d tensor that replaces it.
template <class Number>
struct NumberOrTensor {
  std::optional<Number> number;
  OptionalTensor tensor;
};
using RatioArgument = NumberOrTensor<double>;
using KeepArgument = NumberOrTensor<int64_t>;

// One temperature for all rows, or the tensor that replaces it: 0-d, or with one temperature for each row.
struct TemperatureArgument {
  double number = 1.0;
  OptionalTensor tensor;
};

// The segments of some values, and whether all of them are selected from as one.
struct SegmentsArgument {
  OptionalTensor offsets;
  OptionalInt max_segment;  // a bound on the length of a segment
  bool pooled;
};

struct SamplingMask {
  OptionalTensor ids, offsets;  // both or none
  bool include_label;
  OptionalInt max_dense_rows;
};

template <class Number>
struct Parameter<NumberOrTensor<Number>> : Together<NumberOrTensor<Number>, std::optional<Number>, OptionalTensor> {};
template <>
struct Parameter<TemperatureArgument> : Together<TemperatureArgument, double, OptionalTensor> {};
template <>
struct Parameter<SegmentsArgument> : Together<SegmentsArgument, OptionalTensor, OptionalInt, bool> {};
template <>
struct Parameter<SamplingMask> : Together<SamplingMask, OptionalTensor, OptionalTensor, bool, OptionalInt> {};

// ---- checked ------------------------------------------------------------------------------------------------------

// The rows of logits with their labels, mask and spans. Owns the tensors that `rows` points into.
class LogitsArgument {
 public:
  LogitsArgument(const Tensor& logits, const TemperatureArgument& temperature);

  // Call these two first. The logits are only of the kept tokens, out of `tokens` tokens. The logits are a tile.
  void set_kept_alone(const SamplingMask& sampling_mask, int64_t tokens);
  void set_first_token(int64_t first_token);

  void set_labels(const OptionalTensor& labels);
  void set_mask(const OptionalTensor& mask);
  void set_spans(const SamplingMask& sampling_mask);  // call it after set_labels and set_mask

  int64_t dims;  // how many leading dimensions the logits have; their elements are the rows
  LogitsRows rows;

 private:
  const Tensor& logits_;
  OptionalTensor temperatures_, labels_, mask_, offsets_, tokens_;
};

// The tensors from which the rows' gradient is computed. Owns the tensors that `rows` points into.
class GradientsArgument {
 public:
  GradientsArgument(const OptionalTensor& grad_logprob, const OptionalTensor& grad_entropy, const Tensor& entropy,
                    const Tensor& row_max, const Tensor& log_sum, const Tensor& logits, int64_t dims) {
    const auto checked = [&](const char* argument, const Tensor& tensor) {
      require(tensor.scalar_type() == ScalarType::Float, argument, "got dtype ", dtype(tensor), "; takes float32");
      owners_.push_back(require_per_row(argument, tensor, logits, dims));
      return data<float>(owners_.back());
    };
    if (grad_logprob) rows.g_logprob = checked("grad_logprob", *grad_logprob);
    if (grad_entropy) rows.g_entropy = checked("grad_entropy", *grad_entropy);
    rows.entropy = checked("entropy", entropy);
    rows.row_max = checked("row_max", row_max);
    rows.log_sum = checked("log_sum", log_sum);
  }

  RowGradients rows;

 private:
  std::vector<Tensor> owners_;
};

// Checks temperatures and keeps their tensor alive in `owner`. It does not need logits, so ops on softmax states use it
// too.
Temperatures temperatures_of(const TemperatureArgument& temperature, const Tensor& like, int64_t row_dims,
                             OptionalTensor& owner);

// A number of values to keep, at least 1. Kernels read a 0-d tensor on the device; the host reads it only to check it.
Keep keep_of(const char* argument, const KeepArgument& keep, const Tensor& like);

// The same for ops that take either `k` or a ratio.
Quota quota_of(const RatioArgument& ratio, const KeepArgument& k, const Tensor& like);

// What is selected from: each of the `given` segments, or all of them as one.
struct PooledSegments {
  PooledSegments(const Tensor& values, const SegmentsArgument& argument, const char* name)
      : given(segments_of(values, argument.offsets, name)),
        selected(argument.pooled ? pool(values) : given),
        longest(argument.pooled || given.ragged() ? values.numel() : given.length) {
    const OptionalInt& most = argument.max_segment;
    require(!most || *most >= 0, "max_segment", "got ", most.value_or(0), "; takes at least 0");
    if (selected.ragged() && most && *most < longest) longest = *most;
    if (argument.pooled) together = given.count;
  }

  Segments given, selected;
  int64_t longest;       // a bound on the length of a selected segment; only GPUs use it, to size their launches
  int64_t together = 1;  // how many of the given segments are in each selected one
};

// Whether there is one advantage in all, one for each sequence, or one for each token. If the shape fits the last two,
// advantages are per token.
Scores::Advantages kind_of(const Tensor& advantages, const Tensor& entropy, const Segments& sequences);

}  // namespace d3s
