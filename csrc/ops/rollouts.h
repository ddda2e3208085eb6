// The ops over groups of rollouts, as each back-end implements them: max_variance and group_advantages in cpu/ and in
// cuda/. Arguments come checked, from the files of these names in ops/. Nothing here knows torch.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "../core/float_bits.h"
#include "../core/segments.h"
#include "device.h"
#include "keep.h"

namespace d3s {

struct SegmentedValues {
  const void* values = nullptr;
  FloatType type = FloatType::kFloat32;
  Segments segments;
  int64_t total = 0;    // values in all
  int64_t longest = 0;  // a bound on the length of a segment, or `total`; a hint, which may be wrong
  const bool* mask = nullptr;
};

void max_variance_mask(const SegmentedValues& values, const Keep& keep, bool* out, Device& device);

enum class AdvantageScale { kGroup, kBatch, kNone };

struct AdvantageOptions {
  AdvantageScale scale;
  double eps;
  int64_t ddof;
  double tolerance;  // of without_spread
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

// How far apart equal rewards of this type may be after rounding, relative to the largest |reward| or to 1: some eight
// steps, or one of half precision. d3s_kernels/_segments/spread.py says the same.
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

// Whether the rewards between these two are equal up to rounding. Then all advantages are 0, whatever eps is: divided
// by a deviation that is itself rounding, differences would become advantages. Infinite rewards are never equal.
D3S_HOST_DEVICE bool without_spread(double lowest, double highest, double tolerance) {
  const double size = highest > -lowest ? highest : -lowest;  // the largest |reward|
  return size < INFINITY && highest - lowest <= tolerance * (size > 1.0 ? size : 1.0);
}

// Whether the squares of the differences from the mean show that the rewards are not equal, as in most groups they do.
// Of equal rewards none is further from the mean than the tolerance, and the rounding of the mean itself.
D3S_HOST_DEVICE bool far_apart(double mean, double squares, int64_t scored, double tolerance) {
  const double size = mean < -1.0 ? -mean : mean > 1.0 ? mean : 1.0, count = static_cast<double>(scored);
  const double far = 4.0 * (tolerance + count * DBL_EPSILON) * size;
  return squares > count * far * far;
}

// The advantage is 0 for a NaN reward, which is unscorable; for the mean itself, even if the divisor is 0; and in a
// group with only one scored reward.
D3S_HOST_DEVICE float advantage_of(double reward, double mean, int64_t scored, double divisor) {
  const double difference = reward - mean;
  const bool none = reward != reward || difference == 0.0 || scored == 1;
  return none ? 0.f : static_cast<float>(difference / divisor);
}

void group_advantages_of(const SegmentedValues& rewards, const AdvantageOptions& options, float* out, Device& device);

}  // namespace d3s
