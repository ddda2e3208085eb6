// This file is compiled once for each SIMD level.
#include "topk_loops.h"

#include <cmath>

#include "simd.h"

namespace d3s {
namespace {

static_assert(kGroupsMultiple % kPair == 0, "a pair of vectors has logits of different groups");

template <class T>
int64_t places_from(const T* logits, int64_t n, float lowest, uint16_t* places) {
  const int64_t whole = n / kPair * kPair;
  const Floats bound = all(lowest);
  int64_t count = 0;
  for (int64_t i = 0; i < whole; i += kPair) {
    const FloatPair z = load_floats(logits + i);
    // Nearly always 0, since few logits of a row are among its largest.
    uint32_t lanes = lanes_from(z.a, bound) | lanes_from(z.b, bound) << kLanes;
    for (; lanes != 0; lanes &= lanes - 1) places[count++] = static_cast<uint16_t>(i + __builtin_ctz(lanes));
  }
  for (int64_t i = whole; i < n; ++i)
    if (to_float(logits[i]) >= lowest) places[count++] = static_cast<uint16_t>(i);
  return count;
}

template <class T>
void group_maxima(const T* logits, int64_t n, int64_t groups, float* maxima) {
  for (int64_t group = 0; group < groups; group += kPair) {
    FloatPair largest = {all(-INFINITY), all(-INFINITY)};
    for (int64_t begin = 0; begin + groups <= n; begin += groups) {
      const FloatPair z = load_floats(logits + begin + group);
      largest = {max_number(z.a, largest.a), max_number(z.b, largest.b)};
    }
    store_floats(maxima + group, largest);
  }
}

}  // namespace

namespace D3S_LEVEL {
extern const TopkLoops topk_loops = {{places_from<float>, group_maxima<float>},
                                     {places_from<bfloat16>, group_maxima<bfloat16>},
                                     {places_from<float16>, group_maxima<float16>}};
}

}  // namespace d3s
