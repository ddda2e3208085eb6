// group_advantages: (reward - mean of its group) / (standard deviation + eps). A NaN reward is unscorable: it is left
// out of the statistics and its advantage is 0.
#include <cmath>

#include "../torch_abi.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 16384;

// Two passes in double: the mean first, then the squares of what is left. Four sums side by side, which is as long as
// an addition takes; which reward goes into which depends on its place in the group alone.
struct Statistics {
  double sum = 0.0, squares = 0.0;
  int64_t count = 0;

  double mean() const { return count > 0 ? sum / static_cast<double>(count) : 0.0; }
  double deviation(int64_t ddof) const {
    return count > ddof ? std::sqrt(squares / static_cast<double>(count - ddof)) : 0.0;
  }
};

template <class T>
Statistics statistics(const T* rewards, int64_t begin, int64_t end) {
  constexpr int kParts = 4;
  double sums[kParts] = {}, squares[kParts] = {};
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double reward = to_float(rewards[i]);
    const bool usable = reward == reward;
    sums[(i - begin) % kParts] += usable ? reward : 0.0;
    count += usable;
  }
  Statistics s;
  s.count = count;
  s.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const double mean = s.mean();
  for (int64_t i = begin; i < end; ++i) {
    const double reward = to_float(rewards[i]);
    const double difference = reward == reward ? reward - mean : 0.0;
    squares[(i - begin) % kParts] += difference * difference;
  }
  s.squares = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return s;
}

Tensor group_advantages(const Tensor& rewards, const OptionalTensor& offsets, const std::string& scale, double eps,
                        int64_t ddof) {
  require_float("rewards", rewards);
  require(scale == "group" || scale == "batch" || scale == "none", "scale", "got '", scale,
          "'; takes 'group', 'batch' or 'none'");
  require(eps >= 0 && std::isfinite(eps), "eps", "got ", eps, "; takes a finite number of at least 0");
  require(ddof >= 0, "ddof", "got ", ddof, "; takes at least 0");
  const Segments groups = segments_of(rewards, offsets, "rewards");
  const Tensor source = packed(rewards);
  const Tensor advantages = empty(leading_sizes(rewards, rewards.dim()), ScalarType::Float, rewards);
  float* out = mutable_data<float>(advantages);
  const bool per_group = scale == "group", unscaled = scale == "none";
  dispatch_float(source, [&](auto tag) {
    const auto* p = data<typename decltype(tag)::type>(source);
    const double batch_deviation = scale == "batch" ? statistics(p, 0, source.numel()).deviation(ddof) : 0.0;
    parallel_segments(groups, source.numel(), kGrain, [&](int64_t first, int64_t last) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t begin = groups.begin(group), end = groups.end(group);
        const Statistics s = statistics(p, begin, end);
        const double deviation = per_group ? s.deviation(ddof) : batch_deviation;
        const double divisor = unscaled ? 1.0 : deviation + eps, mean = s.mean();
        for (int64_t i = begin; i < end; ++i) {
          const double reward = to_float(p[i]), difference = reward - mean;
          // NaN: unscorable. Equal rewards leave no advantage, also where eps is 0.
          const bool none = reward != reward || difference == 0.0 || s.count == 1;
          out[i] = none ? 0.f : static_cast<float>(difference / divisor);
        }
      }
    });
  });
  return advantages;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(d3s_kernels, CPU, m) { m.impl("group_advantages", TORCH_BOX(&group_advantages)); }

}  // namespace d3s
