// Checks the arguments of topk_mask, select_tokens and select_tokens_from_logits, and allocates their results.
#include "arguments.h"

namespace d3s {

Quota quota_of(const RatioArgument& ratio, const KeepArgument& k, const Tensor& like) {
  const int given = ratio.number.has_value() + ratio.tensor.has_value() + k.number.has_value() + k.tensor.has_value();
  require(given == 1, "ratio", "got ", given, " of ratio and k; takes exactly one of the two");
  const auto require_ratio = [](double share) {
    require(share > 0 && share <= 1, "ratio", "got ", share, "; takes a number in (0, 1]");
  };
  Quota quota;
  if (k.number || k.tensor) {
    quota.is_number = true;
    quota.number = keep_of("k", k, like);
  } else if (ratio.number) {
    require_ratio(*ratio.number);
    quota.ratio = *ratio.number;
  } else {
    const Tensor& share = *ratio.tensor;
    const bool wide = share.scalar_type() == ScalarType::Double;
    require(share.numel() == 1 && (wide || share.scalar_type() == ScalarType::Float), "ratio", "got shape ",
            shape(share), " of ", dtype(share), "; takes a 0-d float32 or float64 tensor");
    require_same_device("ratio", share, like);
    quota.slack = wide ? kDoubleSlack : kFloatSlack;
    if (wide)
      quota.ratio64 = data<double>(share);
    else
      quota.ratio32 = data<float>(share);
    if (const OptionalTensor known = on_host(share))
      require_ratio(wide ? *data<double>(*known) : static_cast<double>(*data<float>(*known)));
  }
  return quota;
}

Scores::Advantages kind_of(const Tensor& advantages, const Tensor& entropy, const Segments& sequences) {
  require(advantages.scalar_type() == ScalarType::Float, "advantages", "got dtype ", dtype(advantages),
          "; takes float32");
  require_same_device("advantages", advantages, entropy);
  const int64_t dims = entropy.dim();
  if (advantages.dim() == 0) return Scores::Advantages::kOne;
  if (advantages.dim() == dims && same_shape(advantages, entropy, dims)) return Scores::Advantages::kPerToken;
  const bool per_sequence = sequences.ragged()
                                ? advantages.dim() == 1 && advantages.size(0) == sequences.count
                                : advantages.dim() == dims - 1 && same_shape(advantages, entropy, dims - 1);
  require(per_sequence, "advantages", "got shape ", shape(advantages), "; takes one for each token, ", shape(entropy),
          ", one for each of ", sequences.count, " sequences, or a 0-d tensor");
  return Scores::Advantages::kPerSequence;
}

namespace {

Tensor topk_mask(const Tensor& scores, const RatioArgument& ratio, const KeepArgument& k, const OptionalTensor& mask,
                 const SegmentsArgument& where, bool drop_zeros) {
  require_float("scores", scores);
  const PooledSegments segments(scores, where, "scores");
  Quota quota = quota_of(ratio, k, scores);
  quota.number.times = segments.together;
  quota.drop_zeros = drop_zeros;
  const OptionalTensor present = require_mask("mask", mask, scores, scores.dim());
  const Tensor source_values = packed(scores);
  const Tensor out = empty(leading_sizes(scores, scores.dim()), ScalarType::Bool, scores);
  Scores source;
  source.values = source_values.const_data_ptr();
  source.type = float_type(scores);
  source.mask = data<bool>(present);
  TorchDevice device(scores, PublicOp::kTopkMask);
  select_top(source, quota, segments.selected, scores.numel(), segments.longest, {mutable_data<bool>(out)}, device);
  return out;
}

// The arguments that select_tokens and select_tokens_from_logits share.
struct TokenArguments {
  const Tensor& advantages;
  const RatioArgument& ratio;
  const OptionalTensor& mask;
  const SegmentsArgument& where;
  bool drop_zeros;
};

// The checked arguments and, after run(), the results.
struct TokenSelection {
  Tensor advantages;
  OptionalTensor present;
  PooledSegments sequences;
  Quota quota;
  Scores scores;
  Tensor mask, count, threshold;

  TokenSelection(const Tensor& entropy, const char* name, const TokenArguments& given)
      : advantages(packed(given.advantages)),
        present(require_mask("mask", given.mask, entropy, entropy.dim())),
        sequences(entropy, given.where, name),
        quota(quota_of(given.ratio, KeepArgument(), entropy)),
        mask(empty(leading_sizes(entropy, entropy.dim()), ScalarType::Bool, entropy)),
        count(empty(sequences.shape_in(entropy), ScalarType::Int, entropy)),
        threshold(empty(sequences.shape_in(entropy), ScalarType::Float, entropy)) {
    quota.drop_zeros = given.drop_zeros;
    scores.kind = kind_of(advantages, entropy, sequences.given);
    scores.advantages = data<float>(advantages);
    scores.sequences = sequences.given;
    scores.mask = data<bool>(present);
  }

  // `entropy` must be contiguous.
  void run(const Tensor& entropy, Device& device) {
    scores.values = entropy.const_data_ptr();
    scores.type = float_type(entropy);
    select_top(scores, quota, sequences.selected, entropy.numel(), sequences.longest,
               {mutable_data<bool>(mask), mutable_data<int32_t>(count), mutable_data<float>(threshold)}, device);
  }
};

std::tuple<Tensor, Tensor, Tensor> select_tokens(const Tensor& entropy, const Tensor& advantages,
                                                 const RatioArgument& ratio, const OptionalTensor& mask,
                                                 const SegmentsArgument& where, bool drop_zeros) {
  require_float("entropy", entropy);
  TokenSelection selection(entropy, "entropy", {advantages, ratio, mask, where, drop_zeros});
  TorchDevice device(entropy, PublicOp::kSelectTokens);
  selection.run(packed(entropy), device);
  return {selection.mask, selection.count, selection.threshold};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> select_tokens_from_logits(const Tensor& logits, const Tensor& advantages,
                                                                     const RatioArgument& ratio,
                                                                     const OptionalTensor& mask,
                                                                     const SegmentsArgument& where, bool drop_zeros,
                                                                     const TemperatureArgument& temperature,
                                                                     const SamplingMask& sampling_mask) {
  LogitsArgument argument(logits, temperature);
  require(logits.dim() >= 2, "logits", "got shape ", shape(logits), "; takes [..., n, V]");
  const Tensor entropy = empty(leading_sizes(logits, argument.dims), ScalarType::Float, logits);
  // All arguments are checked here, before the long pass over the logits.
  TokenSelection selection(entropy, "logits", {advantages, ratio, mask, where, drop_zeros});
  argument.rows.mask = selection.scores.mask;
  argument.set_spans(sampling_mask);
  RowOutputs outputs;
  outputs.entropy = mutable_data<float>(entropy);
  TorchDevice device(logits, PublicOp::kSelectTokensFromLogits);
  KeyOutput keys;
  if (kMakesKeys) {
    keys = {selection.scores, device.scratch_of<uint32_t>(entropy.numel())};
    selection.scores.keys = keys.keys;
  }
  row_statistics(argument.rows, outputs, keys, device);
  selection.run(entropy, device);
  return {selection.mask, entropy, selection.count, selection.threshold};
}

}  // namespace

D3S_REGISTER("topk_mask", topk_mask)
D3S_REGISTER("select_tokens", select_tokens)
D3S_REGISTER("select_tokens_from_logits", select_tokens_from_logits)

}  // namespace d3s
