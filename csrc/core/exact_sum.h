// Sums that do not depend on the order of their terms. Each term is rounded to a whole number of units of 2^-26, and
// these numbers are added as integers. Near 1, the steps of float32 are larger than this unit. So the sum of a sequence
// does not depend on padding or packing, on the number of threads, or on the device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "float_bits.h"
#include "macros.h"

namespace d3s {

struct ExactSum {
  int64_t units = 0;
  uint32_t count = 0;
  uint32_t flags = 0;  // set by terms that are NaN, infinite or too large to add
};

namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

constexpr float kSumUnit = 0x1p-26f;
// A term counts as infinite if its absolute value is at least kFarTerm. The sum of 2^25 smaller terms fits in an int64.
constexpr float kFarTerm = 4096.f;
constexpr uint32_t kNanTerm = 1, kPlusTerm = 2, kMinusTerm = 4;

constexpr double kUnitsOrigin = 0x1.8p26;  // near this value, doubles are 2^-26 apart

D3S_HOST_DEVICE uint64_t bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Returns the bits of kUnitsOrigin + term as an integer. The integer grows by one for each unit (2^-26) of the term.
D3S_HOST_DEVICE uint64_t placed_units(float term) { return bits_of_double(static_cast<double>(term) + kUnitsOrigin); }

// Returns the number of units in a term. is_far(term) must be false.
D3S_HOST_DEVICE int64_t near_units(float term) {
  return static_cast<int64_t>(placed_units(term) - bits_of_double(kUnitsOrigin));
}

D3S_HOST_DEVICE bool is_far(float term) { return !(fabsf(term) < kFarTerm); }

D3S_HOST_DEVICE uint32_t far_flag(float term) { return term != term ? kNanTerm : term > 0.f ? kPlusTerm : kMinusTerm; }

D3S_HOST_DEVICE void add_term(ExactSum& sum, float term) {
  ++sum.count;
  if (is_far(term))
    sum.flags |= far_flag(term);
  else
    sum.units += near_units(term);
}

// Returns the mean of the terms, or 0 if there are no terms. The mean is NaN if a term is NaN, or if there are infinite
// terms of both signs. Otherwise, if a term is infinite, the mean is infinite too.
D3S_HOST_DEVICE float mean_of(const ExactSum& sum) {
  if ((sum.flags & kNanTerm) || sum.flags == (kPlusTerm | kMinusTerm)) return NAN;
  if (sum.flags) return sum.flags == kPlusTerm ? INFINITY : -INFINITY;
  if (sum.count == 0) return 0.f;
  return static_cast<float>(sum.units) * kSumUnit / static_cast<float>(sum.count);  // in float: double is slow on GPUs
}

}  // namespace
}  // namespace d3s
