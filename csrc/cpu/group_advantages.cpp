// group_advantages: (reward - mean of its group) / (standard deviation + eps). A NaN reward is unscorable: it is left
// out of the statistics and its advantage is 0.
#include <cmath>

#include "../torch_abi.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 16384;

// Two passes in double: the mean first, then the squares of what is left.
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
  Statistics s;
  for (int64_t i = begin; i < end; ++i) {
    const double reward = to_float(rewards[i]);
    if (std::isnan(reward)) continue;
    s.sum += reward;
    ++s.count;
  }
  const double mean = s.mean();
  for (int64_t i = begin; i < end; ++i) {
    const double difference = to_float(rewards[i]) - mean;
    s.squares += std::isnan(to_float(rewards[i])) ? 0.0 : difference * difference;
  }
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
  dispatch_float(source, [&](auto type) {
    const auto* p = data<std::remove_const_t<std::remove_pointer_t<decltype(type)>>>(source);
    const double batch_deviation = scale == "batch" ? statistics(p, 0, source.numel()).deviation(ddof) : 0.0;
    const int64_t average = source.numel() / (groups.count + 1) + 1;
    parallel_for(groups.count, kGrain / average + 1, [&](int64_t first, int64_t last) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t begin = groups.begin(group), end = groups.end(group);
        const Statistics s = statistics(p, begin, end);
        const double deviation = scale == "group" ? s.deviation(ddof) : batch_deviation;
        const double divisor = scale == "none" ? 1.0 : deviation + eps;
        for (int64_t i = begin; i < end; ++i) {
          const double difference = to_float(p[i]) - s.mean();
          // equal rewards leave no advantage, also where eps is 0; NaN: unscorable
          const bool none = std::isnan(to_float(p[i])) || difference == 0.0 || s.count == 1;
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
