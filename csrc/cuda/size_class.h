// Segments by their length: which launch has them, where lengths are known on the device alone.
#pragma once

#include "../core/segments.h"
#include "cuda.h"

namespace d3s {

// Segments with a length in [shortest, longest]; another launch has the others.
struct SizeClass {
  int64_t shortest, longest;
  int64_t capacity;  // values that fit in a segment's shared memory

  D3S_HOST_DEVICE bool has(int64_t length) const { return length >= shortest && length <= longest; }
};

// Whether `longest` says something of the segments: with offsets and no bound from the caller it is all the values.
inline bool lengths_are_bounded(const Segments& segments, int64_t longest, int64_t values) {
  return !segments.ragged() || longest < values || segments.count == 1;
}

}  // namespace d3s
