// Notes invalid arguments on the device. In one kernel of each op, all threads call these functions once, before the
// kernel's work, when few registers are in use.
#pragma once

#include "../ops/topk_mask.h"
#include "cuda.h"

namespace d3s {

// This function is not inlined, so that it does not change the machine code of the rest of the kernel.
__device__ D3S_NOINLINE inline void note_any_offsets(const Segments& segments, const Faults& faults) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 1
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < segments.count; i += step)
    if (!segments.good(i)) faults.note(Fault::kOffsets);
}

__device__ inline void note_offsets(const Segments& segments, const Faults& faults) {
  if (segments.ragged()) note_any_offsets(segments, faults);
}

__device__ inline bool is_first_thread() { return blockIdx.x == 0 && threadIdx.x == 0; }

__device__ inline void note_keep(const Keep& keep, const Faults& faults) {
  if (is_first_thread() && keep.value() < 1) faults.note(Fault::kKeep);
}

__device__ inline void note_quota(const Quota& quota, const Faults& faults) {
  if (quota.is_number) return note_keep(quota.number, faults);
  if (is_first_thread() && !(quota.value() > 0 && quota.value() <= 1)) faults.note(Fault::kRatio);
}

}  // namespace d3s
