// Reads vectors of 16 bytes from a row that may be misaligned. Which elements a thread loads depends only on their
// positions in the row, so a row's result is bitwise equal at any address.
#pragma once

#include "cuda.h"

namespace d3s {

// A word of -inf logits: one logit in float32, or two logits in half precision. Such words fill vectors past the end of
// a row, and add nothing to the sums.
template <class T>
constexpr uint32_t kFillWord = 0xff800000u;  // float
template <>
inline constexpr uint32_t kFillWord<bfloat16> = 0xff80ff80u;
template <>
inline constexpr uint32_t kFillWord<float16> = 0xfc00fc00u;

D3S_HOST_DEVICE uint32_t bits_of(float value) { return bits_of_float(value); }
D3S_HOST_DEVICE uint32_t bits_of(bfloat16 value) { return value.bits; }
D3S_HOST_DEVICE uint32_t bits_of(float16 value) { return value.bits; }

// Returns the address modulo 16.
D3S_HOST_DEVICE int misalignment(const void* p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15); }

// Returns the number of elements from p to the next address that is a multiple of 16.
template <class T>
D3S_HOST_DEVICE int elements_to_vector(const T* p) {
  return (16 - misalignment(p)) % 16 / static_cast<int>(sizeof(T));
}

// Returns 16 of the 32 bytes of two neighbouring vectors, from offset `bytes` on. `bytes` must be even and below 16.
__device__ __forceinline__ uint4 shifted(const uint4& first, const uint4& second, int bytes) {
  uint32_t w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  const bool by_one = bytes & 4, by_two = bytes & 8;
  const int bits = bytes % 4 * 8;
#pragma unroll
  for (int i = 0; i < 7; ++i) w[i] = by_one ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = by_two ? w[i + 2] : w[i];
  return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                    __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

// A row of elements that is read 16 bytes at a time. Indices are ints, since registers are scarce. So the length of the
// row plus the length of a slice must fit in an int.
template <class T, bool kAligned>
class RowReader {
 public:
  __device__ RowReader(const T* row, int columns)
      : row_(row), columns_(columns), shift_(kAligned ? 0 : misalignment(row)) {}

  // Returns whether the `count` elements from `begin` on are in the row. In a misaligned row, whole() also reads
  // neighbouring elements, which must be in the row too. One side of the comparison is `begin` alone, so that the other
  // side is computed once, before the loop.
  __device__ bool inside(int begin, int count) const {
    constexpr int margin = kAligned ? 0 : kPerVector<T>;
    return (kAligned || begin >= margin) && begin <= columns_ - margin - count;
  }

  // Loads the vector of elements from index i on. inside() must be true for these elements.
  __device__ uint4 whole(int i) const {
    if (kAligned) return load_streaming(reinterpret_cast<const uint4*>(row_ + i));
    const auto* p = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(row_ + i) - shift_);
    return shifted(load_cached(p), load_cached(p + 1), shift_);
  }

  // Like whole(), for a vector that the block reads again soon.
  __device__ uint4 kept(int i) const {
    return kAligned ? load_cached(reinterpret_cast<const uint4*>(row_ + i)) : whole(i);
  }

  // Like whole(), but also near the ends of the row. There, elements are read one by one, and are -inf past the end.
  __device__ uint4 edge(int i) const {
    if (inside(i, kPerVector<T>)) return whole(i);
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = kFillWord<T>;
#pragma unroll
      for (int part = 0; part < kPerWord; ++part) {
        const int place = i + j * kPerWord + part;
        if (place >= columns_) continue;
        if constexpr (kPerWord == 1)
          w[j] = bits_of(row_[place]);
        else
          w[j] = (w[j] & ~(0xffffu << part * 16)) | bits_of(row_[place]) << part * 16;
      }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }

 private:
  const T* row_;
  int columns_;
  int shift_;
};

// Calls body(z) for each pair of neighbouring elements of a vector, in order.
template <class T, class Body>
__device__ __forceinline__ void for_pairs(const uint4& v, const Body& body) {
  if constexpr (sizeof(T) == 4) {
    body(Pair{float_of_bits(v.x), float_of_bits(v.y)});
    body(Pair{float_of_bits(v.z), float_of_bits(v.w)});
  } else {
    body(unpack(v.x, Tag<T>()));
    body(unpack(v.y, Tag<T>()));
    body(unpack(v.z, Tag<T>()));
    body(unpack(v.w, Tag<T>()));
  }
}

// Calls body(z) for each element of a vector, in order.
template <class T, class Body>
__device__ __forceinline__ void for_elements(const uint4& v, const Body& body) {
  for_pairs<T>(v, [&](Pair z) {
    body(z.low);
    body(z.high);
  });
}

// Packs elements into a vector.
template <class T>
__device__ __forceinline__ uint4 vector_of(const float (&v)[kPerVector<T>]) {
  if constexpr (kPerVector<T> == 4)
    return make_uint4(bits_of_float(v[0]), bits_of_float(v[1]), bits_of_float(v[2]), bits_of_float(v[3]));
  else
    return make_uint4(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
}

// Returns the largest element of kCount vectors. NaN is ignored.
template <class T, int kCount>
__device__ __forceinline__ float largest(const uint4 (&v)[kCount]) {
  if constexpr (sizeof(T) == 4) {
    float m = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) for_elements<T>(v[i], [&](float z) { m = fmaxf(m, z); });
    return m;
  } else {
    uint32_t m = packed_max<T>(packed_max<T>(v[0].x, v[0].y), packed_max<T>(v[0].z, v[0].w));
#pragma unroll
    for (int i = 1; i < kCount; ++i)
      m = packed_max<T>(m, packed_max<T>(packed_max<T>(v[i].x, v[i].y), packed_max<T>(v[i].z, v[i].w)));
    const Pair of_halves = unpack(m, Tag<T>());
    return fmaxf(of_halves.low, of_halves.high);
  }
}

}  // namespace d3s
