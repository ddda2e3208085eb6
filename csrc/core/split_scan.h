// The k of n sorted values with the largest variance are the first i and the last k - i, for one i in 0..k
// (Lemma 3.1 of PODS, arXiv 2504.13818; D3S, arXiv 2509.22115). Which i, is found by trying all.
//
// Sums are double and of values less a value of the segment, else large values with small differences cancel
// (rewards of 1000 +- 0.01). k times the variance of a split is S2 - S1^2 / k.
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
  return (low.square + high.square) - sum * sum / k;
}

// Splits this close to the best count as equal: rewards of 0 and 1 tie by the dozen, up to rounding.
// Among equals the one with the fewest from the top wins.
D3S_HOST_DEVICE double equal_spread(double best) { return best * (1.0 - 1e-12); }

}  // namespace
}  // namespace d3s
