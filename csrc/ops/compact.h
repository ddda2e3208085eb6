// The interface of compact. Each back-end implements it, in cpu/compact.cpp and cuda/compact.cu. The arguments have
// been checked by ops/compact.cpp. Nothing here depends on torch.
#pragma once

#include <cstdint>

#include "device.h"

namespace d3s {

// Writes the indices of the first `capacity` true values to `indices`, in ascending order, and -1 to the rest of
// `indices`. Writes the number of all true values to `count`. This number may be larger than `capacity`. Any byte
// except 0 counts as true.
void compact_indices(const uint8_t* mask, int64_t n, int64_t* indices, int64_t capacity, int64_t* count,
                     Device& device);

}  // namespace d3s
