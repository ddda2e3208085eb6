// The search for the k-th largest order key. The search finds this key digit by digit, from the highest digit on. To
// find a digit, it counts, for each value of the digit, how many keys have this value.
#pragma once

#include <cstdint>

#include "macros.h"

namespace d3s {

struct Digit {
  static constexpr int kKeyBits = 32;
  static constexpr int kMostBits = 11;  // the maximum of `bits`: a table of int64 counts then takes 16 KiB

  int shift = 0, bits = 0;

  D3S_HOST_DEVICE int bins() const { return 1 << bits; }
  D3S_HOST_DEVICE bool is_first() const { return shift + bits == kKeyBits; }
  D3S_HOST_DEVICE int bin_of(uint32_t key) const { return static_cast<int>(key >> shift & (bins() - 1u)); }
  // Returns whether the digits of `key` above this digit equal `prefix`.
  D3S_HOST_DEVICE bool follows(uint32_t key, uint32_t prefix) const {
    return is_first() || key >> (shift + bits) == prefix;
  }
};

// The progress of the search for the k-th largest key of a segment.
struct KeySearch {
  int64_t prefix = 0;  // the digits found so far; at the end, the whole key
  int64_t left = 0;    // the rank of the wanted key among the keys that start with `prefix`; the largest has rank 1
  int64_t k = 0;       // how many keys to keep; if 0, there is nothing to search

  D3S_HOST_DEVICE void enter(int bin, int64_t above, const Digit& digit) {
    prefix = prefix << digit.bits | bin;
    left -= above;
  }
};

}  // namespace d3s
