#pragma once

// Marks code that runs on the host and on the device alike.
#if defined(__CUDACC__)
#define D3S_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define D3S_HOST_DEVICE inline
#endif
