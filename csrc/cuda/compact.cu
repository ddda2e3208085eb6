// compact: where the true values of a mask are, in row-major order, in a tensor of a size known beforehand.
//
// One launch, "compact": mask -> indices, count. Every block itself counts the true values before its piece, 16 at a
// time. For the millions of values of a batch, this is cheaper than a second launch or a wait for other blocks.
#include "../ops/compact.h"
#include "collective.h"
#include "vectors.h"

namespace d3s {
namespace {

constexpr int kThreads = BlockGroup::kMostThreads;
constexpr int64_t kPiece = 32768;
constexpr int64_t kMostPieces = 64;  // more would not help the last block, which reads the whole mask

// How many of four bytes are not 0.
D3S_HOST_DEVICE int count_bytes(uint32_t word) {
  int count = 0;
  for (int shift = 0; shift < 32; shift += 8) count += (word >> shift & 0xffu) != 0;
  return count;
}

// Counts the true values in the thread's share of mask[0, end). The mask may be misaligned.
__device__ int64_t count_before(const uint8_t* mask, int64_t end, const BlockGroup& block) {
  const int64_t head = elements_to_vector(mask);
  const int64_t first = head < end ? head : end, vectors = (end - first) / 16;
  int64_t count = 0;
  for (int64_t i = block.rank; i < first; i += block.size) count += mask[i] != 0;
  for (int64_t v = block.rank; v < vectors; v += block.size) {
    const uint4 bytes = load_cached(reinterpret_cast<const uint4*>(mask + first) + v);
    count += count_bytes(bytes.x) + count_bytes(bytes.y) + count_bytes(bytes.z) + count_bytes(bytes.w);
  }
  for (int64_t i = first + vectors * 16 + block.rank; i < end; i += block.size) count += mask[i] != 0;
  return count;
}

__global__ void __launch_bounds__(kThreads)
    write_indices(const uint8_t* mask, int64_t n, int64_t piece, int64_t* indices, int64_t capacity, int64_t* count) {
  const BlockGroup block(dynamic_shared<unsigned char>());
  const int lane = block.rank % kWarp;
  const int64_t begin = blockIdx.x * piece < n ? blockIdx.x * piece : n, end = begin + piece < n ? begin + piece : n;
  int64_t next = block.reduce(count_before(mask, begin, block), Sum());

  int64_t from, to;
  block.warp_stretch(begin, end, from, to);
  int64_t own = 0;
  for (int64_t i = from + lane; i < to; i += kWarp) own += mask[i] != 0;
  next += block.sum_before_warp(own);
  for (int64_t first = from; first < to; first += kWarp) {
    const int64_t i = first + lane;
    const bool taken = i < to && mask[i] != 0;
    const unsigned found = __ballot_sync(kAllLanes, taken);
    const int64_t place = next + __popc(found & ((1u << lane) - 1));
    if (taken && place < capacity) indices[place] = i;
    next += __popc(found);
  }

  if (blockIdx.x + 1 < gridDim.x) return;
  // The last warp of the last block has the highest count, which is that of all true values.
  const int64_t total = block.reduce(next, Max());
  if (block.rank == 0) *count = total;
  for (int64_t i = total + block.rank; i < capacity; i += block.size) indices[i] = -1;
}

}  // namespace

void compact_indices(const uint8_t* mask, int64_t n, int64_t* indices, int64_t capacity, int64_t* count,
                     Device& device) {
  const int64_t pieces = ceil_div(n, kPiece) < kMostPieces ? ceil_div(n, kPiece) : kMostPieces;
  const int64_t blocks = pieces > 0 ? pieces : 1;
  launch("compact", write_indices, blocks, kThreads, BlockGroup::kSharedBytes, device, mask, n, ceil_div(n, blocks),
         indices, capacity, count);
}

}  // namespace d3s
