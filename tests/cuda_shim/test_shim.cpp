// A smoke test of the shim: what its users rely on to find faulty kernels. That correct ones give correct results, the
// tests of the ops show.
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "../cpp/check.h"
#include "cuda_shim.h"

using d3s::dynamic_shared;
using d3s::launch_kernel;

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kSeeds = 50;

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

void a_missing_barrier_shows() {
  constexpr int kThreads = 256;
  int wrong[2] = {};
  for (int seed = 0; seed < kSeeds; ++seed) {
    setenv("D3S_SHIM_SEED", std::to_string(seed).c_str(), 1);
    for (const bool barrier : {false, true}) {
      std::vector<int> sums(3 * kThreads);
      launch_kernel(barrier ? sum_of_warps<true> : sum_of_warps<false>, dim3(1), kThreads, 8 * sizeof(int), nullptr,
                    sums.data());
      bool good = true;
      for (int i = 0; i < 3 * kThreads; ++i) good &= sums[i] == (i / kThreads + 1) * kThreads * (kThreads - 1) / 2;
      wrong[barrier] += !good;
    }
  }
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

__global__ void returns_before_barrier() {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
__global__ void different_warp_operations() {
  if (threadIdx.x % 2)
    __ballot_sync(kAllLanes, 1);
  else
    __any_sync(kAllLanes, 1);
}
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
  for (int seed = 0; seed < kSeeds; seed += 10) {
    setenv("D3S_SHIM_SEED", std::to_string(seed).c_str(), 1);
    is_stopped(returns_before_barrier, {"cuda_shim: kernel launch", "grid (2, 3), block (", "64 threads", "return",
                                        "  threads 5 to 5: returned", "__syncthreads (", "test_shim.cpp:"});
    is_stopped(different_warp_operations,
               {"deadlock", "threads 1 to 1: wait at __ballot_sync", "threads 0 to 0: wait at __any_sync"});
#if defined(__SANITIZE_ADDRESS__)
    is_stopped(past_the_end, {"heap-buffer-overflow", "0 bytes", "100-byte region"});
#endif
  }
  static_cast<void>(past_the_end);
}

}  // namespace

int main() {
  a_missing_barrier_shows();
  a_missing_lane_gives_poison();
  every_block_finds_poison();
  wrong_kernels_are_stopped();
  return report("test_shim");
}
