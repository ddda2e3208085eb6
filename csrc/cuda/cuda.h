// CUDA as the kernels see it. The tests compile the same kernels for the CPU (D3S_EMULATED), where threads are fibres
// (tests/cuda_shim). So code that only nvcc compiles, such as a launch or inline assembly, is in this file alone, and
// has a plain version for the CPU here or in the shim.
#pragma once

#if defined(D3S_EMULATED)
#include "cuda_shim.h"
#define __grid_constant__
#define D3S_NOINLINE
#else
#include <cuda_runtime.h>
#define D3S_NOINLINE __noinline__
#endif

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../core/float_bits.h"
#include "../ops/device.h"

namespace d3s {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- launching -------------------------------------------------------------------------------------------------

inline void require_success(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next launch would report this error again
  throw std::runtime_error(std::string("d3s_kernels: ") + what + ": " + cudaGetErrorString(error));
}

inline int device_attribute(const Device& device, cudaDeviceAttr attribute) {
  int value = 0;
  require_success(cudaDeviceGetAttribute(&value, attribute, device.index), "cudaDeviceGetAttribute");
  return value;
}

#if !defined(D3S_EMULATED)
// For the tests' counts, which only the emulated device makes.
inline void note_launch(const char*, int64_t, int, size_t) {}
D3S_HOST_DEVICE void note_scores(int) {}

template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  kernel<<<grid, threads, shared_bytes, stream>>>(args...);
}

// The block's shared memory. All of it is dynamic.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char d3s_shared_memory[];
  return reinterpret_cast<T*>(d3s_shared_memory);
}
#endif

constexpr size_t kSharedWithoutAsking = 48 << 10;

// The grid is one-dimensional, since its y is at most 65,535. Without blocks there is no launch.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
            const Device& device, const Args&... args) {
  if (blocks <= 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string("d3s_kernels: ") + name + ": too many blocks");
  require_success(cudaSetDevice(device.index), "cudaSetDevice");
  // Sets the limit to all that the device has, not to what this launch needs: the limit belongs to the kernel, and
  // another host thread may be launching the same kernel with more.
  if (shared_bytes > kSharedWithoutAsking)
    require_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         device_attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin)),
                    name);
  note_launch(name, blocks, threads, shared_bytes);
  launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes,
                static_cast<cudaStream_t>(device.stream), args...);
  require_success(cudaGetLastError(), name);
}

inline void clear(void* memory, int value, int64_t bytes, const Device& device) {
  if (bytes <= 0) return;
  require_success(cudaSetDevice(device.index), "cudaSetDevice");
  require_success(cudaMemsetAsync(memory, value, bytes, static_cast<cudaStream_t>(device.stream)), "cudaMemsetAsync");
}

D3S_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- instructions ----------------------------------------------------------------------------------------------

// Elements in a vector of 16 bytes, which is what a thread loads and stores at a time.
template <class T>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

#if defined(D3S_EMULATED)
inline float exp2_fast(float x) { return exp2f(x); }
inline uint4 load_streaming(const uint4* p) { return shim::counted(p); }
inline uint4 load_cached(const uint4* p) { return shim::counted(p); }
inline uint4 load_plain(const uint4* p) { return shim::counted(p); }
inline void store_streaming(uint4* p, uint4 v) { *p = v; }

inline void unpack(uint32_t word, Tag<bfloat16>, float& low, float& high) {
  low = to_float(bfloat16{static_cast<uint16_t>(word)});
  high = to_float(bfloat16{static_cast<uint16_t>(word >> 16)});
}
inline void unpack(uint32_t word, Tag<float16>, float& low, float& high) {
  low = to_float(float16{static_cast<uint16_t>(word)});
  high = to_float(float16{static_cast<uint16_t>(word >> 16)});
}
template <class T>
uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <class T>
uint32_t packed_max(uint32_t a, uint32_t b) {
  float a0, a1, b0, b1;
  unpack(a, Tag<T>(), a0, a1);
  unpack(b, Tag<T>(), b0, b1);
  return pack<T>(fmaxf(a0, b0), fmaxf(a1, b1));
}
#else
// Within 2 units in the last place; results below the normal range are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// For data that one thread reads, once: it is not kept in the first-level cache.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

// For data that a neighbouring thread reads again, in the next instruction.
__device__ __forceinline__ uint4 load_cached(const uint4* p) { return __ldg(p); }

// For memory that the kernel itself may write.
__device__ __forceinline__ uint4 load_plain(const uint4* p) { return __ldcs(p); }
__device__ __forceinline__ void store_streaming(uint4* p, uint4 v) { __stcs(p, v); }

__device__ __forceinline__ void unpack(uint32_t word, Tag<bfloat16>, float& low, float& high) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(uint32_t word, Tag<float16>, float& low, float& high) {
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high)
      : "r"(word));
}

// The larger of each half; of a number and NaN, the number.
template <class T>
__device__ __forceinline__ uint32_t packed_max(uint32_t a, uint32_t b) {
  uint32_t c;
  if constexpr (std::is_same_v<T, bfloat16>)
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  else
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#endif

}  // namespace d3s
