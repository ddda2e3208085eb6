// Computes e^x with an error of at most one unit in the last place. The computation has only additions and
// multiplications, so results are bitwise equal on a GPU and on CPUs with vectors of any width. e^0 is exactly 1, so
// the importance ratios of an unchanged policy are exactly 1.
#pragma once

#include <cstdint>

#include "float_bits.h"
#include "macros.h"

namespace d3s {
namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

D3S_HOST_DEVICE float power_of_two(int32_t n) {  // -126 <= n <= 127
  return float_of_bits(static_cast<uint32_t>(n + 127) << 23);
}

D3S_HOST_DEVICE float exponential(float x) {
  const float inside = x < -104.f ? -104.f : x > 89.f ? 89.f : x;  // beyond, e^x is 0 or infinite; NaN stays NaN
  // Adding 1.5 * 2^23 rounds x / log 2 to an integer n. The low bits of the sum are n.
  const float magic = 12582912.f;
  const float sum = inside * 1.44269504f + magic;
  const float n = sum - magic;
  // n log 2 is subtracted in two parts, since n times the first part is exact.
  const float r = (inside - n * 0.693145752f) - n * 1.42860677e-6f;
  // For |r| <= log(2) / 2, e^r is computed as 1 + r + r^2 q(r). q is the polynomial with the smallest maximum of the
  // relative error.
  float q = 1.374611515e-3f;
  q = q * r + 8.371827193e-3f;
  q = q * r + 4.166996479e-2f;
  q = q * r + 1.666648984e-1f;
  q = q * r + 4.999998510e-1f;
  const float e = (r * r * q + r) + 1.f;
  const int32_t power = static_cast<int32_t>(bits_of_float(sum) - bits_of_float(magic));
  const int32_t half = power >> 1;  // two factors, since 2^power alone may not fit in a float
  return e * power_of_two(half) * power_of_two(power - half);
}

}  // namespace
}  // namespace d3s
