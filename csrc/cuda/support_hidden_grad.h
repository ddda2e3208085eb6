// support_hidden_grad_: computes the gradient of each hidden state. This gradient is a sum with one term for each id of
// the row's set: the gradient of the id's logit, times the id's row of the weight.
#pragma once

#include "support_sums.h"

namespace d3s {
namespace {

// Returns the index of a row's first stretch. The row's other stretches have the next indices. No two rows share an
// index. Some indices may stay unused; in return, this function needs no scan over the rows.
__device__ inline int64_t first_stretch(const Segments& supports, int64_t row) {
  return supports.begin(row) / kStretch + row;
}
// Returns the row of a stretch, or a negative number if no row has this stretch. Offsets do not decrease, so two
// offsets narrow the search, mostly to one or two rows. A binary search over all rows would load a dozen offsets, one
// after the other. If the offsets are bad, the result is an arbitrary row or a negative number.
__device__ inline int64_t row_of_stretch(const Segments& supports, int64_t stretch) {
  const int64_t most = stretch < supports.count ? stretch : supports.count - 1;
  if (most < 0) return -1;
  int64_t low = stretch - supports.begin(most) / kStretch;
  low = low < 0 ? 0 : low < most ? low : most;
  const int64_t after = stretch - supports.begin(low) / kStretch + 1;
  int64_t high = after < supports.count ? after : supports.count;
  if (high <= low) return -1;
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    if (first_stretch(supports, middle) <= stretch)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// The support of each row is cut into stretches, and the columns are cut into pieces. There is one block for each pair
// of a stretch and a piece.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_rows(const __grid_constant__ SupportGradient gradient, const __grid_constant__ Matrix weight,
             const __grid_constant__ Segments supports, uint32_t pieces, bool aligned, bool out_aligned,
             const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out) {
  const int64_t stretch = blockIdx.x / pieces, row = row_of_stretch(supports, stretch);
  if (row < 0) return;
  const int64_t n = stretch - first_stretch(supports, row), first = supports.begin(row), last = supports.end(row);
  const int64_t begin = first + n * kStretch, end = begin + kStretch < last ? begin + kStretch : last;
  if (begin >= end) return;
  ColumnSums<T> total(blockIdx.x % pieces, weight.columns);
  // The label's term follows the last term of the support. The three loads of a term do not wait for each other.
  const auto term_at = [&](int64_t i) {
    const int64_t place = begin + i < end ? begin + i : supports.limit + row;
    const int64_t of_row = gradient.rows[place], token = gradient.tokens[place];
    const float factor = gradient.grad[place];
    const bool counts = of_row == row && token >= 0 && token < weight.rows;
    return counts ? Term{static_cast<int32_t>(token), factor} : Term();
  };
  total.add_terms(weight, aligned, 0, end - begin + (end == last ? 1 : 0), term_at);
  if (last - first > kStretch)
    stretches.keep(stretches.at(first, n), total);
  else
    total.write(row_of<To>(out, row), false, out_aligned);
}

// Writes the rows that sum_rows does not finish: undefined rows, which become NaN, and rows with several stretches. If
// the offsets are bad, the sums of some stretches are missing. The missing sums are not needed, since every row with a
// gradient is then undefined.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    finish_rows(const __grid_constant__ Segments supports, const int* bad, const bool* undefined, uint32_t pieces,
                bool out_aligned, const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out) {
  const int64_t row = blockIdx.x / pieces, piece = blockIdx.x % pieces,
                places = supports.end(row) - supports.begin(row);
  if (!undefined[row] && places <= kStretch) return;
  ColumnSums<T> total(piece, out.columns);
  if (undefined[row]) {
    for (float& sum : total.sums) sum = NAN;
  } else if (!*bad) {
    total = stretches.joined<T>(supports.begin(row), places, piece);
  }
  total.write(row_of<To>(out, row), false, out_aligned);
}

}  // namespace

}  // namespace d3s
