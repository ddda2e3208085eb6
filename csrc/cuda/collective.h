// Sums, maxima and scans over the threads of a warp or of a block, always in the same order. CUB is not used, since it
// does not promise this order, and the emulation (tests/cuda_shim) would need its own version.
#pragma once

#include "cuda.h"

namespace d3s {

struct Sum {
  template <class T>
  D3S_HOST_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  D3S_HOST_DEVICE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct Min {
  template <class T>
  D3S_HOST_DEVICE T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

// A butterfly reduction. The results of all lanes are bitwise equal.
template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, const Op& op) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Returns the sum over the lanes up to and including this lane.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// Returns the sum over the lanes before this lane, and adds it to `value`.
template <class T>
__device__ __forceinline__ T warp_exclusive_sum(T& value) {
  value = warp_inclusive_sum(value);
  const T before = __shfl_up_sync(kAllLanes, value, 1);
  return threadIdx.x % kWarp > 0 ? before : T{};
}

// A single warp as a group of threads. `rank` is the thread's lane.
struct WarpGroup {
  static constexpr int kSharedBytes = 0;
  static constexpr int kMostThreads = 4 * kWarp;  // the maximum for a block, which contains several such groups

  int rank, size = kWarp;

  __device__ explicit WarpGroup(void*) : rank(static_cast<int>(threadIdx.x) % kWarp) {}
  __device__ void sync() const { __syncwarp(); }

  template <class T, class Op>
  __device__ T reduce(T value, const Op& op) const {
    return warp_reduce(value, op);
  }
  template <class T>
  __device__ T exclusive_sum(T value) const {
    return warp_exclusive_sum(value);
  }
  // Returns the sum over the threads before this thread, and sets `total` to the sum over all threads.
  template <class T>
  __device__ T exclusive_sum(T value, T& total) const {
    const T before = warp_exclusive_sum(value);
    total = __shfl_sync(kAllLanes, value, kWarp - 1);
    return before;
  }
  // The group has no warps before this warp.
  template <class T>
  __device__ T sum_before_warp(T) const {
    return T{};
  }
};

// A block as a group of threads. The size of the block must be a power of two, and at least kWarp. Floating-point sums
// depend on the order of additions, so each thread adds the sums of the warps one after the other. Results for integers
// do not depend on the order, so they are computed by shuffles, which take only a fifth of the code.
struct BlockGroup {
  static constexpr int kSharedBytes = kWarp * 8;  // one value for each warp
  static constexpr int kMostThreads = 1024;

  int rank, size;

  __device__ explicit BlockGroup(void* shared)
      : rank(static_cast<int>(threadIdx.x)), size(static_cast<int>(blockDim.x)), shared_(shared) {}
  __device__ int warps() const { return size / kWarp; }
  __device__ void sync() const { __syncthreads(); }

  template <class T, class Op>
  __device__ T reduce(T value, const Op& op) const {
    const T own = warp_reduce(value, op);
    T* of_warps = room<T>();
    if (rank % kWarp == 0) of_warps[rank / kWarp] = own;
    __syncthreads();
    T total;
    if constexpr (std::is_integral_v<T>) {
      total = of_warps[rank % warps()];
#pragma unroll 1
      for (int step = warps() / 2; step > 0; step /= 2) total = op(total, __shfl_xor_sync(kAllLanes, total, step));
    } else {
      total = of_warps[0];
      for (int warp = 1; warp < warps(); ++warp) total = op(total, of_warps[warp]);
    }
    __syncthreads();  // before the next call overwrites the room
    return total;
  }

  template <class T>
  __device__ T exclusive_sum(T value) const {
    T total;
    return exclusive_sum(value, total);
  }

  template <class T>
  __device__ T exclusive_sum(T value, T& total) const {
    T up_to = value;
    const T before = warp_exclusive_sum(up_to);
    T* of_warps = room<T>();
    if (rank % kWarp == kWarp - 1) of_warps[rank / kWarp] = up_to;
    __syncthreads();
    T earlier{};
    total = T{};
    if constexpr (std::is_integral_v<T>) {
      const int lane = rank % kWarp;
      T up_to_warp = lane < warps() ? of_warps[lane] : T{};
      earlier = __shfl_sync(kAllLanes, warp_exclusive_sum(up_to_warp), rank / kWarp);
      total = __shfl_sync(kAllLanes, up_to_warp, kWarp - 1);
    } else {
      for (int warp = 0; warp < warps(); ++warp) {
        if (warp == rank / kWarp) earlier = total;
        total += of_warps[warp];
      }
    }
    __syncthreads();
    return earlier + before;
  }

  // Returns the sum of `value` over the threads of the block's earlier warps. All lanes of a warp get the same result.
  template <class T>
  __device__ T sum_before_warp(T value) const {
    const T own = warp_reduce(value, Sum());
    return __shfl_sync(kAllLanes, exclusive_sum(rank % kWarp == 0 ? own : T{}), 0);
  }

  // Cuts [begin, end) into one stretch for each warp, and sets [from, to) to this warp's stretch. All indices before
  // this stretch belong to earlier warps.
  template <class Int>
  __device__ void warp_stretch(Int begin, Int end, Int& from, Int& to) const {
    const int log_warps = 31 - __clz(warps());
    const Int stretch = (((end - begin + warps() - 1) >> log_warps) + kWarp - 1) / kWarp * kWarp;
    from = begin + rank / kWarp * stretch;  // may be past `to`: then the stretch is empty
    to = from + stretch < end ? from + stretch : end;
  }

 private:
  template <class T>
  __device__ T* room() const {
    static_assert(sizeof(T) <= 8, "the room is for 8 bytes of each warp");
    return static_cast<T*>(shared_);
  }

  void* shared_;
};

}  // namespace d3s
