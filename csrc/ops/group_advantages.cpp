// Checks the arguments of group_advantages and allocates its result.
#include <cmath>

#include "../torch_abi.h"
#include "rollouts.h"

namespace d3s {
namespace {

Tensor group_advantages(const Tensor& rewards, const OptionalTensor& offsets, const std::string& scale, double eps,
                        int64_t ddof) {
  require(is_float(rewards.scalar_type()) || rewards.scalar_type() == ScalarType::Double, "rewards", "got dtype ",
          dtype(rewards), "; takes float32, bfloat16, float16 or float64");
  require(scale == "group" || scale == "batch" || scale == "none", "scale", "got '", scale,
          "'; takes 'group', 'batch' or 'none'");
  require(eps >= 0 && std::isfinite(eps), "eps", "got ", eps, "; takes a finite number of at least 0");
  require(ddof >= 0, "ddof", "got ", ddof, "; takes at least 0");
  const AdvantageScale by = scale == "group"   ? AdvantageScale::kGroup
                            : scale == "batch" ? AdvantageScale::kBatch
                                               : AdvantageScale::kNone;
  const Tensor source = packed(rewards);
  SegmentedValues groups;
  groups.values = source.const_data_ptr();
  groups.type = float_type(source);
  groups.segments = segments_of(rewards, offsets, "rewards");
  groups.total = rewards.numel();
  const Tensor advantages = empty(leading_sizes(rewards, rewards.dim()), ScalarType::Float, rewards);
  TorchDevice device(rewards, PublicOp::kGroupAdvantages);
  group_advantages_of(groups, {by, eps, ddof, spread_tolerance(groups.type)}, mutable_data<float>(advantages), device);
  return advantages;
}

}  // namespace

D3S_REGISTER(
    "group_advantages(Tensor rewards, Tensor? offsets=None, str scale=\"group\", float eps=0.0001, int ddof=1) "
    "-> Tensor",
    group_advantages)

}  // namespace d3s
