// This file is compiled once for each SIMD level, and once more for machines that have a dot-product instruction for
// bfloat16.
//
// A block of kRows x kVectors accumulators stays in registers while the loop goes through the inner dimension. The loop
// handles two elements at a time, since the dot-product instruction works on pairs of elements, and a 32-bit word holds
// one pair.
#include "simd.h"
#include "wide_product.h"

namespace d3s {
namespace {

#if defined(__AVX512F__) || defined(D3S_NEON)
constexpr int kRows = 8, kVectors = 3;  // 24 of 32 registers are accumulators
#else
constexpr int kRows = 4, kVectors = 2;  // 8 of 16 registers
#endif
constexpr int64_t kColumns = kVectors * kLanes;

// Returns sum + even(a) even(b) + odd(a) odd(b), where each word holds two bfloat16 elements.
inline Floats dot(Floats sum, Words a, Words b) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(D3S_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  sum = multiply_add((Floats)(a & 0xffff0000u), (Floats)(b & 0xffff0000u), sum);
  return multiply_add((Floats)(a << 16), (Floats)(b << 16), sum);
#endif
}

inline Words all_words(uint32_t word) { return word - Words{}; }

int64_t panel_words(int64_t inner) { return (inner + 1) / 2 * kColumns; }

void pack(const bfloat16* weight, int64_t stride, int64_t columns, int64_t inner, uint32_t* panel) {
  // Packs 16 words of each row at a time, so that cache lines are read whole, and written lines stay in the cache.
  constexpr int64_t kStretch = 16;
  const int64_t whole = inner / 2;
  for (int64_t begin = 0; begin < whole; begin += kStretch) {
    const int64_t end = whole - begin < kStretch ? whole : begin + kStretch;
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t w = begin; w < end; ++w) memcpy(panel + w * kColumns + c, weight + c * stride + 2 * w, 4);
  }
  if (inner % 2)
    for (int64_t c = 0; c < columns; ++c) panel[whole * kColumns + c] = weight[c * stride + inner - 1].bits;
  for (int64_t c = columns; c < kColumns; ++c)  // these columns are multiplied too, so they must be initialised
    for (int64_t w = 0; w < whole + inner % 2; ++w) panel[w * kColumns + c] = 0;
}

template <int rows>
void multiply_rows(const uint32_t* hidden, int64_t words, const uint32_t* panel, float* out, int64_t out_stride,
                   int64_t columns) {
  Floats sums[rows][kVectors] = {};
  for (int64_t w = 0; w < words; ++w) {
    Words b[kVectors];
    for (int v = 0; v < kVectors; ++v) memcpy(&b[v], panel + w * kColumns + v * kLanes, sizeof b[v]);
    for (int r = 0; r < rows; ++r) {
      const Words a = all_words(hidden[r * words + w]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = dot(sums[r][v], a, b[v]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    float row[kColumns];  // copied here first: a copy of variable size would move `sums` out of the registers
    for (int v = 0; v < kVectors; ++v) memcpy(row + v * kLanes, &sums[r][v], sizeof sums[r][v]);
    memcpy(out + r * out_stride, row, columns * sizeof(float));
  }
}

void multiply(const uint32_t* hidden, int64_t rows, const uint32_t* panel, int64_t inner, float* out,
              int64_t out_stride, int64_t columns) {
  const int64_t words = (inner + 1) / 2;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    multiply_rows<kRows>(hidden + r * words, words, panel, out + r * out_stride, out_stride, columns);
  for (; r < rows; ++r) multiply_rows<1>(hidden + r * words, words, panel, out + r * out_stride, out_stride, columns);
}

}  // namespace

namespace D3S_LEVEL {
extern const WideProduct wide_product = {kColumns, panel_words, pack, multiply};
}

}  // namespace d3s
