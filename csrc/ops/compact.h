// The kernel of compact, implemented in cpu/ and cuda/. ops/compact.cpp has checked the arguments. Nothing here depends
// on torch.
#pragma once

#include <cstdint>

#include "device.h"

namespace d3s {

// Writes the indices of the first `capacity` true values to `indices`, in ascending order, and fills the rest of
// `indices` with -1. Writes the number of all true values to `count`; this number may exceed `capacity`. A value is
// true if its byte is not 0.
void compact_indices(const uint8_t* mask, int64_t n, int64_t* indices, int64_t capacity, int64_t* count,
                     Device& device);

}  // namespace d3s
