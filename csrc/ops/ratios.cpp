// Checks the arguments of importance_ratio, entropy_groups and adaptive_clip, and allocates their results.
#include "ratios.h"

#include <algorithm>
#include <cmath>

#include "selection_arguments.h"

namespace d3s {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 25;  // the maximum in a sequence: an ExactSum can hold no more terms

void require_float32(const char* argument, const Tensor& tensor) {
  require(tensor.scalar_type() == ScalarType::Float, argument, "got dtype ", dtype(tensor), "; takes float32");
}

// Returns the length of the longest sequence, or 0 if the offsets are on a GPU and are not checked.
int64_t longest_known(Segments sequences, const OptionalTensor& offsets) {
  if (!offsets) return sequences.length;
  const OptionalTensor known = on_host(*offsets);
  if (!known) return 0;
  if (sequences.offsets32)
    sequences.offsets32 = data<int32_t>(known);
  else
    sequences.offsets64 = data<int64_t>(known);
  int64_t longest = 0;
  for (int64_t i = 0; i < sequences.count; ++i) longest = std::max(longest, sequences.end(i) - sequences.begin(i));
  return longest;
}

// The groups of tokens. The object owns the mask and the ids that `groups` points to.
class GroupsArgument {
 public:
  GroupsArgument(const char* argument, const Tensor& tokens, const OptionalTensor& mask, const OptionalTensor& ids)
      : mask_(require_mask("mask", mask, tokens, tokens.dim())) {
    require(tokens.dim() >= 1, argument, "got a 0-d tensor; takes [..., T]");
    groups.tokens = tokens.numel();
    groups.mask = data<bool>(mask_);
    require(groups.tokens <= INT32_MAX, argument, "got ", groups.tokens, " tokens; takes fewer than 2^31");
    if (!ids) return;
    require(ids->scalar_type() == ScalarType::Char, "groups", "got dtype ", dtype(*ids), "; takes int8");
    ids_ = require_per_row("groups", *ids, tokens, tokens.dim());
    groups.ids = data<int8_t>(ids_);
    groups.each = kMostGroups;
  }

  void set_sequences(const char* argument, const Tensor& tokens, const OptionalTensor& offsets) {
    groups.sequences = segments_of(tokens, offsets, argument);
    const int64_t longest = longest_known(groups.sequences, offsets);
    require(longest <= kMostTokens, argument, "got a sequence of ", longest, " tokens; takes at most 2^25");
    const OptionalTensor known = ids_ ? on_host(*ids_) : ids_;
    if (!known) return;
    const int8_t* ids = data<int8_t>(known);
    int8_t largest = 0;
    for (int64_t i = 0; i < groups.tokens; ++i) largest = ids[i] > largest ? ids[i] : largest;
    require(largest < kMostGroups, "groups", "got ", int{largest}, "; takes at most ", kMostGroups - 1);
    groups.each = largest + 1;
  }

  TokenGroups groups;

 private:
  OptionalTensor mask_, ids_;
};

LogBounds bounds_of(double low, double high) {
  require(low < 0 && high > 0, "log_bounds", "got (", low, ", ", high, "); takes a number below 0 and one above");
  return {static_cast<float>(low), static_cast<float>(high)};
}

RatioForm form_of(const std::string& level, const std::string& denominator, bool groups) {
  require(level == "token" || level == "sequence" || level == "entropy_group", "level", "got '", level,
          "'; takes 'token', 'sequence' or 'entropy_group'");
  require(denominator == "self" || denominator == "old", "denominator", "got '", denominator,
          "'; takes 'self' or 'old'");
  require(groups == (level == "entropy_group"), "groups", groups ? "given" : "not given", " at level '", level,
          "'; 'entropy_group' takes them, the others do not");
  if (level == "token") return RatioForm::kToken;
  return denominator == "self" ? RatioForm::kMean : RatioForm::kMeanAndToken;
}

Tensor importance_ratio(const Tensor& logprob, const Tensor& old_logprob, const OptionalTensor& mask,
                        const OptionalTensor& groups, const OptionalTensor& offsets, const std::string& level,
                        const std::string& denominator, double low, double high) {
  require_float32("logprob", logprob);
  require_float32("old_logprob", old_logprob);
  const RatioForm form = form_of(level, denominator, groups.has_value());
  const LogBounds bounds = bounds_of(low, high);
  GroupsArgument argument("logprob", logprob, mask, groups);
  argument.set_sequences("logprob", logprob, offsets);
  const Tensor now = packed(logprob), then = require_per_row("old_logprob", old_logprob, logprob, logprob.dim());
  const Tensor out = empty(leading_sizes(logprob, logprob.dim()), ScalarType::Float, logprob);
  TorchDevice device(logprob, PublicOp::kImportanceRatio);
  importance_ratios(data<float>(now), data<float>(then), argument.groups, form, bounds, mutable_data<float>(out),
                    device);
  return out;
}

Tensor importance_ratio_backward(const Tensor& grad_ratio, const Tensor& ratio, const OptionalTensor& mask,
                                 const OptionalTensor& groups, double low, double high) {
  require_float32("grad_ratio", grad_ratio);
  require_float32("ratio", ratio);
  const GroupsArgument argument("ratio", ratio, mask, groups);
  const Tensor from = require_per_row("grad_ratio", grad_ratio, ratio, ratio.dim()), by = packed(ratio);
  const Tensor out = empty(leading_sizes(ratio, ratio.dim()), ScalarType::Float, ratio);
  TorchDevice device(ratio);
  importance_ratio_gradients({data<float>(from), data<float>(by), argument.groups, limits_of(bounds_of(low, high))},
                             mutable_data<float>(out), device);
  return out;
}

Tensor entropy_groups(const Tensor& entropy, const std::vector<double>& quantiles, const OptionalTensor& mask,
                      const SegmentsArgument& where) {
  require_float32("entropy", entropy);
  const int64_t n = entropy.numel(), count = static_cast<int64_t>(quantiles.size());
  require(count < kMostGroups, "quantiles", "got ", count, " of them; takes at most ", kMostGroups - 1);
  for (int64_t i = 0; i < count; ++i) {
    const double before = i > 0 ? quantiles[i - 1] : 0.0;
    require(quantiles[i] > before && quantiles[i] < 1.0, "quantiles", "got ", quantiles[i], " after ", before,
            "; takes rising numbers in (0, 1)");
  }
  const OptionalTensor usable = require_mask("mask", mask, entropy, entropy.dim());
  const PooledSegments segments(entropy, where, "entropy");
  const Tensor source = packed(entropy);
  const Tensor out = empty(leading_sizes(entropy, entropy.dim()), ScalarType::Char, entropy);
  TorchDevice device(entropy, PublicOp::kEntropyGroups);
  Scores scores;
  scores.values = source.const_data_ptr();
  scores.mask = data<bool>(usable);
  bool* above = device.scratch_of<bool>(count * n);
  for (int64_t i = 0; i < count; ++i) {
    Quota quota;
    quota.ratio = 1.0 - quantiles[i];
    quota.slack = kDoubleSlack / quota.ratio;  // the quantile's rounding error, relative to the ratio
    SelectionOutputs outputs;
    outputs.mask = above + i * n;
    select_top(scores, quota, segments.selected, n, segments.longest, outputs, device);
  }
  group_by_quantiles({data<float>(source), scores.mask, above, n, static_cast<int>(count)}, mutable_data<int8_t>(out),
                     device);
  return out;
}

Tensor adaptive_clip(const Tensor& entropy, const Tensor& groups, const OptionalTensor& mask,
                     const OptionalTensor& offsets, int64_t vocab_size, double alpha) {
  require_float32("entropy", entropy);
  require(vocab_size >= 2, "vocab_size", "got ", vocab_size, "; takes at least 2");
  require(alpha > 0 && std::isfinite(alpha), "alpha", "got ", alpha, "; takes a finite number above 0");
  GroupsArgument argument("entropy", entropy, mask, groups);
  argument.set_sequences("entropy", entropy, offsets);
  const Tensor source = packed(entropy);
  const Tensor out = empty(leading_sizes(entropy, entropy.dim()), ScalarType::Float, entropy);
  const float scale = static_cast<float>(alpha / std::log(static_cast<double>(vocab_size)));
  TorchDevice device(entropy, PublicOp::kAdaptiveClip);
  scaled_group_means(data<float>(source), argument.groups, scale, mutable_data<float>(out), device);
  return out;
}

}  // namespace

// Group ids are int8; a token in no group has an id below 0.
D3S_REGISTER(
    "importance_ratio(Tensor logprob, Tensor old_logprob, Tensor? mask=None, Tensor? groups=None, "
    "Tensor? offsets=None, str level=\"token\", str denominator=\"self\", float low=-20.0, float high=20.0) "
    "-> (Tensor ratio)",
    importance_ratio)
D3S_REGISTER(
    "importance_ratio_backward(Tensor grad_ratio, Tensor ratio, Tensor? mask=None, Tensor? groups=None, "
    "float low=-20.0, float high=20.0) -> (Tensor grad_logprob)",
    importance_ratio_backward)
D3S_REGISTER(
    "entropy_groups(Tensor entropy, float[] quantiles, Tensor? mask=None, Tensor? offsets=None, "
    "SymInt? max_segment=None, bool pooled=False) -> Tensor",
    entropy_groups)
D3S_REGISTER(
    "adaptive_clip(Tensor entropy, Tensor groups, Tensor? mask, Tensor? offsets, int vocab_size, float alpha=0.02) "
    "-> Tensor",
    adaptive_clip)

}  // namespace d3s
