// The kernels over groups of rollouts, implemented in the files max_variance and group_advantages of cpu/ and cuda/.
// The files of the same names in ops/ have checked the arguments. Nothing here depends on torch.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "../core/float_bits.h"
#include "../core/quota.h"
#include "../core/segments.h"
#include "device.h"

namespace d3s {

struct SegmentedValues {
  const void* values = nullptr;
  FloatType type = FloatType::kFloat32;
  Segments segments;
  int64_t total = 0;    // the number of values in all segments
  int64_t longest = 0;  // a bound on the length of a segment, or `total`; it is a hint, and may be wrong
  const bool* mask = nullptr;
};

void max_variance_mask(const SegmentedValues& values, const Keep& keep, bool* out, Device& device);

enum class AdvantageScale { kGroup, kBatch, kNone };

struct AdvantageOptions {
  AdvantageScale scale;
  double eps;
  int64_t ddof;
  double tolerance;  // the argument `tolerance` of without_spread
};

// Calls `body` with the Tag of the element type of rewards, which may be double.
template <class Body>
void dispatch_rewards(FloatType type, const Body& body) {
  if (type == FloatType::kFloat64)
    body(Tag<double>());
  else
    dispatch_float(type, body);
}

D3S_HOST_DEVICE double number_of(double reward) { return reward; }
template <class T>
D3S_HOST_DEVICE float number_of(T reward) {
  return to_float(reward);
}

// Returns the tolerance for equal rewards. Rewards count as equal if they differ from each other by at most the
// tolerance times max(largest |reward|, 1). The tolerance is about eight rounding steps of float64 or float32, but only
// one rounding step of bfloat16 or float16. TOLERANCE in d3s_kernels/_segments/segments.py has the same values.
constexpr double spread_tolerance(FloatType type) {
  switch (type) {
    case FloatType::kFloat64:
      return 2e-15;
    case FloatType::kBfloat16:
      return 0x1p-7;
    case FloatType::kFloat16:
      return 0x1p-10;
    default:
      return 1e-6;
  }
}

// Returns whether rewards between `lowest` and `highest` are equal except for rounding. If they are equal, all
// advantages are set to 0, whatever eps is. Without this rule, rounding errors would be divided by their own standard
// deviation, and would look like advantages. Infinite rewards never count as equal.
D3S_HOST_DEVICE bool without_spread(double lowest, double highest, double tolerance) {
  const double size = highest > -lowest ? highest : -lowest;  // the largest |reward|
  return size < INFINITY && highest - lowest <= tolerance * (size > 1.0 ? size : 1.0);
}

// Returns whether `squares`, the sum of the squared differences from the mean, is too large for equal rewards. This is
// so in most groups, and then the lowest and the highest reward need not be found. Equal rewards differ from their mean
// by at most the tolerance plus the rounding error of the mean.
D3S_HOST_DEVICE bool far_apart(double mean, double squares, int64_t scored, double tolerance) {
  const double size = mean < -1.0 ? -mean : mean > 1.0 ? mean : 1.0, count = static_cast<double>(scored);
  const double far = 4.0 * (tolerance + count * DBL_EPSILON) * size;
  return squares > count * far * far;
}

// Returns the advantage of a reward. It is 0 in three cases: the reward is NaN (unscorable); the group has no other
// scored reward; or the reward equals the mean, even if the divisor is 0.
D3S_HOST_DEVICE float advantage_of(double reward, double mean, int64_t scored, double divisor) {
  const double difference = reward - mean;
  const bool none = reward != reward || difference == 0.0 || scored == 1;
  return none ? 0.f : static_cast<float>(difference / divisor);
}

void group_advantages_of(const SegmentedValues& rewards, const AdvantageOptions& options, float* out, Device& device);

}  // namespace d3s
