// Of n sorted values, the k with the largest variance are the first i and the last k - i, for some i in 0..k
// (Lemma 3.1 of PODS, arXiv 2504.13818; D3S, arXiv 2509.22115). The back-ends try every i.
//
// Sums are in double, and one value of the segment is subtracted from all values: otherwise large values with small
// differences would cancel (rewards of 1000 +- 0.01). With the sum S1 and the sum of squares S2 of a split, k^2 times
// its variance is k S2 - S1^2. This needs no division for each split and is exact for small whole numbers. It does not
// overflow: differences of floats are below 6.9e38, so with k <= 2^32 the result is below 1e97.
#pragma once

#include <cstdint>

#include "macros.h"

namespace d3s {
namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge them

struct Moments {
  double sum = 0.0;
  double square = 0.0;

  D3S_HOST_DEVICE void add(double value) {
    sum += value;
    square += value * value;
  }
};

D3S_HOST_DEVICE double split_spread(const Moments& low, const Moments& high, double k) {
  const double sum = low.sum + high.sum;
  return k * (low.square + high.square) - sum * sum;
}

// Splits with at least this spread count as equal to the best: rewards of 0 and 1 give dozens of splits that differ
// only by rounding. Among equal splits, the one with the fewest values from the top wins.
D3S_HOST_DEVICE double equal_spread(double best) { return best * (1.0 - 1e-12); }

}  // namespace
}  // namespace d3s
