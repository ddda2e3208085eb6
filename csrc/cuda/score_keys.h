// Computes the order keys of scores while loading the scores. So |A| * H is never stored.
#pragma once

#include "../ops/topk_mask.h"
#include "collective.h"

namespace d3s {

D3S_HOST_DEVICE float weighted(float advantage, float entropy) { return fabsf(advantage) * entropy; }

// Returns the key of a position, computed from the entropy at this position. The position must not be masked out.
__device__ inline uint32_t key_of_entropy(const Scores& scores, int64_t position, float entropy) {
  switch (scores.kind) {
    case Scores::Advantages::kNone:
      return order_key(entropy);
    case Scores::Advantages::kOne:
      return order_key(weighted(scores.advantages[0], entropy));
    case Scores::Advantages::kPerToken:
      return order_key(weighted(scores.advantages[position], entropy));
    default:
      if (scores.sequences.count == 0) return kAbsent;  // only with bad offsets
      return order_key(weighted(scores.advantages[scores.sequences.find(position)], entropy));
  }
}

// Throws if there are too many scores. Kernels store positions as 32-bit ints, and some of these positions lie past the
// last score.
inline void require_places(int64_t scores) {
  constexpr int64_t kMost = 2'000'000'000;
  if (scores > kMost)
    throw std::invalid_argument("scores: got " + std::to_string(scores) + " of them; takes at most " +
                                std::to_string(kMost) + " on a GPU");
}

// The number of vectors of four scores (`four` in names) that a thread loads before it uses the first vector.
constexpr int kFoursInFlight = 2;

// Loads scores and computes their keys. The first position of a vector must be `origin` plus a multiple of 4. If such
// vectors are aligned, each is loaded with one instruction. kLookUp matters only for per-sequence advantages. If
// kLookUp is true, the sequence of each position is looked up; if false, all positions are in one sequence. If kAtOnce
// is true, there are no per-token advantages, and the loads of scores and mask do not wait for each other.
template <bool kLookUp, bool kAtOnce = false>
class ScoreKeys {
 public:
  __device__ explicit ScoreKeys(const Scores& scores, int origin, int64_t sequence = 0)
      : scores_(scores),
        aligned_(is_aligned(scores, origin)),
        one_(scores.kind == Scores::Advantages::kPerSequence ? sequence : 0) {}

  // Loads the keys of kCount vectors, which begin at positions first, first + stride, ... Keys outside of [begin, end)
  // are kAbsent.
  template <int kCount>
  __device__ void load(int first, int stride, int begin, int end, uint4 (&keys)[kCount]) {
    const Fours fours{first, stride, begin, end, aligned_};
#pragma unroll
    for (int j = 0; j < kCount; ++j) note_scores(max(0, min(fours.place(j) + 4, end) - max(fours.place(j), begin)));
    if (scores_.keys) {
      load_words(fours, scores_.keys, kAbsent, keys);
      return;
    }
    constexpr uint32_t kNoNumber = 0x7fff7fff;  // NaN in every type; the key of NaN is kAbsent
    uint32_t present[kCount];
    if (kAtOnce && scores_.mask) load_mask(fours, present);
    float values[kCount][4];
    const auto load_halves = [&](auto tag) {
      using T = typename decltype(tag)::type;
      uint2 words[kCount];
      const auto* from = static_cast<const T*>(scores_.values);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (fours.whole(j)) {
          words[j] = *reinterpret_cast<const uint2*>(from + fours.place(j));
        } else {
          const auto half = [&](int i) {
            return fours.has(j, i) ? static_cast<uint32_t>(from[fours.place(j) + i].bits) : kNoNumber & 0xffff;
          };
          words[j] = {half(0) | half(1) << 16, half(2) | half(3) << 16};
        }
      }
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const Pair low = unpack(words[j].x, tag), high = unpack(words[j].y, tag);
        values[j][0] = low.low, values[j][1] = low.high, values[j][2] = high.low, values[j][3] = high.high;
      }
    };
    switch (scores_.type) {
      case FloatType::kBfloat16:
        load_halves(Tag<bfloat16>());
        break;
      case FloatType::kFloat16:
        load_halves(Tag<float16>());
        break;
      default:
        uint4 words[kCount];
        load_words(fours, static_cast<const uint32_t*>(scores_.values), kNoNumber, words);
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          for_each_of(words[j], [&](int i, uint32_t word) { values[j][i] = float_of_bits(word); });
    }
    weigh(fours, values);
    if constexpr (kAtOnce) {
      keys_of_numbers(values, keys);
      if (scores_.mask) leave_out(present, keys);
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        keys[j] = {order_key(values[j][0]), order_key(values[j][1]), order_key(values[j][2]), order_key(values[j][3])};
      if (scores_.mask) {
        load_mask(fours, present);
        leave_out(present, keys);
      }
    }
  }

 private:
  // The vectors that one call of load() loads.
  struct Fours {
    int first, stride, begin, end;
    bool aligned;

    __device__ int place(int j) const { return first + j * stride; }
    __device__ bool has(int j, int i) const { return place(j) + i >= begin && place(j) + i < end; }
    // Returns whether each of the vectors i to j is loaded with one instruction.
    __device__ bool whole(int i, int j) const { return aligned && place(i) >= begin && place(j) + 4 <= end; }
    __device__ bool whole(int j) const { return whole(j, j); }
  };

  __device__ static bool is_aligned(const Scores& scores, int origin) {
    const auto past = [&](const void* p, int size) { return reinterpret_cast<uintptr_t>(p) + int64_t{origin} * size; };
    const bool words = scores.keys || scores.type == FloatType::kFloat32;
    uintptr_t bits = scores.keys ? past(scores.keys, 4) : past(scores.values, words ? 4 : 2);
    bits &= words ? 15 : 7;
    if (scores.kind == Scores::Advantages::kPerToken) bits |= past(scores.advantages, 4) & 15;
    if (scores.mask) bits |= past(scores.mask, 1) & 3;
    return bits == 0;
  }

  template <class Body>
  __device__ static void for_each_of(const uint4& four, const Body& body) {
    body(0, four.x), body(1, four.y), body(2, four.z), body(3, four.w);
  }

  // Loads words of 32 bits. Words outside of [begin, end) are set to `outside`.
  template <int kCount>
  __device__ static void load_words(const Fours& fours, const uint32_t* from, uint32_t outside,
                                    uint4 (&words)[kCount]) {
    if (kAtOnce && fours.whole(0, kCount - 1)) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) words[j] = *reinterpret_cast<const uint4*>(from + fours.place(j));
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (fours.whole(j)) {
        words[j] = *reinterpret_cast<const uint4*>(from + fours.place(j));
      } else {
        const auto word = [&](int i) { return fours.has(j, i) ? from[fours.place(j) + i] : outside; };
        words[j] = {word(0), word(1), word(2), word(3)};
      }
    }
  }

  // Computes the keys as if no value were NaN. Then corrects the keys if a value is NaN, which is rare. The test for
  // NaN takes one instruction for two values.
  template <int kCount>
  __device__ static void keys_of_numbers(const float (&values)[kCount][4], uint4 (&keys)[kCount]) {
    bool numbers = true;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float (&of)[4] = values[j];
      numbers &= !((of[0] != of[0]) | (of[1] != of[1])) & !((of[2] != of[2]) | (of[3] != of[3]));
      keys[j] = {order_key_of_number(of[0]), order_key_of_number(of[1]), order_key_of_number(of[2]),
                 order_key_of_number(of[3])};
    }
    if (numbers) return;
    asm volatile("");  // without this, the compiler would run the comparisons below even if no value is NaN
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      for (uint32_t* key : {&keys[j].x, &keys[j].y, &keys[j].z, &keys[j].w})
        if (*key < kSmallestKey || *key > kLargestKey) *key = kAbsent;
  }

  // Loads one byte of the mask for each score.
  template <int kCount>
  __device__ void load_mask(const Fours& fours, uint32_t (&present)[kCount]) const {
    const auto from = [&](int j) { return scores_.mask + fours.place(j); };
    const auto word = [&](int j) { return *reinterpret_cast<const uint32_t*>(from(j)); };
    if (kAtOnce && fours.whole(0, kCount - 1)) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) present[j] = word(j);
      return;
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (fours.whole(j)) {
        present[j] = word(j);
      } else {
        present[j] = 0;
        for (int i = 0; i < 4; ++i)
          if (fours.has(j, i) && from(j)[i]) present[j] |= 1u << 8 * i;
      }
    }
  }

  // Sets the keys of masked-out positions to kAbsent.
  template <int kCount>
  __device__ static void leave_out(const uint32_t (&present)[kCount], uint4 (&keys)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (!(present[j] & 0xffu)) keys[j].x = kAbsent;
      if (!(present[j] & 0xff00u)) keys[j].y = kAbsent;
      if (!(present[j] & 0xff0000u)) keys[j].z = kAbsent;
      if (!(present[j] & 0xff000000u)) keys[j].w = kAbsent;
    }
  }

  // Multiplies each value by |A|, if there are advantages.
  template <int kCount>
  __device__ void weigh(const Fours& fours, float (&values)[kCount][4]) {
    const float* advantages = scores_.advantages;
    switch (scores_.kind) {
      case Scores::Advantages::kNone:
        return;
      case Scores::Advantages::kPerToken:
        if constexpr (!kAtOnce) {
          uint4 words[kCount];
          load_words(fours, reinterpret_cast<const uint32_t*>(advantages), 0, words);
#pragma unroll
          for (int j = 0; j < kCount; ++j)
            for_each_of(words[j],
                        [&](int i, uint32_t word) { values[j][i] = weighted(float_of_bits(word), values[j][i]); });
        }
        return;
      case Scores::Advantages::kPerSequence:
        if constexpr (kLookUp) {
#pragma unroll
          for (int j = 0; j < kCount; ++j)
#pragma unroll 1  // after four rotations, each value is back at its index
            for (int i = 0; i < 4; ++i) {
              float value = values[j][0];
              if (fours.has(j, i)) {
                if (fours.place(j) + i >= sequence_.end) sequence_ = sequence_at(scores_, fours.place(j) + i);
                value = weighted(sequence_.advantage, value);
              }
              values[j][0] = values[j][1], values[j][1] = values[j][2], values[j][2] = values[j][3];
              values[j][3] = value;
            }
          return;
        }
        [[fallthrough]];
      default:
        const float advantage = advantages[one_];
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) values[j][i] = weighted(advantage, values[j][i]);
    }
  }

  // The sequence that contains the previous position. The next position is looked up only if it is past the end of this
  // sequence, so positions must ascend.
  struct Sequence {
    float advantage = 0.f;
    int end = -1;
  };

  // This function is not inlined, since it would be a large part of each kernel's code.
  __device__ D3S_NOINLINE static Sequence sequence_at(const Scores& scores, int position) {
    const Segments& sequences = scores.sequences;
    const int64_t at = sequences.count > 0 ? sequences.find(position) : 0;
    if (at >= sequences.count) return {NAN, INT32_MAX};  // only with bad offsets; the key is then kAbsent
    return {scores.advantages[at], static_cast<int>(sequences.end(at))};
  }

  const Scores& scores_;
  bool aligned_;
  int64_t one_;  // the index of the advantage, if all positions have the same advantage
  Sequence sequence_;
};

// Calls body(four, keys) for this thread's share of the vectors that contain a position in [begin, end). `four` is the
// index of the vector. Vector 0 begins at `origin`, which is at most 3 positions before `begin`.
template <int kInFlight = kFoursInFlight, bool kLookUp, class Body>
__device__ __forceinline__ void for_scores(ScoreKeys<kLookUp> source, int origin, int begin, int end,
                                           const BlockGroup& block, const Body& body) {
  const int fours = (end - origin + 3) / 4;
#pragma unroll 1
  for (int four = block.rank; four < fours; four += kInFlight * block.size) {
    uint4 keys[kInFlight];
    source.load(origin + 4 * four, 4 * block.size, begin, end, keys);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (four + j * block.size < fours) body(four + j * block.size, keys[j]);
  }
}

}  // namespace d3s
