// The order keys of scores, made while the scores are loaded: |A| * H is never stored.
#pragma once

#include "../ops/topk_mask.h"
#include "collective.h"

namespace d3s {

D3S_HOST_DEVICE float weighted(float advantage, float entropy) { return fabsf(advantage) * entropy; }

// The key of a position from its entropy. The position must not be masked out.
__device__ inline uint32_t key_of_entropy(const Scores& scores, int64_t position, float entropy) {
  switch (scores.kind) {
    case Scores::Advantages::kNone:
      return order_key(entropy);
    case Scores::Advantages::kOne:
      return order_key(weighted(scores.advantages[0], entropy));
    case Scores::Advantages::kPerToken:
      return order_key(weighted(scores.advantages[position], entropy));
    default:
      if (scores.sequences.count == 0) return kAbsent;  // by unchecked offsets
      return order_key(weighted(scores.advantages[scores.sequences.find(position)], entropy));
  }
}

// Positions are ints, with room for a block's next turn.
inline void require_places(int64_t scores) {
  constexpr int64_t kMost = 2'000'000'000;
  if (scores > kMost)
    throw std::invalid_argument("scores: got " + std::to_string(scores) + " of them; takes at most " +
                                std::to_string(kMost) + " on a GPU");
}

// Positions that a thread loads before it uses the first: so many loads are in flight at a time.
constexpr int kKeysInFlight = 8;

// One advantage per sequence: with kLookUp, each position's sequence is looked up; without, all are of one sequence.
template <bool kLookUp>
class ScoreKeys {
 public:
  __device__ explicit ScoreKeys(const Scores& scores, int64_t sequence = 0)
      : scores_(scores), one_(scores.kind == Scores::Advantages::kPerSequence ? sequence : 0) {}

  // Loads the keys of the positions first, first + stride, ... that lie before `end`, and kAbsent for those that do
  // not.
  __device__ void load(int first, int stride, int end, uint32_t (&keys)[kKeysInFlight]) {
    note_scores(max(0, min(kKeysInFlight, (end - first + stride - 1) / stride)));
    const auto for_inside = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kKeysInFlight; ++i)
        if (first + i * stride < end) body(i, first + i * stride);
    };
#pragma unroll
    for (int i = 0; i < kKeysInFlight; ++i) keys[i] = kAbsent;
    if (scores_.keys) {
      for_inside([&](int i, int position) { keys[i] = scores_.keys[position]; });
      return;
    }
    float values[kKeysInFlight];
    const auto load_values = [&](auto tag) {
      const auto* from = static_cast<const typename decltype(tag)::type*>(scores_.values);
      for_inside([&](int i, int position) { values[i] = to_float(from[position]); });
    };
    switch (scores_.type) {
      case FloatType::kBfloat16:
        load_values(Tag<bfloat16>());
        break;
      case FloatType::kFloat16:
        load_values(Tag<float16>());
        break;
      default:
        load_values(Tag<float>());
    }
    weigh(values, for_inside);
    for_inside([&](int i, int position) {
      if (!scores_.mask || scores_.mask[position]) keys[i] = order_key(values[i]);
    });
  }

 private:
  // |A| * H of each value, if there are advantages.
  template <class ForInside>
  __device__ void weigh(float (&values)[kKeysInFlight], const ForInside& for_inside) {
    const float* advantages = scores_.advantages;
    switch (scores_.kind) {
      case Scores::Advantages::kNone:
        return;
      case Scores::Advantages::kPerToken:
        for_inside([&](int i, int position) { values[i] = weighted(advantages[position], values[i]); });
        return;
      case Scores::Advantages::kPerSequence:
        if constexpr (kLookUp) {
          for_inside([&](int i, int position) {
            if (position >= sequence_.end) sequence_ = sequence_at(scores_, position);
            values[i] = weighted(sequence_.advantage, values[i]);
          });
          return;
        }
        [[fallthrough]];
      default:
        for_inside([&, advantage = advantages[one_]](int i, int) { values[i] = weighted(advantage, values[i]); });
    }
  }

  // The sequence of the latest position. It is looked up anew only past its end, so positions have to ascend.
  struct Sequence {
    float advantage = 0.f;
    int end = -1;
  };

  // Not inlined, because it would be a large part of each kernel's code.
  __device__ D3S_NOINLINE static Sequence sequence_at(const Scores& scores, int position) {
    const Segments& sequences = scores.sequences;
    const int64_t at = sequences.count > 0 ? sequences.find(position) : 0;
    if (at >= sequences.count) return {NAN, INT32_MAX};  // by unchecked offsets: an absent key
    return {scores.advantages[at], static_cast<int>(sequences.end(at))};
  }

  const Scores& scores_;
  int64_t one_;  // the place of the advantage that all positions have, if they have the same
  Sequence sequence_;
};

// body(position, key) for the thread's share of [begin, end).
template <bool kLookUp, class Body>
__device__ void for_scores(ScoreKeys<kLookUp> source, int begin, int end, const BlockGroup& block, const Body& body) {
  for (int first = begin + block.rank; first < end; first += kKeysInFlight * block.size) {
    uint32_t keys[kKeysInFlight];
    source.load(first, block.size, end, keys);
#pragma unroll
    for (int i = 0; i < kKeysInFlight; ++i)
      if (first + i * block.size < end) body(first + i * block.size, keys[i]);
  }
}

}  // namespace d3s
