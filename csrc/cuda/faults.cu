// The host memory in which kernels note faults.
#include "../ops/faults.h"

#include <cstring>

#include "cuda.h"

namespace d3s {
namespace {

constexpr int kBytes = kPublicOps * kFaultKinds;

// This pointer is null until the first op runs. Python reads the pointer before each op, which is cheaper than calling
// a function.
unsigned char* memory = nullptr;

// Allocates pinned memory, which kernels can write. While a CUDA graph is captured, an allocation is allowed only in
// the relaxed capture mode.
unsigned char* allocate() {
  auto mode = cudaStreamCaptureModeRelaxed;
  require_success(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  void* at = nullptr;
  const cudaError_t error = cudaHostAlloc(&at, kBytes, cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  require_success(error, "cudaHostAlloc, for the faults that kernels note");
  std::memset(at, 0, kBytes);
  return memory = static_cast<unsigned char*>(at);
}

}  // namespace

Faults faults_of(PublicOp op) {
  static unsigned char* const bytes = allocate();
  return {bytes + static_cast<int>(op) * kFaultKinds};
}

}  // namespace d3s

// d3s_kernels/_dispatch/faults.py calls this function to get the address of `memory`. The memory is [ops][kinds of
// faults], in the order of the enums, with one byte for each op and kind of fault.
extern "C" __attribute__((visibility("default"))) unsigned char* const* d3s_kernels_faults() { return &d3s::memory; }
