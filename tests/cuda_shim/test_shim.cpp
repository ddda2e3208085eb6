// Tests of the shim: correct kernels give correct results, and faulty kernels are found. Also measures the cost of a
// barrier.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <set>
#include <string>
#include <thread>
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

__global__ void block_votes(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[3 * i] = __syncthreads_count(i % 3 == 0);
  out[3 * i + 1] = 10 * __syncthreads_or(i == 70) + __syncthreads_or(i == 1000);
  out[3 * i + 2] = 10 * __syncthreads_and(i < 100) + __syncthreads_and(i != 70);
}

void blocks_vote() {
  for_all_seeds([](int seed) {
    int out[300];
    launch_kernel(block_votes, dim3(1), 100, 0, nullptr, out);
    for (int i = 0; i < 100; ++i)
      CHECK(out[3 * i] == 34 && out[3 * i + 1] == 10 && out[3 * i + 2] == 10, "seed %d thread %d: %d %d %d", seed, i,
            out[3 * i], out[3 * i + 1], out[3 * i + 2]);
  });
}

// ---- what a warp computes ----------------------------------------------------------------------------------------

struct Shuffled {
  int index, segment_index, up, segment_up, down, segment_down, exchanged, segment_exchanged;
  double wide;
  unsigned ballot, sum, least, most;
  int any, all, int_least, int_most;
};

__global__ void shuffle_all(Shuffled* out) {
  const int i = static_cast<int>(threadIdx.x), value = 100 + i;
  Shuffled& mine = out[i];
  mine.index = __shfl_sync(kAllLanes, value, 3);
  mine.segment_index = __shfl_sync(kAllLanes, value, i + 1, 4);
  mine.up = __shfl_up_sync(kAllLanes, value, 2);
  mine.segment_up = __shfl_up_sync(kAllLanes, value, 1, 4);
  mine.down = __shfl_down_sync(kAllLanes, value, 2);
  mine.segment_down = __shfl_down_sync(kAllLanes, value, 1, 4);
  mine.exchanged = __shfl_xor_sync(kAllLanes, value, 1);
  mine.segment_exchanged = __shfl_xor_sync(kAllLanes, value, 4, 4);
  mine.wide = __shfl_sync(kAllLanes, value + 0.25, 3);
  mine.ballot = __ballot_sync(kAllLanes, i & 1);
  mine.any = 10 * __any_sync(kAllLanes, i % 32 == 3) + __any_sync(kAllLanes, 0);
  mine.all = 10 * __all_sync(kAllLanes, 2) + __all_sync(kAllLanes, i % 32 != 3);
  mine.sum = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value));
  mine.least = __reduce_min_sync(kAllLanes, static_cast<unsigned>(value));
  mine.most = __reduce_max_sync(kAllLanes, static_cast<unsigned>(value));
  mine.int_least = __reduce_min_sync(kAllLanes, i % 32 - 2);
  mine.int_most = __reduce_max_sync(kAllLanes, -1 - i % 32);
}

void warps_shuffle_and_vote(int threads) {
  for_all_seeds([threads](int seed) {
    std::vector<Shuffled> out(static_cast<size_t>(threads));
    launch_kernel(shuffle_all, dim3(1), threads, 0, nullptr, out.data());
    for (int i = 0; i < threads; ++i) {
      const Shuffled& got = out[static_cast<size_t>(i)];
      const int lane = i % 32, first = i - lane, size = threads - first < 32 ? threads - first : 32;
      const auto is = [&](const char* what, long long value, long long expected) {
        CHECK(value == expected, "%d threads, seed %d, thread %d: %s is %lld, not %lld", threads, seed, i, what, value,
              expected);
      };
      // The value of a lane that does not exist is undefined.
      const auto from = [&](const char* what, int value, int source) {
        is(what, value, source < size ? 100 + first + source : static_cast<int>(0xa5a5a5a5u));
      };
      from("index", got.index, 3);
      from("segment_index", got.segment_index, lane / 4 * 4 + (lane + 1) % 4);
      from("up", got.up, lane < 2 ? lane : lane - 2);
      from("segment_up", got.segment_up, lane % 4 == 0 ? lane : lane - 1);
      from("down", got.down, lane >= 30 ? lane : lane + 2);
      from("segment_down", got.segment_down, lane % 4 == 3 ? lane : lane + 1);
      from("exchanged", got.exchanged, lane ^ 1);
      from("segment_exchanged", got.segment_exchanged, lane / 4 % 2 ? lane ^ 4 : lane);
      CHECK(size <= 3 || got.wide == 103.25 + first, "%g", got.wide);
      const unsigned lanes = size == 32 ? kAllLanes : (1u << size) - 1;
      is("ballot", got.ballot, lanes & 0xaaaaaaaau);
      is("any", got.any, size > 3 ? 10 : 0);
      is("all", got.all, size > 3 ? 10 : 11);
      is("sum", got.sum, (100 + first) * size + size * (size - 1) / 2);
      is("least", got.least, 100 + first);
      is("most", got.most, 100 + first + size - 1);
      is("int_least", got.int_least, -2);
      is("int_most", got.int_most, -1);
    }
  });
}

// The two halves of a warp diverge, execute different numbers of operations, and converge again.
__global__ void split_warp(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  int value = i;
  if (i < 8) {
    for (int step = 4; step; step /= 2) value += __shfl_xor_sync(0xffu, value, step);
  } else {
    value = __popc(__ballot_sync(0xffffff00u, i % 2));
  }
  __syncwarp();
  out[i] = value + __shfl_sync(kAllLanes, value, 31);
}

void a_warp_may_split() {
  for_all_seeds([](int seed) {
    int out[32];
    launch_kernel(split_warp, dim3(1), 32, 0, nullptr, out);
    for (int i = 0; i < 32; ++i) CHECK(out[i] == (i < 8 ? 28 : 12) + 12, "seed %d lane %d: %d", seed, i, out[i]);
  });
}

// ---- atomics, arithmetic -----------------------------------------------------------------------------------------

struct Totals {
  int sum, least, most;
  unsigned bits, owner, last;
  unsigned long long wide;
};

__global__ void add_up(Totals* totals) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&totals->sum, i);
  atomicMin(&totals->least, -i);
  atomicMax(&totals->most, i);
  atomicOr(&totals->bits, 1u << i % 20);
  atomicAdd(&totals->wide, 1ull << 40);
  atomicCAS(&totals->owner, 0u, static_cast<unsigned>(i) + 1);
  atomicExch(&totals->last, static_cast<unsigned>(i) + 1);
}

void atomics_add_up() {
  std::set<unsigned> owners, lasts;
  for_all_seeds([&](int) {
    Totals totals = {};
    launch_kernel(add_up, dim3(10), 100, 0, nullptr, &totals);
    CHECK(totals.sum == 499500 && totals.least == -999 && totals.most == 999, "%d %d %d", totals.sum, totals.least,
          totals.most);
    CHECK(totals.bits == 0xfffff && totals.wide == 1000ull << 40, "%x %llx", totals.bits, totals.wide);
    owners.insert(totals.owner);
    lasts.insert(totals.last);
  });
  CHECK(owners.size() > kSeeds / 2 && lasts.size() > kSeeds / 2, "%zu owners, %zu last", owners.size(), lasts.size());
  int wraps = INT_MAX;
  CHECK(atomicAdd(&wraps, 1) == INT_MAX && wraps == INT_MIN, "%d", wraps);
}

void bits_and_floats() {
  CHECK(__popc(0xf0f0u) == 8 && __popcll(~0ull) == 64 && __ffs(0) == 0 && __ffs(8) == 4, "counts");
  CHECK(__clz(0) == 32 && __clz(-1) == 0 && __clz(1) == 31 && __brev(0x00000006u) == 0x60000000u, "%x", __brev(6));
  CHECK(__funnelshift_l(0x80000000u, 1u, 1) == 3u && __funnelshift_l(1, 7, 32) == 7u, "left");
  CHECK(__funnelshift_r(2u, 1u, 1) == 0x80000001u && __funnelshift_r(1, 7, 32) == 1u, "right");
  CHECK(__float_as_uint(1.f) == 0x3f800000u && __int_as_float(0x40000000) == 2.f, "bits");
  CHECK(max(NAN, 1.f) == 1.f && min(2.f, NAN) == 2.f && min(-1, 2u) == 2u && max(int64_t{3}, int64_t{4}) == 4, "max");
  const uint4 vector = make_uint4(1, 2, 3, 4);
  uint4 copy = {};
  __stcs(&copy, __ldcs(&vector));
  CHECK(copy.w == 4 && alignof(uint4) == 16 && alignof(float2) == 8 && sizeof(uint3) == 12, "%u", copy.w);
  CHECK(__fmaf_rn(1.f + 0x1p-20f, 1.f - 0x1p-20f, -1.f) == -0x1p-40f, "rounded twice");
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

void threads_of_the_process_may_all_launch() {
  std::vector<std::thread> launchers;
  std::vector<std::vector<int>> sums(4, std::vector<int>(3 * 256));
  for (auto& mine : sums)
    launchers.emplace_back([&mine] {
      for (int i = 0; i < 20; ++i) {
        launch_kernel(sum_of_warps<true>, dim3(1), 256, 8 * sizeof(int), nullptr, mine.data());
        launch_kernel(nothing, 0, 1, 0, nullptr);  // sets an error of this thread only
        CHECK(cudaGetLastError() != cudaSuccess, "accepted");
      }
    });
  for (std::thread& launcher : launchers) launcher.join();
  for (const auto& mine : sums)
    CHECK(mine[0] == 256 * 255 / 2 && mine[767] == 3 * mine[0], "%d %d", mine[0], mine[767]);
  CHECK(cudaGetLastError() == cudaSuccess, "the error of another thread");
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

// ---- costs -------------------------------------------------------------------------------------------------------

__global__ void many_barriers(int count) {
  for (int i = 0; i < count; ++i) __syncthreads();
}
__global__ void many_shuffles(int count, int* out) {
  int value = 0;
  for (int i = 0; i < count; ++i) value += __shfl_xor_sync(kAllLanes, value, 1);
  *out = value;
}
__global__ void no_barrier(int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] += 1; }

template <class Run>
double seconds(const Run& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void measure() {
  constexpr int kCount = 400, kThreads = 512, kBlocks = 20;
  constexpr double kAll = 1e-9 * kCount * kThreads * kBlocks;
  std::vector<int> out(static_cast<size_t>(4000) * 1024);
  const double barriers =
      seconds([] { launch_kernel(many_barriers, dim3(kBlocks), kThreads, 0, nullptr, int{kCount}); });
  const double shuffles =
      seconds([&] { launch_kernel(many_shuffles, dim3(kBlocks), kThreads, 0, nullptr, int{kCount}, out.data()); });
  const double none = seconds([&] { launch_kernel(no_barrier, dim3(4000), 1024, 0, nullptr, out.data()); });
  std::printf("per thread: %.1f ns a barrier, %.1f ns a shuffle (512 threads); %.1f ns with neither (1024 threads)\n",
              barriers / kAll, shuffles / kAll, none * 1e9 / static_cast<double>(out.size()));
}

}  // namespace

int main() {
  a_missing_barrier_shows();
  a_warp_that_runs_ahead_shows_a_missing_barrier();
  blocks_vote();
  for (const int threads : {1, 3, 31, 32, 33, 64, 100, 1024}) warps_shuffle_and_vote(threads);
  a_warp_may_split();
  atomics_add_up();
  bits_and_floats();
  every_block_finds_poison();
  every_block_of_a_grid_runs_once_in_any_order();
  launches_are_refused();
  threads_of_the_process_may_all_launch();
  wrong_kernels_are_stopped();
  measure();
  return report("test_shim");
}
