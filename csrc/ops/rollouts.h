// The ops over groups of rollouts, as each back-end implements them: max_variance and group_advantages in cpu/ and in
// cuda/. Arguments come checked, from the files of these names in ops/. Nothing here knows torch.
#pragma once

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

D3S_KERNEL(void max_variance_mask(const SegmentedValues& values, const Keep& keep, bool* out, Device& device))

enum class AdvantageScale { kGroup, kBatch, kNone };

struct AdvantageOptions {
  AdvantageScale scale;
  double eps;
  int64_t ddof;
};

// The advantage is 0 for a NaN reward, which is unscorable; for equal rewards, even if eps is 0; and in a group with
// only one scored reward.
D3S_HOST_DEVICE float advantage_of(double reward, double mean, int64_t scored, double divisor) {
  const double difference = reward - mean;
  const bool none = reward != reward || difference == 0.0 || scored == 1;
  return none ? 0.f : static_cast<float>(difference / divisor);
}

D3S_KERNEL(void group_advantages_of(const SegmentedValues& rewards, const AdvantageOptions& options, float* out,
                                    Device& device))

}  // namespace d3s
