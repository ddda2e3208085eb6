// compact, as each back-end implements it: cpu/compact.cpp, cuda/compact.cu. Arguments come checked, from
// ops/compact.cpp. Nothing here knows torch.
#pragma once

#include <cstdint>

#include "device.h"

namespace d3s {

// Writes the indices of the true values, ascending and up to `capacity`, then -1; and to `count` how many values are
// true, which may be more than `capacity`. A true value is any byte but 0.
void compact_indices(const uint8_t* mask, int64_t n, int64_t* indices, int64_t capacity, int64_t* count,
                     Device& device);

}  // namespace d3s
