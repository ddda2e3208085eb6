// Stretches of a 1-D array: rows of equal length, or what flash-attention calls cu_seqlens.
#pragma once

#include <cstdint>

#include "macros.h"

namespace d3s {

struct Segments {
  int64_t count = 0;
  int64_t length = 0;                  // of each, where there are no offsets
  const int32_t* offsets32 = nullptr;  // at most one of the two is set
  const int64_t* offsets64 = nullptr;

  D3S_HOST_DEVICE int64_t begin(int64_t i) const {
    return offsets32 ? offsets32[i] : offsets64 ? offsets64[i] : i * length;
  }
  D3S_HOST_DEVICE int64_t end(int64_t i) const { return begin(i + 1); }
  D3S_HOST_DEVICE bool ragged() const { return offsets32 || offsets64; }
};

}  // namespace d3s
