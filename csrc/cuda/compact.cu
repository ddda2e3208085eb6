// compact: writes the indices of a mask's true values, in row-major order, to a tensor of fixed size.
//
// The first launch writes one bit, a flag, for each value of the mask. So the second launch reads only one bit for each
// byte of the mask. No block waits for another block: each block of the second launch adds up all counts of the first
// launch.
//
//   launch            kernel       reads           -> writes
//   compact           list_mask    mask            -> indices, count                (if one block is enough)
//
//   compact (flags)   flag_piece   mask            -> flags, counts
//   compact           list_piece   flags, counts   -> indices, count
#include <algorithm>

#include "../ops/compact.h"
#include "collective.h"
#include "vectors.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kInFlight = 4;                      // vectors that a thread loads before it uses the first
constexpr int kStretch = kWarp * kInFlight * 16;  // values that a warp handles at a time
constexpr int kStep = kWarps * kStretch;  // values that a block handles at a time; 4 million values make 256 steps
constexpr int kFlags = kStep / 16;        // 16-bit words of flags in a step: one for each vector

// There are at most 512 pieces, so a lane adds up at most 16 counts. Beyond 8 million values, a piece is several steps.
// An H100 gets at most 4 blocks for each multiprocessor. These blocks have three times as many bytes in flight as are
// needed to hide the memory latency.
constexpr int64_t kMostPieces = 512;
constexpr int kBlocksPerSm = 4;

// A mask, cut into pieces of whole steps. Each block handles one piece. The first step begins at the last aligned
// address at or before the mask's first value.
struct Mask {
  const uint8_t* values;
  int64_t n, steps, steps_of_piece;
  int pieces;

  Mask(const uint8_t* values, int64_t n)
      : values(values),
        n(n),
        steps(ceil_div(n + misalignment(values), kStep)),
        steps_of_piece(std::max(ceil_div(steps, kMostPieces), int64_t{1})),
        pieces(static_cast<int>(ceil_div(steps, steps_of_piece))) {}

  __device__ int64_t begin_of(int64_t step) const { return step * kStep - misalignment(values); }
  // The block has the steps in [first_step(), end_step()). This range is empty if the block has no piece.
  __device__ int64_t first_step() const { return min(blockIdx.x * steps_of_piece, steps); }
  __device__ int64_t end_step() const { return min((blockIdx.x + 1) * steps_of_piece, steps); }
};

struct Outputs {
  int64_t *indices, capacity, *count;
};

struct Shared {
  uint16_t lists[kWarps][kStretch];
  int counts[2][kWarps];  // neighbouring steps use different arrays, so that a step needs only one barrier
};

// Returns one bit for each byte of a word: 1 if the byte is not 0.
D3S_HOST_DEVICE uint32_t flags_of_word(uint32_t word) {
  const uint32_t tops = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
  return tops * 0x00204081u >> 28;  // gathers the top bits of the four bytes
}

// Returns the flags of the 16 values from index `at` on. If all of their indices are in [from, to), `v` has the values.
// Otherwise, the values at indices in [from, to) are read one by one, and the other values count as false.
__device__ uint32_t flags_of(const uint4& v, const uint8_t* values, int at, int from, int to) {
  if (at >= from && at + 16 <= to)
    return flags_of_word(v.x) | flags_of_word(v.y) << 4 | flags_of_word(v.z) << 8 | flags_of_word(v.w) << 12;
  uint32_t flags = 0;
#pragma unroll 1
  for (int i = max(at, from); i < min(at + 16, to); ++i) flags |= uint32_t{values[i] != 0} << (i - at);
  return flags;
}

// Writes the flags of a step. Returns how many of the thread's values are true.
__device__ int flag_step(const Mask& mask, int64_t step, uint16_t* flags) {
  const int thread = static_cast<int>(threadIdx.x), first = thread / kWarp * kInFlight * kWarp + thread % kWarp;
  const uint8_t* values = mask.values + mask.begin_of(step);
  const int64_t left = mask.n - mask.begin_of(step);
  const int from = step > 0 ? 0 : misalignment(mask.values), to = left < kStep ? static_cast<int>(left) : kStep;
  uint4 vectors[kInFlight];
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    const int at = (first + j * kWarp) * 16;
    vectors[j] = make_uint4(0, 0, 0, 0);
    if (at >= from && at + 16 <= to) vectors[j] = load_streaming(reinterpret_cast<const uint4*>(values + at));
  }
  int own = 0;
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    const int v = first + j * kWarp;
    const uint32_t found = flags_of(vectors[j], values, v * 16, from, to);
    flags[v] = static_cast<uint16_t>(found);
    own += __popc(found);
  }
  return own;
}

// Returns the position of an entry in a warp's list. Positions are swizzled for the case that all values are true: the
// lanes of a warp then write to 32 different banks. Without swizzling, they would all write to the same bank.
D3S_HOST_DEVICE int swizzled(int entry) { return entry ^ (entry >> 5 & 62); }

// Writes the indices of a step's true values to the slots from `next` on. Returns how many values of the step are true.
// `bits` has the flags of the thread's 64 values. Each warp first lists the positions of its true values in shared
// memory, and then copies the list to global memory. So a step with few true values takes little time, and the warp
// writes whole memory sectors.
__device__ int list_step(uint64_t bits, int64_t begin, int64_t next, const Outputs& out, Shared& shared, int half) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int (&counts)[kWarps] = shared.counts[half];
  int up_to = __popcll(bits), entry = warp_exclusive_sum(up_to);
  if (lane == kWarp - 1) counts[warp] = up_to;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += counts[w];
  }
  next += before;
  uint16_t* list = shared.lists[warp];
#pragma unroll
  for (int shift = 0; shift < 64; shift += 32)
#pragma unroll 1
    for (auto word = static_cast<uint32_t>(bits >> shift); word != 0; word &= word - 1)
      list[swizzled(entry++)] = static_cast<uint16_t>(lane * 64 + shift + __ffs(static_cast<int>(word)) - 1);
  __syncwarp();
  const int64_t room = max(out.capacity - next, int64_t{0});
  const int count = counts[warp] < room ? counts[warp] : static_cast<int>(room);
  int64_t* indices = out.indices + next;
  begin += warp * kStretch;
  for (int i = lane; i < count; i += kWarp) indices[i] = begin + list[swizzled(i)];
  return all;
}

// Writes the count, and writes -1 to all slots after the last index. All blocks share this work.
__device__ void finish(int64_t total, const Outputs& out) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *out.count = total;
#pragma unroll 1
  for (int64_t i = total + blockIdx.x * kThreads + threadIdx.x; i < out.capacity; i += gridDim.x * kThreads)
    out.indices[i] = -1;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    list_mask(const __grid_constant__ Mask mask, const __grid_constant__ Outputs out) {
  Shared& shared = *dynamic_shared<Shared>();
  flag_step(mask, 0, shared.lists[0]);
  __syncwarp();  // a warp reads only the flags that it wrote itself
  const uint64_t bits = reinterpret_cast<const uint64_t*>(shared.lists)[threadIdx.x];
  finish(list_step(bits, mask.begin_of(0), 0, out, shared, 0), out);
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    flag_piece(const __grid_constant__ Mask mask, uint16_t* flags, int64_t* counts) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  int64_t own = 0;
  for (int64_t step = mask.first_step(); step < mask.end_step(); ++step)
    own += flag_step(mask, step, flags + step * kFlags);
  own = block.reduce(own, Sum());
  if (block.rank == 0) counts[blockIdx.x] = own;
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    list_piece(const __grid_constant__ Mask mask, const uint64_t* flags, const int64_t* counts,
               const __grid_constant__ Outputs out) {
  Shared& shared = *dynamic_shared<Shared>();
  const int64_t end = mask.end_step();
  int64_t step = mask.first_step(), next = 0, total = 0;
  // This load is in flight while the counts are added up.
  uint64_t bits = step < end ? flags[step * kThreads + threadIdx.x] : 0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < mask.pieces; i += kWarp) {
    total += counts[i];
    if (i < static_cast<int>(blockIdx.x)) next += counts[i];
  }
  next = warp_reduce(next, Sum());  // each warp computes both sums, so no barrier is needed
  total = warp_reduce(total, Sum());
  while (step < end) {
    next += list_step(bits, mask.begin_of(step), next, out, shared, static_cast<int>(step % 2));
    if (++step < end) bits = flags[step * kThreads + threadIdx.x];
  }
  finish(total, out);
}

}  // namespace

void compact_indices(const uint8_t* values, int64_t n, int64_t* indices, int64_t capacity, int64_t* count,
                     Device& device) {
  const Mask mask(values, n);
  const Outputs out{indices, capacity, count};
  // If the capacity is larger than the mask, additional blocks help to write -1.
  const int64_t blocks = std::max(int64_t{mask.pieces}, std::min(ceil_div(capacity, kStep), kMostPieces));
  if (blocks <= 1) {
    launch("compact", list_mask, 1, kThreads, sizeof(Shared), device, mask, out);
    return;
  }
  auto* flags = device.scratch_of<uint64_t>(mask.steps * kThreads + mask.pieces);
  auto* counts = reinterpret_cast<int64_t*>(flags + mask.steps * kThreads);
  launch("compact (flags)", flag_piece, mask.pieces, kThreads, BlockGroup::kSharedBytes, device, mask,
         reinterpret_cast<uint16_t*>(flags), counts);
  launch("compact", list_piece, blocks, kThreads, sizeof(Shared), device, mask, static_cast<const uint64_t*>(flags),
         static_cast<const int64_t*>(counts), out);
}

}  // namespace d3s
