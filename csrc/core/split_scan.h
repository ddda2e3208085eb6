// Of n sorted values, the k values with the largest variance are the first i and the last k - i values, for some i in
// 0..k (Lemma 3.1 of PODS, arXiv 2504.13818; D3S, arXiv 2509.22115). The back-ends try every i.
//
// Let S1 be the sum of the k values, and S2 the sum of their squares. The spread k S2 - S1^2 is k^2 times the variance
// of the k values. The spread needs no division for each split, and is exact for small integers. Sums are in double,
// and one value of the segment is first subtracted from all values. Without this subtraction, k S2 and S1^2 would
// cancel if large values have small differences (rewards of 1000 +- 0.01). Differences of floats are below 6.9e38, so
// for k <= 2^32, the spread is below 1e97 and does not overflow.
#pragma once

#include <cstdint>

#include "macros.h"

namespace d3s {
namespace {  // internal linkage: each SIMD level compiles its own copy, and the linker must not merge these copies

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

// Returns the smallest spread that counts as equal to the spread of the best split. Without this tolerance, rounding
// errors would choose the split: for rewards of 0 and 1, the spreads of dozens of splits differ only by rounding
// errors. Of the splits that count as equal, the split with the fewest values from the high end is chosen.
D3S_HOST_DEVICE double equal_spread(double best) { return best * (1.0 - 1e-12); }

}  // namespace
}  // namespace d3s
