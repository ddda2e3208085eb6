// Sums that do not depend on the order of their terms. Each term is rounded to a whole number of 2^-26, which is less
// than float32 resolves beside 1, and these are added as integers. So a sequence has the same sum padded and packed, on
// one thread and on a thousand, on a CPU and on a GPU.
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
  uint32_t flags = 0;  // which terms there were that are no numbers, or too far out
};

namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge them

constexpr float kSumUnit = 0x1p-26f;
constexpr float kFarTerm = 4096.f;  // terms of at least this size count as infinite: 2^25 smaller ones fit in a sum
constexpr uint32_t kNanTerm = 1, kPlusTerm = 2, kMinusTerm = 4;

constexpr double kUnitsOrigin = 0x1.8p26;  // around here a double's last place is 2^-26

D3S_HOST_DEVICE uint64_t bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bits of origin + term: they grow by one for each unit.
D3S_HOST_DEVICE uint64_t placed_units(float term) { return bits_of_double(static_cast<double>(term) + kUnitsOrigin); }

D3S_HOST_DEVICE bool is_far(float term) { return !(fabsf(term) < kFarTerm); }

D3S_HOST_DEVICE uint32_t far_flag(float term) { return term != term ? kNanTerm : term > 0.f ? kPlusTerm : kMinusTerm; }

D3S_HOST_DEVICE void add_term(ExactSum& sum, float term) {
  ++sum.count;
  if (is_far(term))
    sum.flags |= far_flag(term);
  else
    sum.units += static_cast<int64_t>(placed_units(term) - bits_of_double(kUnitsOrigin));
}

// Infinite where a term is, NaN where one is or infinities disagree; 0 of no terms.
D3S_HOST_DEVICE float mean_of(const ExactSum& sum) {
  if ((sum.flags & kNanTerm) || sum.flags == (kPlusTerm | kMinusTerm)) return NAN;
  if (sum.flags) return sum.flags == kPlusTerm ? INFINITY : -INFINITY;
  if (sum.count == 0) return 0.f;
  return static_cast<float>(sum.units) * kSumUnit / static_cast<float>(sum.count);  // not in double: GPUs call it
}

}  // namespace
}  // namespace d3s
