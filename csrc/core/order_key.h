// Order keys: unsigned integers that sort in the same order as the floats that they stand for.
#pragma once

#include <cstdint>

#include "float_bits.h"
#include "macros.h"

namespace d3s {
namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

// A larger float has a larger key; -0 and 0 have the same key. Key 0 stands for an absent value: a value that is masked
// out, or NaN.
constexpr uint32_t kAbsent = 0;
constexpr uint32_t kZeroKey = 0x80000000u;
constexpr uint32_t kSmallestKey = 0x007fffffu;  // -inf
constexpr uint32_t kLargestKey = 0xff800000u;   // +inf

// Returns the key of a value that is not NaN. For NaN, the result is below kSmallestKey or above kLargestKey.
D3S_HOST_DEVICE uint32_t order_key_of_number(float value) {
  const uint32_t bits = bits_of_float(value + 0.f);  // -0 becomes 0
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

D3S_HOST_DEVICE uint32_t order_key(float value) {
  const auto is_number = static_cast<uint32_t>(value == value);
  return order_key_of_number(value) & (0u - is_number);  // 0 for NaN; with SSE2, a select would not be vectorised
}

D3S_HOST_DEVICE float order_key_value(uint32_t key) {
  return float_of_bits(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

}  // namespace
}  // namespace d3s
