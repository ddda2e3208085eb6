// The number of values to keep in each segment. Some ops can take a ratio instead (Quota in topk_mask.h). Nothing here
// depends on torch.
#pragma once

#include <cstdint>

#include "../core/macros.h"

namespace d3s {

struct Keep {
  int64_t number = 0;
  const int32_t* on_device32 = nullptr;  // if set, kernels read the number here, on the device
  const int64_t* on_device64 = nullptr;
  int64_t times = 1;  // the number of pooled segments; `number` values are kept for each of them

  D3S_HOST_DEVICE int64_t value() const { return on_device32 ? *on_device32 : on_device64 ? *on_device64 : number; }

  // Returns how many values are kept in a segment of `values` values; for pooled segments, the result may exceed
  // `values`. A number on the device may be unchecked: if it is below 1, nothing is kept.
  D3S_HOST_DEVICE int64_t of(int64_t values) const {
    const int64_t each = value();
    return each < 1 ? 0 : each < values ? each * times : values * times;
  }
};

}  // namespace d3s
