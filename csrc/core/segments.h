// Segments of a 1-D array: rows of equal length, or the parts between neighbouring offsets (like flash-attention's
// cu_seqlens).
#pragma once

#include <cstdint>

#include "macros.h"

namespace d3s {

struct Segments {
  int64_t count = 0;
  int64_t length = 0;                  // the length of each segment, if there are no offsets
  const int32_t* offsets32 = nullptr;  // at most one of offsets32 and offsets64 is set
  const int64_t* offsets64 = nullptr;

  int64_t limit = 0;  // the number of values, if there are offsets

  // Offsets on a GPU may be unchecked. begin() and end() clamp these offsets, so bad offsets give wrong segments, but
  // no access out of bounds.
  D3S_HOST_DEVICE int64_t begin(int64_t i) const {
    if (!ragged()) return i * length;
    const int64_t at = offset(i);
    return at < 0 ? 0 : at < limit ? at : limit;
  }
  D3S_HOST_DEVICE int64_t end(int64_t i) const {
    const int64_t first = begin(i), last = begin(i + 1);
    return last < first ? first : last;
  }
  // Returns whether the two offsets of segment i are valid.
  D3S_HOST_DEVICE bool good(int64_t i) const {
    return offset(i) <= offset(i + 1) && (i > 0 || offset(0) == 0) && (i + 1 < count || offset(count) == limit);
  }
  D3S_HOST_DEVICE bool ragged() const { return offsets32 || offsets64; }

  // Returns the first segment that starts at or after a position, or `count` if there is none.
  D3S_HOST_DEVICE int64_t first_from(int64_t position) const {
    if (!ragged()) return length > 0 ? (position + length - 1) / length : 0;
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (begin(middle) < position)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // Returns the segment that contains a position: the last segment that starts at or before the position.
  D3S_HOST_DEVICE int64_t find(int64_t position) const {
    const int64_t next = first_from(position + 1);
    return next > 0 ? next - 1 : 0;
  }

 private:
  D3S_HOST_DEVICE int64_t offset(int64_t i) const { return offsets32 ? offsets32[i] : offsets64[i]; }
};

}  // namespace d3s
