// The order keys of scores, made as they are loaded: |A| * H is never stored.
#pragma once

#include "../ops/selection.h"
#include "cuda.h"

namespace d3s {

// What a thread remembers from one position to the next, which is a little further on.
class ScoreKeys {
 public:
  __device__ explicit ScoreKeys(const Scores& scores) : scores_(scores) {}

  __device__ uint32_t operator()(int64_t position) {
    if (scores_.mask && !scores_.mask[position]) return kAbsent;
    const float score = value(position);
    switch (scores_.kind) {
      case Scores::Advantages::kNone:
        return order_key(score);
      case Scores::Advantages::kOne:
        return weighted(scores_.advantages[0], score);
      case Scores::Advantages::kPerToken:
        return weighted(scores_.advantages[position], score);
      default:
        return weighted(scores_.advantages[sequence(position)], score);
    }
  }

 private:
  __device__ static uint32_t weighted(float advantage, float entropy) { return order_key(fabsf(advantage) * entropy); }

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
