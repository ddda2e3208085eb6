// Checks the arguments of topk_mask, select_tokens and select_tokens_from_logits, and allocates their results.
#include "logits_argument.h"
#include "selection_arguments.h"

namespace d3s {

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
                                                                     const TemperatureArgument& temperature) {
  const LogitsArgument argument(logits, {}, temperature);
  require(logits.dim() >= 2, "logits", "got shape ", shape(logits), "; takes [..., n, V]");
  const Tensor entropy = empty(leading_sizes(logits, argument.dims), ScalarType::Float, logits);
  // All arguments are checked here, before the long pass over the logits.
  TokenSelection selection(entropy, "logits", {advantages, ratio, mask, where, drop_zeros});
  LogitsRows rows = argument.rows;
  rows.mask = selection.scores.mask;
  RowOutputs outputs;
  outputs.entropy = mutable_data<float>(entropy);
  TorchDevice device(logits, PublicOp::kSelectTokensFromLogits);
  KeyOutput keys;
  if (kMakesKeys) {
    keys = {selection.scores, device.scratch_of<uint32_t>(entropy.numel())};
    selection.scores.keys = keys.keys;
  }
  row_statistics(rows, outputs, keys, device);
  selection.run(entropy, device);
  return {selection.mask, entropy, selection.count, selection.threshold};
}

}  // namespace

D3S_REGISTER(
    "topk_mask(Tensor scores, float? ratio=None, Tensor? ratio_tensor=None, SymInt? k=None, Tensor? k_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=False, bool drop_zeros=False) "
    "-> Tensor",
    topk_mask)
D3S_REGISTER(
    "select_tokens(Tensor entropy, Tensor advantages, float? ratio=None, Tensor? ratio_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=True, bool drop_zeros=False) "
    "-> (Tensor mask, Tensor count, Tensor threshold)",
    select_tokens)
D3S_REGISTER(
    "select_tokens_from_logits(Tensor logits, Tensor advantages, float? ratio=None, Tensor? ratio_tensor=None, "
    "Tensor? mask=None, Tensor? offsets=None, SymInt? max_segment=None, bool pooled=True, "
    "bool drop_zeros=False, float temperature=1.0, Tensor? temperature_tensor=None) "
    "-> (Tensor mask, Tensor entropy, Tensor count, Tensor threshold)",
    select_tokens_from_logits)

}  // namespace d3s
