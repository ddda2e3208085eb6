// Tests of the shim: faulty kernels are found. That correct ones give correct results, the tests of the ops show.
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

#include "../cpp/check.h"
#include "cuda_shim.h"

using d3s::dynamic_shared;
using d3s::launch_kernel;

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kSeeds = 50;

void set_seed(int seed) { setenv("D3S_SHIM_SEED", std::to_string(seed).c_str(), 1); }

template <class Test>
void for_all_seeds(const Test& test) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    set_seed(seed);
    test(seed);
  }
  set_seed(0);
}

// ---- what a block computes ---------------------------------------------------------------------------------------

// Sums in shared memory. `kLeaveOut` is the number of the barrier that is missing, out of three. The type is unsigned,
// since a wrong sum may wrap around.
template <int kLeaveOut>
__global__ void block_sums(const unsigned* __restrict__ values, unsigned* __restrict__ sums) {
  unsigned* shared = dynamic_shared<unsigned>();
  for (unsigned round = 0; round < 2; ++round) {
    shared[threadIdx.x] = values[(blockIdx.x * 2 + round) * blockDim.x + threadIdx.x];
    if (kLeaveOut != 1) __syncthreads();
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
      if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
      if (kLeaveOut != 2) __syncthreads();
    }
    // Every thread has to read the sum before the next round overwrites it.
    sums[(blockIdx.x * 2 + round) * blockDim.x + threadIdx.x] = shared[0];
    if (kLeaveOut != 3) __syncthreads();
  }
}

// Counts the different results of block_sums over all seeds, and counts the seeds with a wrong result.
template <int kLeaveOut>
void sum_blocks(size_t& different, int& wrong) {
  constexpr int kBlocks = 3, kThreads = 128;
  std::vector<unsigned> values(kBlocks * 2 * kThreads), expected(values.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<unsigned>(i * i % 1001);
  for (size_t i = 0; i < values.size(); ++i)
    for (size_t j = 0; j < kThreads; ++j) expected[i] += values[i / kThreads * kThreads + j];
  std::set<std::vector<unsigned>> results;
  wrong = 0;
  for_all_seeds([&](int) {
    std::vector<unsigned> sums(values.size());
    launch_kernel(block_sums<kLeaveOut>, dim3(kBlocks), kThreads, kThreads * sizeof(unsigned), nullptr, values.data(),
                  sums.data());
    wrong += sums != expected;
    results.insert(sums);
  });
  different = results.size();
}

void a_missing_barrier_shows() {
  size_t different;
  int wrong;
  sum_blocks<0>(different, wrong);
  CHECK(different == 1 && wrong == 0, "%zu results, %d wrong", different, wrong);
  sum_blocks<1>(different, wrong);
  CHECK(different > kSeeds / 2 && wrong > kSeeds / 2, "%zu results, %d wrong", different, wrong);
  sum_blocks<2>(different, wrong);
  CHECK(different > kSeeds / 2 && wrong > kSeeds / 2, "%zu results, %d wrong", different, wrong);
  sum_blocks<3>(different, wrong);
  CHECK(different > kSeeds / 2 && wrong > kSeeds / 2, "%zu results, %d wrong", different, wrong);
}

// In each round, each warp writes its sum to shared memory, every thread adds up these sums, and the next round
// overwrites them. A missing barrier shows only if one warp gets far ahead of the others, over many shuffles.
template <bool kBarrier>
__global__ void sum_of_warps(int* sums) {
  int* shared = dynamic_shared<int>();
  for (int round = 0; round < 3; ++round) {
    int sum = static_cast<int>(threadIdx.x) * (round + 1);
    for (unsigned step = 16; step; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, static_cast<int>(step));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    unsigned total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += static_cast<unsigned>(shared[warp]);
    sums[round * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)] = static_cast<int>(total);
    if (kBarrier) __syncthreads();
  }
}

void a_warp_that_runs_ahead_shows_a_missing_barrier() {
  constexpr int kThreads = 256;
  int wrong[2] = {};
  for_all_seeds([&](int) {
    for (const bool barrier : {false, true}) {
      std::vector<int> sums(3 * kThreads);
      launch_kernel(barrier ? sum_of_warps<true> : sum_of_warps<false>, dim3(1), kThreads, 8 * sizeof(int), nullptr,
                    sums.data());
      bool good = true;
      for (int i = 0; i < 3 * kThreads; ++i) good &= sums[i] == (i / kThreads + 1) * kThreads * (kThreads - 1) / 2;
      wrong[barrier] += !good;
    }
  });
  CHECK(wrong[true] == 0, "%d", wrong[true]);
  CHECK(wrong[false] > kSeeds / 5, "%d", wrong[false]);
}

// Lane 31 does not exist in a warp of 20 threads: what it would give is poison, not 0.
__global__ void read_a_missing_lane(unsigned* out) { out[threadIdx.x] = __shfl_sync(kAllLanes, threadIdx.x, 31); }

void a_missing_lane_gives_poison() {
  unsigned out[20];
  launch_kernel(read_a_missing_lane, dim3(1), 20, 0, nullptr, out);
  for (const unsigned value : out) CHECK(value == 0xa5a5a5a5u, "%x", value);
}

// ---- shared memory, grids, launches ------------------------------------------------------------------------------

__global__ void look_at_poison(int bytes, int* other) {
  const unsigned char* shared = dynamic_shared<unsigned char>();
  for (int i = 0; i < bytes; ++i) atomicAdd(other, shared[i] != 0xa5 ? 1 : 0);
  atomicAdd(other, reinterpret_cast<uintptr_t>(shared) % 16 ? 1 : 0);
  __syncthreads();
  dynamic_shared<unsigned char>()[bytes - 1] = 0;  // the next block must not see this write
}

void every_block_finds_poison() {
  int other = 0;
  launch_kernel(look_at_poison, dim3(5), 40, 1001, nullptr, 1001, &other);
  CHECK(other == 0, "%d bytes", other);
}

__global__ void mark_blocks(int* order, int* next) {
  if (threadIdx.x == 0) order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x);
  if (blockIdx.z || gridDim.z != 1 || gridDim.x != 7 || gridDim.y != 5 || blockDim.x != 33) *next = 1000;
}

void every_block_of_a_grid_runs_once_in_any_order() {
  std::set<std::vector<int>> orders;
  for_all_seeds([&](int seed) {
    std::vector<int> order(1100);
    int next = 0;
    launch_kernel(mark_blocks, dim3(7, 5), 33, 0, nullptr, order.data(), &next);
    CHECK(next == 35, "seed %d: %d blocks", seed, next);
    order.resize(35);
    CHECK(std::set<int>(order.begin(), order.end()).size() == 35, "seed %d: a block ran twice", seed);
    orders.insert(order);
  });
  CHECK(orders.size() > kSeeds / 2, "%zu orders", orders.size());
}

__global__ void nothing() {}
__global__ void nothing_with_much_memory(bool* ran) { *ran = true; }

void launches_are_refused() {
  const auto error_of = [](dim3 grid, int threads, size_t shared_bytes) {
    launch_kernel(nothing, grid, threads, shared_bytes, nullptr);
    const cudaError_t error = cudaGetLastError();
    CHECK(cudaGetLastError() == cudaSuccess, "the error stayed");
    return error;
  };
  CHECK(error_of(1, 1024, 48 << 10) == cudaSuccess, "refused");
  CHECK(error_of(1, 0, 0) == cudaErrorInvalidConfiguration, "no threads");
  CHECK(error_of(1, 1025, 0) == cudaErrorInvalidConfiguration, "many threads");
  CHECK(error_of(0, 32, 0) == cudaErrorInvalidConfiguration, "no blocks");
  CHECK(error_of(0x80000000u, 32, 0) == cudaErrorInvalidConfiguration, "many blocks");
  CHECK(error_of(dim3(1, 65536), 32, 0) == cudaErrorInvalidConfiguration, "many rows of blocks");
  CHECK(error_of(1, 32, (48 << 10) + 1) == cudaErrorInvalidValue, "much memory, not asked for");
  CHECK(std::string(cudaGetErrorString(cudaErrorInvalidConfiguration)) == "invalid configuration argument", "text");

  bool ran = false;
  const auto raise = [](int bytes) {
    return cudaFuncSetAttribute(nothing_with_much_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  CHECK(raise(232449) == cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue, "too much memory");
  CHECK(raise(232448) == cudaSuccess, "refused");
  launch_kernel(nothing_with_much_memory, 1, 1, 232448, nullptr, &ran);
  CHECK(cudaGetLastError() == cudaSuccess && ran, "did not run");
  launch_kernel(nothing_with_much_memory, 1, 1, 232449, nullptr, &ran);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue, "more than the device has");
  CHECK(error_of(1, 32, 232448) == cudaErrorInvalidValue, "asked for by another kernel");

  int processors = 0, bytes = 0, device = 1;
  setenv("D3S_SHIM_SMS", "132", 1);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  CHECK(processors == 132 && bytes == 232448 && cudaGetDevice(&device) == cudaSuccess && device == 0, "%d", processors);
}

// ---- kernels that the shim has to stop ---------------------------------------------------------------------------

__global__ void returns_before_barrier() {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
__global__ void returns_before_shuffle() {
  if (threadIdx.x != 40) __shfl_sync(kAllLanes, 1, 0);
}
__global__ void barrier_in_half_a_warp() {
  if (threadIdx.x % 32 < 16)
    __syncthreads();
  else
    __syncwarp();
}
__global__ void different_warp_operations() {
  if (threadIdx.x % 2)
    __ballot_sync(kAllLanes, 1);
  else
    __any_sync(kAllLanes, 1);
}
__global__ void different_masks() { __syncwarp(threadIdx.x < 4 ? 0x0000000fu : kAllLanes); }
__global__ void mask_without_itself() { __syncwarp(1u); }
__global__ void different_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void odd_width() { __shfl_sync(kAllLanes, 1, 0, 12); }
__global__ void past_the_end() { dynamic_shared<char>()[100] = 1; }

void is_stopped(void (*kernel)(), const std::vector<std::string>& message) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    launch_kernel(kernel, dim3(2, 3), 64, 100, nullptr);
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char part[4096];
  for (ssize_t size; (size = read(ends[0], part, sizeof part)) > 0;) said.append(part, static_cast<size_t>(size));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status != 0, "it ran to its end: %s", said.c_str());
  for (const std::string& text : message)
    CHECK(said.find(text) != std::string::npos, "'%s' is not in: %s", text.c_str(), said.c_str());
}

void wrong_kernels_are_stopped() {
  for_all_seeds([](int seed) {
    if (seed % 10) return;
    is_stopped(returns_before_barrier, {"cuda_shim: kernel launch", "grid (2, 3), block (", "64 threads", "return",
                                        "  threads 5 to 5: returned", "__syncthreads (", "test_shim.cpp:"});
    is_stopped(returns_before_shuffle, {"thread 40 ", "return", "__shfl_sync, mask ffffffff"});
    is_stopped(barrier_in_half_a_warp, {"deadlock", "threads 0 to 15: wait at __syncthreads (",
                                        "threads 16 to 31: wait at __syncwarp, mask ffffffff ("});
    is_stopped(different_warp_operations,
               {"deadlock", "threads 1 to 1: wait at __ballot_sync", "threads 0 to 0: wait at __any_sync"});
    is_stopped(different_masks, {"returned", "__syncwarp, mask ffffffff"});
    is_stopped(mask_without_itself, {"__syncwarp, mask 00000001", "lacks the thread itself"});
    is_stopped(different_barriers, {"different barriers", "threads 0 to 31: ", "threads 32 to 63: "});
    is_stopped(odd_width, {"width 12"});
#if defined(__SANITIZE_ADDRESS__)
    is_stopped(past_the_end, {"heap-buffer-overflow", "0 bytes", "100-byte region"});
#endif
  });
  static_cast<void>(past_the_end);
}

}  // namespace

int main() {
  a_missing_barrier_shows();
  a_warp_that_runs_ahead_shows_a_missing_barrier();
  a_missing_lane_gives_poison();
  every_block_finds_poison();
  every_block_of_a_grid_runs_once_in_any_order();
  launches_are_refused();
  wrong_kernels_are_stopped();
  return report("test_shim");
}
