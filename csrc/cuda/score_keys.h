// The order keys of scores, made as they are loaded: |A| * H is never stored.
#pragma once

#include "../ops/selection.h"
#include "cuda.h"

namespace d3s {

D3S_HOST_DEVICE uint32_t weighted_key(float advantage, float entropy) { return order_key(fabsf(advantage) * entropy); }

// The key of a position whose entropy is at hand, and which is not masked.
__device__ inline uint32_t key_of_entropy(const Scores& scores, int64_t position, float entropy) {
  switch (scores.kind) {
    case Scores::Advantages::kNone:
      return order_key(entropy);
    case Scores::Advantages::kOne:
      return weighted_key(scores.advantages[0], entropy);
    case Scores::Advantages::kPerToken:
      return weighted_key(scores.advantages[position], entropy);
    default:
      return weighted_key(scores.advantages[scores.sequences.find(position)], entropy);
  }
}

// What a thread remembers from one position to the next, which is a little further on.
class ScoreKeys {
 public:
  __device__ explicit ScoreKeys(const Scores& scores) : scores_(scores) {}

  __device__ uint32_t operator()(int64_t position) {
    if (scores_.keys) return scores_.keys[position];
    if (scores_.mask && !scores_.mask[position]) return kAbsent;
    const float score = value(position);
    if (scores_.kind == Scores::Advantages::kPerSequence)
      return weighted_key(scores_.advantages[sequence(position)], score);
    return key_of_entropy(scores_, position, score);
  }

 private:
  __device__ float value(int64_t position) const {
    switch (scores_.type) {
      case FloatType::kBfloat16:
        return to_float(static_cast<const bfloat16*>(scores_.values)[position]);
      case FloatType::kFloat16:
        return to_float(static_cast<const float16*>(scores_.values)[position]);
      default:
        return static_cast<const float*>(scores_.values)[position];
    }
  }

  __device__ int64_t sequence(int64_t position) {
    if (position < begin_ || position >= end_) {
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
