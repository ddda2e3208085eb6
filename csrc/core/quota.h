// Computes how many values of a segment are kept for a given ratio.
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

}  // namespace d3s
