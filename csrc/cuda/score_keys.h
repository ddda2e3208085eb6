// The order keys of scores, made while the scores are loaded: |A| * H is never stored.
#pragma once

#include "../ops/topk_mask.h"
#include "cuda.h"

namespace d3s {

D3S_HOST_DEVICE uint32_t weighted_key(float advantage, float entropy) { return order_key(fabsf(advantage) * entropy); }

// The key of a position from its entropy. The position must not be masked out.
__device__ inline uint32_t key_of_entropy(const Scores& scores, int64_t position, float entropy) {
  switch (scores.kind) {
    case Scores::Advantages::kNone:
      return order_key(entropy);
    case Scores::Advantages::kOne:
      return weighted_key(scores.advantages[0], entropy);
    case Scores::Advantages::kPerToken:
      return weighted_key(scores.advantages[position], entropy);
    default:
      if (scores.sequences.count == 0) return kAbsent;  // by unchecked offsets
      return weighted_key(scores.advantages[scores.sequences.find(position)], entropy);
  }
}

// Positions that a thread loads before it uses the first: so many loads are in flight at a time.
constexpr int kKeysInFlight = 8;

// How many of the positions first, first + stride, ... lie before `end`, at most kKeysInFlight.
D3S_HOST_DEVICE int wanted(int64_t first, int stride, int64_t end) {
  const int64_t left = end - first;
  const int span = left < int64_t{kKeysInFlight} * stride ? static_cast<int>(left) : kKeysInFlight * stride;
  return span > 0 ? (span + stride - 1) / stride : 0;
}

class ScoreKeys {
 public:
  __device__ explicit ScoreKeys(const Scores& scores) : scores_(scores) {}

  // Loads the keys of `count` positions: first, first + stride, ...
  __device__ void load(int64_t first, int stride, int count, uint32_t (&keys)[kKeysInFlight]) {
    if (scores_.keys) {
      const uint32_t* from = scores_.keys + first;
      for_wanted(count, [&](int i) { keys[i] = from[i * stride]; });
      return;
    }
    float values[kKeysInFlight];
    switch (scores_.type) {
      case FloatType::kBfloat16:
        load_values<bfloat16>(first, stride, count, values);
        break;
      case FloatType::kFloat16:
        load_values<float16>(first, stride, count, values);
        break;
      default:
        load_values<float>(first, stride, count, values);
    }
    const float* advantages = scores_.advantages;
    switch (scores_.kind) {
      case Scores::Advantages::kNone:
        for_wanted(count, [&](int i) { keys[i] = order_key(values[i]); });
        break;
      case Scores::Advantages::kOne: {
        const float one = *advantages;
        for_wanted(count, [&](int i) { keys[i] = weighted_key(one, values[i]); });
        break;
      }
      case Scores::Advantages::kPerToken:
        advantages += first;
        for_wanted(count, [&](int i) { keys[i] = weighted_key(advantages[i * stride], values[i]); });
        break;
      default:
        for_wanted(count, [&](int i) {
          const int64_t at = sequence(first + i * stride);
          keys[i] = at < scores_.sequences.count ? weighted_key(advantages[at], values[i]) : kAbsent;
        });
    }
    if (!scores_.mask) return;
    const bool* mask = scores_.mask + first;
    for_wanted(count, [&](int i) {
      if (!mask[i * stride]) keys[i] = kAbsent;
    });
  }

 private:
  template <class Body>
  __device__ static void for_wanted(int count, const Body& body) {
#pragma unroll
    for (int i = 0; i < kKeysInFlight; ++i)
      if (i < count) body(i);
  }

  template <class T>
  __device__ void load_values(int64_t first, int stride, int count, float (&values)[kKeysInFlight]) const {
    const T* from = static_cast<const T*>(scores_.values) + first;
    for_wanted(count, [&](int i) { values[i] = to_float(from[i * stride]); });
  }

  // The sequence of a position. It is cached, since the next position is mostly in the same one.
  __device__ int64_t sequence(int64_t position) {
    if (scores_.sequences.count > 0 && (position < begin_ || position >= end_)) {
      sequence_ = scores_.sequences.find(position);
      begin_ = scores_.sequences.begin(sequence_);
      end_ = scores_.sequences.end(sequence_);
    }
    return sequence_;
  }

  const Scores& scores_;
  int64_t sequence_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace d3s
