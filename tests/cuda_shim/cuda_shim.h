// What CUDA sources need so that a C++ compiler can compile them and they run on the CPU. For tests only.
//
// The threads of a block are fibres of one OS thread. One fibre runs at a time, until its next synchronisation point.
// D3S_SHIM_SEED determines which fibre runs next, and the order of the blocks. So a kernel that lacks a barrier gives
// results that change with the seed. If the threads of a kernel deadlock, the shim stops with a message that says which
// thread waits for what. With AddressSanitizer, shared memory ends at the size that the launch requested.
//
// The shim has only what the kernels use, and accepts nothing that nvcc would refuse.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

// ---- types -----------------------------------------------------------------------------------------------------

#define D3S_SHIM_VECTORS(scalar, name)                                                         \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                 \
  struct name##3 { scalar x, y, z; };                                                          \
  struct alignas(sizeof(scalar) < 4 ? 4 * sizeof(scalar) : 16) name##4 { scalar x, y, z, w; }; \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                         \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }            \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

D3S_SHIM_VECTORS(unsigned char, uchar)
D3S_SHIM_VECTORS(unsigned short, ushort)
D3S_SHIM_VECTORS(int, int)
D3S_SHIM_VECTORS(unsigned, uint)
D3S_SHIM_VECTORS(float, float)
D3S_SHIM_VECTORS(double, double)
D3S_SHIM_VECTORS(long long, longlong)
D3S_SHIM_VECTORS(unsigned long long, ulonglong)
#undef D3S_SHIM_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- the position of a thread ----------------------------------------------------------------------------------

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace d3s::shim {

struct Site {  // where in the source a thread waits
  const char* file;
  int line;
};
constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

enum class Operation : uint8_t {
  kSyncthreads,
  kSyncthreadsOr,
  kSyncthreadsAnd,
  kSyncthreadsCount,
  kSyncwarp,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
};

// These two wait for all participating threads. `source` is the lane that a shuffle reads, as the call has it.
int block_operation(Operation operation, bool predicate, Site at);
uint64_t warp_operation(Operation operation, unsigned mask, uint64_t value, Site at, unsigned source = 0);
unsigned source_lane(Operation operation, unsigned operand, int width, Site at);
void* shared_memory();

template <class T>
T shuffle(Operation operation, unsigned mask, T value, unsigned operand, int width, Site at) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "not a type that CUDA shuffles");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_operation(operation, mask, bits, at, source_lane(operation, operand, width, at));
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace d3s::shim

// ---- synchronisation -------------------------------------------------------------------------------------------

inline void __syncthreads(d3s::shim::Site at = d3s::shim::here()) {
  d3s::shim::block_operation(d3s::shim::Operation::kSyncthreads, false, at);
}
inline int __syncthreads_or(int predicate, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::block_operation(d3s::shim::Operation::kSyncthreadsOr, predicate, at);
}
inline int __syncthreads_and(int predicate, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::block_operation(d3s::shim::Operation::kSyncthreadsAnd, predicate, at);
}
inline int __syncthreads_count(int predicate, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::block_operation(d3s::shim::Operation::kSyncthreadsCount, predicate, at);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, d3s::shim::Site at = d3s::shim::here()) {
  d3s::shim::warp_operation(d3s::shim::Operation::kSyncwarp, mask, 0, at);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, d3s::shim::Site at = d3s::shim::here()) {
  return static_cast<unsigned>(d3s::shim::warp_operation(d3s::shim::Operation::kBallot, mask, predicate != 0, at));
}
inline int __any_sync(unsigned mask, int predicate, d3s::shim::Site at = d3s::shim::here()) {
  return static_cast<int>(d3s::shim::warp_operation(d3s::shim::Operation::kAny, mask, predicate != 0, at));
}
inline int __all_sync(unsigned mask, int predicate, d3s::shim::Site at = d3s::shim::here()) {
  return static_cast<int>(d3s::shim::warp_operation(d3s::shim::Operation::kAll, mask, predicate != 0, at));
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::shuffle(d3s::shim::Operation::kShuffle, mask, value, static_cast<unsigned>(source), width, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::shuffle(d3s::shim::Operation::kShuffleUp, mask, value, delta, width, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::shuffle(d3s::shim::Operation::kShuffleDown, mask, value, delta, width, at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, d3s::shim::Site at = d3s::shim::here()) {
  return d3s::shim::shuffle(d3s::shim::Operation::kShuffleXor, mask, value, static_cast<unsigned>(lanes), width, at);
}

// ints sort like unsigned integers if the sign bit is inverted.
#define D3S_SHIM_REDUCE(name, operation, sign_bit)                                                             \
  inline unsigned name(unsigned mask, unsigned value, d3s::shim::Site at = d3s::shim::here()) {                \
    return static_cast<unsigned>(d3s::shim::warp_operation(d3s::shim::Operation::operation, mask, value, at)); \
  }                                                                                                            \
  inline int name(unsigned mask, int value, d3s::shim::Site at = d3s::shim::here()) {                          \
    return static_cast<int>(name(mask, static_cast<unsigned>(value) ^ sign_bit, at) ^ sign_bit);               \
  }

D3S_SHIM_REDUCE(__reduce_add_sync, kReduceAdd, 0u)
D3S_SHIM_REDUCE(__reduce_min_sync, kReduceMin, 0x80000000u)
D3S_SHIM_REDUCE(__reduce_max_sync, kReduceMax, 0x80000000u)
#undef D3S_SHIM_REDUCE

// Only one fibre runs at a time, so each fibre sees all writes of the others.
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- atomics: plain operations, because no other fibre runs in between -------------------------------------------
// There are none for float and double, since sums would depend on the order of the threads.

#define D3S_SHIM_ATOMICS(T)                                                                                    \
  inline T atomicExch(T* at, T value) { return std::exchange(*at, value); }                                    \
  inline T atomicMin(T* at, T value) { return std::exchange(*at, value < *at ? value : *at); }                 \
  inline T atomicMax(T* at, T value) { return std::exchange(*at, *at < value ? value : *at); }                 \
  inline T atomicOr(T* at, T value) { return std::exchange(*at, *at | value); }                                \
  inline T atomicCAS(T* at, T expected, T value) { return std::exchange(*at, *at == expected ? value : *at); } \
  inline T atomicAdd(T* at, T value) { /* an int wraps around */                                               \
    return std::exchange(*at, static_cast<T>(std::make_unsigned_t<T>(*at) + std::make_unsigned_t<T>(value)));  \
  }

D3S_SHIM_ATOMICS(int)
D3S_SHIM_ATOMICS(unsigned)
D3S_SHIM_ATOMICS(unsigned long long)
#undef D3S_SHIM_ATOMICS

// ---- bits, memory, arithmetic ------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }

inline unsigned __brev(unsigned x) {
  x = (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
  x = (x & 0x0f0f0f0fu) << 4 | (x >> 4 & 0x0f0f0f0fu);
  return __builtin_bswap32(x);
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

// Loads and stores with cache hints.
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, std::common_type_t<T> value) {
  *at = value;
}

inline unsigned __float_as_uint(float x) { return d3s::shim::same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return d3s::shim::same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return d3s::shim::same_bits<float>(x); }
inline float __int_as_float(int x) { return d3s::shim::same_bits<float>(x); }

inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }  // never fused, since all is compiled with -ffp-contract=off
inline float __fmul_rn(float x, float y) { return x * y; }

// The same overloads as CUDA, including mixed signs, so that a call that is ambiguous in CUDA is ambiguous here.
#define D3S_SHIM_MIN_MAX(result, T, U)                                                            \
  inline result min(T a, U b) { return static_cast<result>(b) < static_cast<result>(a) ? b : a; } \
  inline result max(T a, U b) { return static_cast<result>(a) < static_cast<result>(b) ? b : a; }
#define D3S_SHIM_MIN_MAX_INTEGERS(T)                   \
  D3S_SHIM_MIN_MAX(T, T, T)                            \
  D3S_SHIM_MIN_MAX(unsigned T, unsigned T, unsigned T) \
  D3S_SHIM_MIN_MAX(unsigned T, T, unsigned T)          \
  D3S_SHIM_MIN_MAX(unsigned T, unsigned T, T)

D3S_SHIM_MIN_MAX_INTEGERS(int)
D3S_SHIM_MIN_MAX_INTEGERS(long)
D3S_SHIM_MIN_MAX_INTEGERS(long long)
#undef D3S_SHIM_MIN_MAX_INTEGERS
#undef D3S_SHIM_MIN_MAX

// If one of the two is NaN, the result is the other.
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(float a, double b) { return std::fmin(static_cast<double>(a), b); }
inline double max(float a, double b) { return std::fmax(static_cast<double>(a), b); }
inline double min(double a, float b) { return std::fmin(a, static_cast<double>(b)); }
inline double max(double a, float b) { return std::fmax(a, static_cast<double>(b)); }

// ---- the runtime -------------------------------------------------------------------------------------------------

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
inline cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  *at = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t = nullptr);

namespace d3s::shim {

// Calls `thread(arguments)` for every thread of the grid, or keeps an error for cudaGetLastError.
void run_grid(const void* kernel, dim3 grid, int threads, size_t shared_bytes, void (*thread)(void*), void* arguments);
cudaError_t allow_shared_memory(const void* kernel, int bytes);

// What the device has done since the process began. Tests compare the counts before and after a call (asked() in
// kernels.py).
struct Counts {
  uint64_t launches, memsets;
  uint64_t vectors;  // loads of 16 bytes, which are nearly all that most kernels read
  uint64_t scores;   // read by top-K selection
};
extern "C" __attribute__((visibility("default"))) Counts d3s_shim_counts;

// Returns what was launched since the last call. Each line has the name, blocks, threads and bytes of shared memory of
// a launch, separated by tabs. With D3S_SHIM_DRY=1 the kernels do not run, so that inputs as large as on a GPU take no
// time.
extern "C" __attribute__((visibility("default"))) const char* d3s_shim_launches();
void note_launch(const char* name, int64_t blocks, int threads, size_t shared_bytes);

inline uint4 counted(const uint4* at) {
  ++d3s_shim_counts.vectors;
  return *at;
}

}  // namespace d3s::shim

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  return d3s::shim::allow_shared_memory(reinterpret_cast<const void*>(kernel), value);
}

namespace d3s {

using shim::note_launch;
inline void note_scores(int count) { shim::d3s_shim_counts.scores += count; }

// The block's shared memory, filled with 0xa5. It has the size that the launch requested; null if this size is 0.
template <class T>
T* dynamic_shared() {
  static_assert(alignof(T) <= 16);
  return static_cast<T*>(shim::shared_memory());
}

// kernel<<<grid, threads, shared_bytes, stream>>>(args...). The kernel has finished when this returns.
template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t,
                   Args&&... args) {
  static_assert(sizeof...(Params) == sizeof...(Args) && !(std::is_reference_v<Params> || ...));
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> params;
  } call{kernel, std::tuple<Params...>(std::forward<Args>(args)...)};
  const auto thread = [](void* arguments) {
    const Call& call = *static_cast<const Call*>(arguments);
    std::apply(call.kernel, call.params);  // every thread has its own copy of the parameters
  };
  shim::run_grid(reinterpret_cast<const void*>(kernel), grid, threads, shared_bytes, thread, &call);
}

}  // namespace d3s
