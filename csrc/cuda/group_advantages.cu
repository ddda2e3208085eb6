// group_advantages: computes (reward - mean) / (standard deviation + eps), where the mean is over the reward's group.
//
// A warp handles a small group, and a block handles a large group. Warps and blocks add in different orders, but the
// results of a group must be bitwise equal in any batch. So only the length of the group decides between a warp and a
// block.
//
//   launch                      kernel             reads             -> writes
//   group_advantages (batch)    batch_deviation    rewards           -> batch   (scale="batch" only; one block)
//   group_advantages            write_advantages   rewards, batch    -> out     (small groups, then large ones)
#include "../ops/rollouts.h"
#include "collective.h"
#include "note_faults.h"
#include "size_class.h"

namespace d3s {
namespace {

constexpr int kThreads = 128;
constexpr int kBatchThreads = BlockGroup::kMostThreads;
constexpr int64_t kLargeGroup = 512;  // a group of at least this length is handled by a block

// The statistics are computed in two passes: first `mean`, then `squares`, the sum of squared differences from `mean`.
struct Statistics {
  double mean, squares;
  int64_t count;

  __device__ double deviation(int64_t ddof) const {
    return count > ddof ? sqrt(squares / static_cast<double>(count - ddof)) : 0.0;
  }
};

template <class T, class Group>
__device__ Statistics statistics(const T* rewards, int64_t begin, int64_t end, const Group& group) {
  double sum = 0.0;
  int64_t count = 0;
  for (int64_t i = begin + group.rank; i < end; i += group.size) {
    const double reward = number_of(rewards[i]);
    if (reward != reward) continue;
    sum += reward;
    ++count;
  }
  Statistics s = {0.0, 0.0, group.reduce(count, Sum())};
  sum = group.reduce(sum, Sum());
  if (s.count > 0) s.mean = sum / static_cast<double>(s.count);
  double squares = 0.0;
  for (int64_t i = begin + group.rank; i < end; i += group.size) {
    const double reward = number_of(rewards[i]), difference = reward - s.mean;
    if (reward == reward) squares += difference * difference;
  }
  s.squares = group.reduce(squares, Sum());
  return s;
}

// Returns whether the rewards are equal except for rounding.
template <class T, class Group>
__device__ bool all_equal(const T* rewards, int64_t begin, int64_t end, const Statistics& s, double tolerance,
                          const Group& group) {
  if (far_apart(s.mean, s.squares, s.count, tolerance)) return false;
  using Number = decltype(number_of(*rewards));
  Number lowest = INFINITY, highest = -INFINITY;
  for (int64_t i = begin + group.rank; i < end; i += group.size) {
    const Number reward = number_of(rewards[i]);
    if (reward < lowest) lowest = reward;  // always false for NaN
    if (reward > highest) highest = reward;
  }
  lowest = group.reduce(lowest, Min());
  highest = group.reduce(highest, Max());
  return without_spread(lowest, highest, tolerance);
}

template <class T>
__global__ void __launch_bounds__(kBatchThreads)
    batch_deviation(const T* rewards, int64_t n, int64_t ddof, double* deviation) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  const Statistics s = statistics(rewards, 0, n, block);
  if (block.rank == 0) *deviation = s.deviation(ddof);
}

template <class T, class Group>
__global__ void __launch_bounds__(kThreads)
    write_advantages(const T* rewards, const __grid_constant__ Segments groups, const __grid_constant__ SizeClass sizes,
                     const __grid_constant__ AdvantageOptions options, const double* batch, float* out,
                     const __grid_constant__ Faults faults) {
  note_offsets(groups, faults);
  const Group group(dynamic_shared<unsigned char>());
  const int64_t each = blockDim.x / group.size, number = blockIdx.x * each + threadIdx.x / group.size;
  if (number >= groups.count) return;
  const int64_t begin = groups.begin(number), end = groups.end(number);
  if (!sizes.has(end - begin)) return;
  const Statistics s = statistics(rewards, begin, end, group);
  if (all_equal(rewards, begin, end, s, options.tolerance, group)) {
    for (int64_t i = begin + group.rank; i < end; i += group.size) out[i] = 0.f;
    return;
  }
  const double deviation = options.scale == AdvantageScale::kGroup ? s.deviation(options.ddof) : batch ? *batch : 0.0;
  const double divisor = options.scale == AdvantageScale::kNone ? 1.0 : deviation + options.eps;
  for (int64_t i = begin + group.rank; i < end; i += group.size)
    out[i] = advantage_of(number_of(rewards[i]), s.mean, s.count, divisor);
}

}  // namespace

void group_advantages_of(const SegmentedValues& rewards, const AdvantageOptions& options, float* out, Device& device) {
  const Segments& groups = rewards.segments;
  // Fills `out` with NaN, which stays where bad offsets leave a gap between groups.
  if (groups.ragged()) clear(out, 0xff, rewards.total * sizeof(float), device);
  if (groups.count == 0) return;
  dispatch_rewards(rewards.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* p = static_cast<const T*>(rewards.values);
    double* batch = nullptr;
    if (options.scale == AdvantageScale::kBatch) {
      batch = device.scratch_of<double>(1);
      launch("group_advantages (batch)", batch_deviation<T>, 1, kBatchThreads, BlockGroup::kSharedBytes, device, p,
             rewards.total, options.ddof, batch);
    }
    const auto run = [&](auto kernel, int64_t per_block, size_t shared, const SizeClass& sizes) {
      launch("group_advantages", kernel, ceil_div(groups.count, per_block), kThreads, shared, device, p, groups, sizes,
             options, static_cast<const double*>(batch), out, device.faults);
    };
    // With offsets, only the device knows the lengths. Then one launch for small groups and one for large groups are
    // needed, unless there are too few rewards for a large group.
    const int64_t shortest = groups.ragged() ? 0 : groups.length;
    const int64_t longest = groups.ragged() ? rewards.total : groups.length;
    if (shortest < kLargeGroup)
      run(write_advantages<T, WarpGroup>, kThreads / kWarp, WarpGroup::kSharedBytes, {0, kLargeGroup - 1, 0});
    if (longest >= kLargeGroup)
      run(write_advantages<T, BlockGroup>, 1, BlockGroup::kSharedBytes, {kLargeGroup, INT64_MAX, 0});
  });
}

}  // namespace d3s
