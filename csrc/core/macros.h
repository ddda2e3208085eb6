#pragma once

// Marks functions that run both on the host and on the device.
#if defined(__CUDACC__)
#define D3S_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define D3S_HOST_DEVICE inline
#endif
