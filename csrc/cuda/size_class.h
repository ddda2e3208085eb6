// Decides from a segment's length which launch handles the segment. The host does not always know the lengths.
#pragma once

#include "../core/segments.h"
#include "cuda.h"

namespace d3s {

// A launch handles the segments with a length in [shortest, longest].
struct SizeClass {
  int64_t shortest, longest;
  int64_t holds;  // a segment of up to this many values fits in registers or shared memory

  D3S_HOST_DEVICE bool has(int64_t length) const { return length >= shortest && length <= longest; }
};

// Returns whether `longest` is a useful bound on the lengths. If the caller gave no bound, `longest` equals `values`.
inline bool lengths_are_bounded(const Segments& segments, int64_t longest, int64_t values) {
  return !segments.ragged() || longest < values || segments.count == 1;
}

}  // namespace d3s
