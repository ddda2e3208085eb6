// The types bfloat16 and float16, which are stored as bits, and their conversions from and to float. A conversion
// rounds to the nearest value, and ties to even. torch's types are not used, because the CUDA kernels and the SIMD
// loops are compiled without torch.
#pragma once

#include <cstdint>
#include <cstring>

#include "macros.h"

namespace d3s {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

enum class FloatType { kFloat32, kBfloat16, kFloat16, kFloat64 };  // only rewards may be kFloat64

template <class T>
struct Tag {  // passes a type as an argument
  using type = T;
};

// Calls `body` with the Tag of the element type. In `body`, `typename decltype(tag)::type` is this type.
template <class Body>
decltype(auto) dispatch_float(FloatType type, Body&& body) {
  switch (type) {
    case FloatType::kBfloat16:
      return body(Tag<bfloat16>());
    case FloatType::kFloat16:
      return body(Tag<float16>());
    default:
      return body(Tag<float>());
  }
}

namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

D3S_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

D3S_HOST_DEVICE uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

D3S_HOST_DEVICE float to_float(float value) { return value; }

D3S_HOST_DEVICE float to_float(bfloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

D3S_HOST_DEVICE float to_float(float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of_bits(sign | magnitude | 0x7f800000u);  // infinity, NaN
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude) * 0x1p112f));     // exponent bias 15 -> 127
}

template <class T>
D3S_HOST_DEVICE T from_float(float value);

template <>
D3S_HOST_DEVICE float from_float<float>(float value) {
  return value;
}

template <>
D3S_HOST_DEVICE bfloat16 from_float<bfloat16>(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = value == value ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u;
  return {static_cast<uint16_t>(rounded >> 16)};
}

template <>
D3S_HOST_DEVICE float16 from_float<float16>(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = float_of_bits(bits & 0x7fffffffu);
  if (!(magnitude == magnitude)) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 65520.f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude <
      0x1p-14f) {  // float16 subnormals and floats in [0.5, 1) both have spacing 2^-24, so adding 0.5 rounds
    const float sum = magnitude + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of_float(sum) - bits_of_float(0.5f)))};
  }
  const uint32_t rounded = bits_of_float(magnitude) + 0xfffu + ((bits >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)))};
}

}  // namespace
}  // namespace d3s
