// The parts of CUDA that the kernels use. The tests also compile the kernels for the CPU (D3S_EMULATED), where threads
// are fibres (tests/cuda_shim). So code that only nvcc can compile, such as launches and inline assembly, is only in
// this file, and has a plain C++ version here or in the shim.
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
  cudaGetLastError();  // clears the error, which the next launch would report again
  throw std::runtime_error(std::string("d3s_kernels: ") + what + ": " + cudaGetErrorString(error));
}

inline int device_attribute(const Device& device, cudaDeviceAttr attribute) {
  int value = 0;
  require_success(cudaDeviceGetAttribute(&value, attribute, device.index), "cudaDeviceGetAttribute");
  return value;
}

#if !defined(D3S_EMULATED)
// Hooks for the tests. On a GPU, these functions do nothing. The emulated device counts launches and scores with them.
inline void note_launch(const char*, int64_t, int, size_t) {}
D3S_HOST_DEVICE void note_scores(int) {}

template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  kernel<<<grid, threads, shared_bytes, stream>>>(args...);
}

// Returns the block's shared memory. All shared memory is dynamic.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char d3s_shared_memory[];
  return reinterpret_cast<T*>(d3s_shared_memory);
}
#endif

constexpr size_t kSharedWithoutAsking = 48 << 10;

// Launches a kernel, unless `blocks` is 0. The grid has one dimension, since a second dimension could have at most
// 65,535 blocks.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
            const Device& device, const Args&... args) {
  if (blocks <= 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error(std::string("d3s_kernels: ") + name + ": too many blocks");
  require_success(cudaSetDevice(device.index), "cudaSetDevice");
  // The limit is an attribute of the kernel, and another host thread may be launching the same kernel with more shared
  // memory. So the limit is set to the maximum of the device, not to `shared_bytes`.
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

// The number of elements in a vector of 16 bytes. A thread loads and stores one vector at a time.
template <class T>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));

// Two floats that go through the same operations. Machine code for compute capability 10.0 and 10.3 computes both
// floats with one instruction, which rounds each float by itself. Other machine code uses two instructions, with
// bitwise equal results.
struct alignas(8) Pair {
  float low, high;
};
D3S_HOST_DEVICE Pair both(float x) { return {x, x}; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1100
__device__ __forceinline__ float2 packed(Pair a) { return make_float2(a.low, a.high); }
__device__ __forceinline__ Pair unpacked(float2 a) { return {a.x, a.y}; }
__device__ __forceinline__ Pair operator+(Pair a, Pair b) { return unpacked(__fadd2_rn(packed(a), packed(b))); }
__device__ __forceinline__ Pair operator-(Pair a, Pair b) {
  return unpacked(__fadd2_rn(packed(a), make_float2(-b.low, -b.high)));
}
__device__ __forceinline__ Pair operator*(Pair a, Pair b) { return unpacked(__fmul2_rn(packed(a), packed(b))); }
__device__ __forceinline__ Pair fma(Pair a, Pair b, Pair c) {
  return unpacked(__ffma2_rn(packed(a), packed(b), packed(c)));
}

// Returns 1 for a finite x, else NaN. The result is 1 in a form that the compiler cannot recognise. If the compiler
// recognised the constant 1, it would copy 1 into a register pair again for each float, instead of keeping 1 in a
// register.
__device__ __forceinline__ float hidden_one(float x) { return fmaf(x, 0.f, 1.f); }

// weighted() returns {weight, weight * value}. add_weighted() returns {sums.low + weight, sums.high + weight * value}.
// Each result is rounded once. `one` must come from hidden_one().
__device__ __forceinline__ Pair weighted(float weight, float value, float one) {
  return both(weight) * Pair{one, value};
}
__device__ __forceinline__ Pair add_weighted(Pair sums, float weight, float value, float one) {
  return fma(both(weight), Pair{one, value}, sums);
}
#else
D3S_HOST_DEVICE Pair operator+(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
D3S_HOST_DEVICE Pair operator-(Pair a, Pair b) { return {a.low - b.low, a.high - b.high}; }
D3S_HOST_DEVICE Pair operator*(Pair a, Pair b) { return {a.low * b.low, a.high * b.high}; }
D3S_HOST_DEVICE Pair fma(Pair a, Pair b, Pair c) { return {fmaf(a.low, b.low, c.low), fmaf(a.high, b.high, c.high)}; }
D3S_HOST_DEVICE float hidden_one(float) { return 1.f; }
D3S_HOST_DEVICE Pair weighted(float weight, float value, float) { return {weight, weight * value}; }
D3S_HOST_DEVICE Pair add_weighted(Pair sums, float weight, float value, float) {
  return {sums.low + weight, fmaf(weight, value, sums.high)};
}
#endif

#if defined(D3S_EMULATED)
inline float exp2_fast(float x) { return exp2f(x); }
inline uint4 load_streaming(const uint4* p) { return shim::counted(p); }
inline uint4 load_cached(const uint4* p) { return shim::counted(p); }
inline uint4 load_plain(const uint4* p) { return shim::counted(p); }
inline void store_streaming(uint4* p, uint4 v) { *p = v; }
inline void store_plain(uint4* p, uint4 v) { *p = v; }

template <class T>
Pair unpack(uint32_t word, Tag<T>) {
  return {to_float(T{static_cast<uint16_t>(word)}), to_float(T{static_cast<uint16_t>(word >> 16)})};
}
template <class T>
uint32_t pack(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <class T>
uint32_t packed_max(uint32_t a, uint32_t b) {
  const Pair x = unpack(a, Tag<T>()), y = unpack(b, Tag<T>());
  return pack<T>(fmaxf(x.low, y.low), fmaxf(x.high, y.high));
}
#else
// Returns 2^x with an error of at most 2 units in the last place. Results below the range of normal floats become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads data that is read only once. The data is not kept in the L1 cache.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

// Loads data that a neighbouring thread reads again in the next instruction.
__device__ __forceinline__ uint4 load_cached(const uint4* p) { return __ldg(p); }

// Loads from memory that the kernel itself may write.
__device__ __forceinline__ uint4 load_plain(const uint4* p) { return __ldcs(p); }
__device__ __forceinline__ void store_streaming(uint4* p, uint4 v) { __stcs(p, v); }
// Stores v with one instruction. For `*p = v`, nvcc may emit four stores, if the words of v are computed.
__device__ __forceinline__ void store_plain(uint4* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ Pair unpack(uint32_t word, Tag<bfloat16>) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ Pair unpack(uint32_t word, Tag<float16>) {
  Pair z;
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(z.low), "=f"(z.high)
      : "r"(word));
  return z;
}

// Returns a word with the maximum of the low halves of a and b, and the maximum of their high halves. If one of two
// halves is NaN, their maximum is the half that is not NaN.
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
