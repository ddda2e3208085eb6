// Loops that look for the largest logits of a slice. There is one table of these loops for each SIMD level.
#pragma once

#include <cstdint>

#include "../core/float_bits.h"

namespace d3s {

constexpr int64_t kGroupsMultiple = 32;  // the number of logits in the widest pair of vectors

template <class T>
struct TopkLoopsOf {
  // Writes the indices of the logits that are at least `lowest`, in order, and returns how many there are. `places`
  // must have room for n indices. n must be at most 65,536.
  int64_t (*places_from)(const T* logits, int64_t n, float lowest, uint16_t* places);
  // maxima[g] = the largest of the logits g, g + groups, g + 2 groups and so on; -inf if all of them are NaN. Leaves
  // out the last n % groups logits. `groups` must be a multiple of kGroupsMultiple.
  void (*group_maxima)(const T* logits, int64_t n, int64_t groups, float* maxima);
};

struct TopkLoops {
  TopkLoopsOf<float> float32;
  TopkLoopsOf<bfloat16> bf16;
  TopkLoopsOf<float16> fp16;

  const TopkLoopsOf<float>& of(Tag<float>) const { return float32; }
  const TopkLoopsOf<bfloat16>& of(Tag<bfloat16>) const { return bf16; }
  const TopkLoopsOf<float16>& of(Tag<float16>) const { return fp16; }
};

const TopkLoops& topk_loops();  // returns the table for simd_level()

}  // namespace d3s
