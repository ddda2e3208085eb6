// How many of a segment are kept, of a share.
#pragma once

#include <cmath>
#include <cstdint>

#include "macros.h"

namespace d3s {

// ceil(ratio n), at least 1, at most n. A ratio that was rounded when it was written down must not push the product
// past a whole number (0.07 of 100 is 7): the product may be 4 rounding steps of the ratio's type too large.
constexpr double kDoubleSlack = 0x1p-50;
constexpr double kFloatSlack = 0x1p-21;

D3S_HOST_DEVICE int64_t keep_from_ratio(double ratio, int64_t n, double slack) {
  const double wanted = ceil(ratio * static_cast<double>(n) * (1.0 - slack));
  const int64_t k = wanted < 1.0 ? 1 : wanted < static_cast<double>(n) ? static_cast<int64_t>(wanted) : n;
  return k < n ? k : n;
}

}  // namespace d3s
