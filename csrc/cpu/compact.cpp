// compact returns the indices of a mask's true values, in row-major order. The caller chooses the size of the result.
#include <algorithm>

#include "../ops/compact.h"
#include "../torch_abi.h"

namespace d3s {
namespace {

constexpr int64_t kPiece = 65536;

int64_t count_true(const uint8_t* begin, const uint8_t* end) {
  return (end - begin) - std::count(begin, end, uint8_t{0});
}

}  // namespace

void compact_indices(const uint8_t* mask, int64_t n, int64_t* indices, int64_t capacity, int64_t* count, Device&) {
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  std::vector<int64_t> start(pieces + 1, 0);  // the number of true values before each piece
  parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece)
      start[piece + 1] = count_true(mask + piece * kPiece, mask + std::min(n, (piece + 1) * kPiece));
  });
  for (int64_t piece = 0; piece < pieces; ++piece) start[piece + 1] += start[piece];
  parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      // Every index is stored, but `to` advances only for a true value, so there is no branch to mispredict. The loop
      // ends at the piece's last true value, so that it stores nothing in the next piece's part of `indices`.
      const int64_t end = std::min(start[piece + 1], capacity);
      for (int64_t i = piece * kPiece, to = start[piece]; to < end; ++i) {
        indices[to] = i;
        to += mask[i] != 0;
      }
    }
  });
  *count = start[pieces];
  if (*count < capacity) std::fill(indices + *count, indices + capacity, int64_t{-1});
}

}  // namespace d3s
