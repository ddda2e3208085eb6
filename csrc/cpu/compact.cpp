// compact: where the true values of a mask are, in row-major order, in a tensor of a size known beforehand.
#include <algorithm>

#include "../torch_abi.h"

namespace d3s {
namespace {

constexpr int64_t kPiece = 65536;

int64_t count_true(const uint8_t* begin, const uint8_t* end) {
  return (end - begin) - std::count(begin, end, uint8_t{0});
}

std::tuple<Tensor, Tensor> compact(const Tensor& mask, int64_t capacity) {
  require(mask.scalar_type() == ScalarType::Bool, "mask", "got dtype ", dtype(mask), "; takes bool");
  require(capacity >= 0, "capacity", "got ", capacity, "; takes at least 0");
  const Tensor source = packed(mask);
  const Tensor indices = empty({capacity}, ScalarType::Long, mask), count = empty({1}, ScalarType::Long, mask);
  const auto* p = data<uint8_t>(source);  // not bool: a viewed one may be any byte
  int64_t* out = mutable_data<int64_t>(indices);
  const int64_t n = source.numel(), pieces = (n + kPiece - 1) / kPiece;

  std::vector<int64_t> start(pieces + 1, 0);  // how many come before a piece
  parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece)
      start[piece + 1] = count_true(p + piece * kPiece, p + std::min(n, (piece + 1) * kPiece));
  });
  for (int64_t piece = 0; piece < pieces; ++piece) start[piece + 1] += start[piece];
  parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      // Every index is stored, the kept ones by moving on: no branch to mispredict, no store past the piece's last.
      const int64_t end = std::min(start[piece + 1], capacity);
      for (int64_t i = piece * kPiece, to = start[piece]; to < end; ++i) {
        out[to] = i;
        to += p[i] != 0;
      }
    }
  });
  const int64_t found = start[pieces];
  *mutable_data<int64_t>(count) = found;
  if (found < capacity) std::fill(out + found, out + capacity, int64_t{-1});
  return {indices, count};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(d3s_kernels, CPU, m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace d3s
