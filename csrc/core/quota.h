// How many values of a segment are kept: a number, or a share of the values that are present.
#pragma once

#include <cmath>
#include <cstdint>

#include "macros.h"

namespace d3s {

// keep_from_ratio returns ceil(ratio * n), but at least 1 and at most n. In binary, 0.07 is slightly larger than 7/100,
// but 7 % of 100 must be 7, not 8. So ratio * n is multiplied by 1 - slack before it is rounded up. kDoubleSlack is 4
// rounding steps of double, and kFloatSlack is 4 rounding steps of float.
constexpr double kDoubleSlack = 0x1p-50;
constexpr double kFloatSlack = 0x1p-21;

D3S_HOST_DEVICE int64_t keep_from_ratio(double ratio, int64_t n, double slack) {
  const double wanted = ceil(ratio * static_cast<double>(n) * (1.0 - slack));
  const int64_t k = wanted < 1.0 ? 1 : wanted < static_cast<double>(n) ? static_cast<int64_t>(wanted) : n;
  return k < n ? k : n;
}

// The number of values to keep in each segment.
struct Keep {
  int64_t number = 0;
  const int32_t* on_device32 = nullptr;  // if set, kernels read the number here, on the device
  const int64_t* on_device64 = nullptr;
  int64_t times = 1;  // the number of pooled segments; `number` values are kept for each of them

  D3S_HOST_DEVICE int64_t value() const { return on_device32 ? *on_device32 : on_device64 ? *on_device64 : number; }

  // Returns how many values are kept in a segment of `values` values; for pooled segments, the result may exceed
  // `values`. A number on the device may be unchecked: if it is below 1, nothing is kept.
  D3S_HOST_DEVICE int64_t of(int64_t values) const {
    const int64_t each = value();
    return each < 1 ? 0 : each < values ? each * times : values * times;
  }
};

// How many values to keep: a fixed number, or a share of the values that are present.
struct Quota {
  bool is_number = false;
  Keep number;
  double ratio = 0;
  double slack = kDoubleSlack;
  bool drop_zeros = false;         // if true, zeros among the values to keep are dropped
  const float* ratio32 = nullptr;  // if set, kernels read the ratio here, on the device
  const double* ratio64 = nullptr;

  D3S_HOST_DEVICE double value() const { return ratio32 ? *ratio32 : ratio64 ? *ratio64 : ratio; }

  // Returns how many of `present` values are kept. A ratio on the device may be unchecked: if it is not in (0, 1],
  // nothing is kept.
  D3S_HOST_DEVICE int64_t of(int64_t present) const {
    if (is_number) {
      const int64_t wanted = number.of(present);
      return wanted < present ? wanted : present;
    }
    const double share = value();
    return share > 0 && share <= 1 && present > 0 ? keep_from_ratio(share, present, slack) : 0;
  }
};

}  // namespace d3s
