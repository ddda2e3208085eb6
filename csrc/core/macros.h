#pragma once

// Marks code that runs on the host and on the device alike.
#if defined(__CUDACC__)
#define D3S_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define D3S_HOST_DEVICE inline
#endif

// Declares what each back-end defines, in cpu/ and in cuda/. In the library of checks there is no back-end, so that the
// ops look at their arguments and compute nothing. What serves a device from Python (d3s_kernels/_torch, _triton) asks
// these ops first: a wrong argument meets the same words everywhere.
#if defined(D3S_NO_KERNELS)
#define D3S_KERNEL(...) \
  inline __VA_ARGS__ {}
#else
#define D3S_KERNEL(...) __VA_ARGS__;
#endif
