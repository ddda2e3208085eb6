// The arguments of the ops that select from segments of values, and their checks.
#pragma once

#include <vector>

#include "arguments.h"
#include "topk_mask.h"

namespace d3s {

// The segments that an op selects from. If `pooled` is true, the op selects from all of them together.
struct SegmentsArgument {
  OptionalTensor offsets;
  OptionalInt max_segment;  // an upper bound on the length of a segment
  bool pooled;
};

template <>
struct Parameter<SegmentsArgument> : Together<SegmentsArgument, OptionalTensor, OptionalInt, bool> {};

// Returns the number of values to keep, which must be at least 1. If the number is in a 0-d tensor, kernels read it on
// the device.
inline Keep keep_of(const char* argument, const KeepArgument& keep, const Tensor& like) {
  require(keep.number.has_value() != keep.tensor.has_value(), argument, "takes one number or one 0-d tensor");
  const auto require_some = [&](int64_t k) { require(k >= 1, argument, "got ", k, "; takes at least 1"); };
  Keep number;
  if (keep.number) {
    require_some(*keep.number);
    number.number = *keep.number;
    return number;
  }
  const Tensor& given = *keep.tensor;
  const bool wide = given.scalar_type() == ScalarType::Long;
  require(given.numel() == 1 && (wide || given.scalar_type() == ScalarType::Int), argument, "got shape ", shape(given),
          " of ", dtype(given), "; takes a number or a 0-d int64 or int32 tensor");
  require_same_device(argument, given, like);
  if (wide)
    number.on_device64 = data<int64_t>(given);
  else
    number.on_device32 = data<int32_t>(given);
  if (const OptionalTensor known = on_host(given)) require_some(wide ? *data<int64_t>(*known) : *data<int32_t>(*known));
  return number;
}

// Returns the quota of an op that takes either a ratio or `k`.
inline Quota quota_of(const RatioArgument& ratio, const KeepArgument& k, const Tensor& like) {
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
inline Scores::Advantages kind_of(const Tensor& advantages, const Tensor& entropy, const Segments& sequences) {
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

}  // namespace d3s
