// compact, as each back-end implements it: cpu/compact.cpp, cuda/compact.cu. Arguments come checked, from
// ops/compact.cpp. Nothing here knows torch.
#pragma once

#include <cstdint>

#include "device.h"

namespace d3s {

// Writes at most `capacity` indices of true values in ascending order, and -1 to the rest of `indices`. `count` gets
// the number of true values, which may be more than `capacity`. Any byte except 0 is true.
void compact_indices(const uint8_t* mask, int64_t n, int64_t* indices, int64_t capacity, int64_t* count,
                     Device& device);

}  // namespace d3s
