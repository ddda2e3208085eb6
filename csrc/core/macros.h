#pragma once

// Marks code that runs on the host and on the device alike.
#if defined(__CUDACC__)
#define D3S_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define D3S_HOST_DEVICE inline
#endif

// Declares a function that each back-end defines, in cpu/ and in cuda/. The library of checks has no back-end: its ops
// check their arguments and compute nothing. The back-ends in Python (d3s_kernels/_torch, _triton) call these ops
// first, so that a wrong argument gives the same message everywhere.
#if defined(D3S_NO_KERNELS)
#define D3S_KERNEL(...) \
  inline __VA_ARGS__ {}
#else
#define D3S_KERNEL(...) __VA_ARGS__;
#endif
