// This file is compiled once for each SIMD level. The compiler vectorises the loops for the level's vector width.
#include "order_key_loops.h"

#include <cfloat>
#include <cmath>
#include <cstring>

#include "../core/order_key.h"

namespace d3s {
namespace {

template <class T, class Advantage, class Mask>
int64_t keys_of(const T* scores, Advantage advantage, Mask present, int64_t n, uint32_t* keys) {
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = order_key(fabsf(advantage(i)) * to_float(scores[i])) & present(i);
    keys[i] = key;
    count += key != kAbsent;
  }
  return count;
}

template <class T>
int64_t from_scores(const T* scores, const float* advantages, float advantage, const bool* mask, int64_t n,
                    uint32_t* keys) {
  const auto each = [=](int64_t i) { return advantages[i]; };
  const auto one = [=](int64_t) { return advantage; };
  const auto* flags = reinterpret_cast<const uint8_t*>(mask);  // a bool view of other data may have any byte value
  const auto masked = [=](int64_t i) { return 0u - (flags[i] != 0); };
  const auto all = [](int64_t) { return ~0u; };
  if (advantages) return mask ? keys_of(scores, each, masked, n, keys) : keys_of(scores, each, all, n, keys);
  return mask ? keys_of(scores, one, masked, n, keys) : keys_of(scores, one, all, n, keys);
}

template <class T>
int64_t finite_keys(const T* values, const bool* mask, int64_t n, uint32_t* keys) {
  const auto* flags = reinterpret_cast<const uint8_t*>(mask);
  const auto write = [=](const auto& present) {
    uint32_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float value = to_float(values[i]);
      const uint32_t usable = (0u - static_cast<uint32_t>(fabsf(value) <= FLT_MAX)) & present(i);
      keys[i] = order_key(value) | ~usable;
      count += usable & 1;
    }
    return int64_t{count};
  };
  return mask ? write([=](int64_t i) { return 0u - (flags[i] != 0); }) : write([](int64_t) { return ~0u; });
}

int64_t count_from(const uint32_t* keys, int64_t n, uint32_t pivot) {
  // 32-bit counters are as wide as the keys, so the loop takes two instructions per vector. A block is too short to
  // overflow the counters.
  constexpr int64_t block = int64_t{1} << 30;
  int64_t total = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = n - begin < block ? n : begin + block;
    uint32_t count = 0;
    for (int64_t i = begin; i < end; ++i) count += keys[i] >= pivot;
    total += count;
  }
  return total;
}

int64_t copy_between(const uint32_t* keys, int64_t n, uint32_t low, uint32_t high, uint32_t* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    out[count] = keys[i];  // every key is stored, but `count` advances only for a key in range: no branch to mispredict
    count += keys[i] - low <= high - low;
  }
  return count;
}

// For each of kColumns keys, counts how many of the n keys are smaller. kColumns is small, so the counters stay in
// registers.
template <int kColumns>
void count_block_below(const uint32_t* keys, int64_t n, const uint32_t* columns, uint32_t* below) {
  uint32_t counts[kColumns] = {}, own[kColumns];
  memcpy(own, columns, sizeof own);
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t key = keys[j];
    for (int i = 0; i < kColumns; ++i) counts[i] += key < own[i];
  }
  memcpy(below, counts, sizeof counts);
}

void count_below(const uint32_t* keys, int64_t n, uint32_t* below) {
  constexpr int kMost = 4 * kKeysPadding;
  int64_t i = 0;
  for (; n - i > kMost - kKeysPadding; i += kMost) count_block_below<kMost>(keys, n, keys + i, below + i);
  for (; i < n; i += kKeysPadding) count_block_below<kKeysPadding>(keys, n, keys + i, below + i);
}

void write_mask(const uint32_t* keys, int64_t n, uint32_t pivot, bool* mask) {
  auto* flags = reinterpret_cast<uint8_t*>(mask);
  for (int64_t i = 0; i < n; ++i) flags[i] = keys[i] >= pivot;
}

uint32_t lowest_from(const uint32_t* keys, int64_t n, uint32_t pivot) {
  // If a key is below the pivot, the unsigned difference keys[i] - pivot wraps around. The difference is then larger
  // than for any key that is at least the pivot.
  uint32_t least = UINT32_MAX;
  for (int64_t i = 0; i < n; ++i) least = keys[i] - pivot < least ? keys[i] - pivot : least;
  return least <= UINT32_MAX - pivot ? pivot + least : UINT32_MAX;
}

}  // namespace

namespace D3S_LEVEL {
extern const OrderKeyLoops order_key_loops = {from_scores<float>,
                                              from_scores<bfloat16>,
                                              from_scores<float16>,
                                              finite_keys<float>,
                                              finite_keys<bfloat16>,
                                              finite_keys<float16>,
                                              count_from,
                                              copy_between,
                                              lowest_from,
                                              count_below,
                                              write_mask};
}

}  // namespace d3s
