// The layout of rows of logits in memory: where each row starts, for any strides of the leading dimensions.
#pragma once

#include <cstdint>

#include "macros.h"

namespace d3s {

struct RowLayout {
  static constexpr int kMaxDims = 6;  // the maximum of `dims`, after rows_of (torch_abi.h) has merged dimensions

  int64_t count = 1;    // the number of rows
  int64_t columns = 0;  // the length of each row
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  // Returns the offset of row i, in elements.
  D3S_HOST_DEVICE int64_t offset(int64_t i) const {
#if defined(__CUDA_ARCH__)
    // 32 bits are enough, since a grid has fewer than 2^32 blocks. A 64-bit division would be a subroutine call.
    auto rest = static_cast<uint32_t>(i);
#else
    auto rest = static_cast<uint64_t>(i);
#endif
    int64_t offset = 0;
    for (int d = dims - 1; d > 0; --d) {
      const auto size = static_cast<decltype(rest)>(sizes[d]);
      offset += static_cast<int64_t>(rest % size) * strides[d];
      rest /= size;
    }
    return dims > 0 ? offset + static_cast<int64_t>(rest) * strides[0] : offset;
  }
};

}  // namespace d3s
