// group_advantages computes (reward - mean of the reward's group) / (standard deviation + eps). A NaN reward means that
// the rollout could not be scored. Such a reward is left out of the statistics, and its advantage is 0.
#include <algorithm>
#include <cmath>

#include "../ops/rollouts.h"
#include "../torch_abi.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 16384;

// Two passes in double precision compute the mean, and the sum of the squared differences from the mean. Each pass uses
// four separate sums to hide the latency of an addition. Only the index of a reward in its group decides to which of
// the four sums the reward is added.
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
    const double reward = number_of(rewards[i]);
    const bool usable = reward == reward;
    sums[(i - begin) % kParts] += usable ? reward : 0.0;
    count += usable;
  }
  Statistics s;
  s.count = count;
  s.sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const double mean = s.mean();
  for (int64_t i = begin; i < end; ++i) {
    const double reward = number_of(rewards[i]);
    const double difference = reward == reward ? reward - mean : 0.0;
    squares[(i - begin) % kParts] += difference * difference;
  }
  s.squares = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return s;
}

// Returns whether the rewards are equal except for rounding.
template <class T>
bool all_equal(const T* rewards, int64_t begin, int64_t end, const Statistics& s, double tolerance) {
  if (far_apart(s.mean(), s.squares, s.count, tolerance)) return false;
  double lowest = INFINITY, highest = -INFINITY;
  for (int64_t i = begin; i < end; ++i) {
    const double reward = number_of(rewards[i]);
    if (!(reward < lowest || reward > highest)) continue;  // most rewards are NaN, or within the range so far
    lowest = std::min(lowest, reward);
    highest = std::max(highest, reward);
  }
  return without_spread(lowest, highest, tolerance);
}

}  // namespace

void group_advantages_of(const SegmentedValues& rewards, const AdvantageOptions& options, float* out, Device&) {
  dispatch_rewards(rewards.type, [&](auto tag) {
    const auto* p = static_cast<const typename decltype(tag)::type*>(rewards.values);
    const double batch_deviation =
        options.scale == AdvantageScale::kBatch ? statistics(p, 0, rewards.total).deviation(options.ddof) : 0.0;
    parallel_segments(rewards.segments, rewards.total, kGrain, [&](int64_t first, int64_t last) {
      for (int64_t group = first; group < last; ++group) {
        const int64_t begin = rewards.segments.begin(group), end = rewards.segments.end(group);
        const Statistics s = statistics(p, begin, end);
        if (all_equal(p, begin, end, s, options.tolerance)) {
          std::fill(out + begin, out + end, 0.f);
          continue;
        }
        const double deviation = options.scale == AdvantageScale::kGroup ? s.deviation(options.ddof) : batch_deviation;
        const double divisor = options.scale == AdvantageScale::kNone ? 1.0 : deviation + options.eps;
        for (int64_t i = begin; i < end; ++i) out[i] = advantage_of(number_of(p[i]), s.mean(), s.count, divisor);
      }
    });
  });
}

}  // namespace d3s
