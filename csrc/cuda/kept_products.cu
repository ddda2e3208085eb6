// Products of the kept rows of an LM head's weight.
//
//   launch                       kernel           reads                                  -> writes
//   kept_logits                  multiply_pairs   hidden, weight, pairs                  -> out
//   kept_hidden_grad             sum_rows         grad, weight, tokens, offsets          -> out
//   kept_weight_grad (entries)   make_entries     pairs                                  -> entries, indices
//   kept_weight_grad (sort)      CUB              entries, indices                       -> the same, by token
//   kept_weight_grad             sum_tokens       grad, hidden, entries, indices         -> out, where it was touched
#include "../ops/kept_products.h"

#include "collective.h"
#include "segment_sort.h"
#include "vectors.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int kPairsOfBlock = kThreads / kWarp;

// Some neighbouring elements of a row of `columns`, one vector of 16 bytes; 0 past its end.
template <class T>
struct Elements {
  float values[kPerVector<T>];

  __device__ Elements(const T* row, int64_t first, int64_t columns, bool aligned) {
    int i = 0;
    if (aligned && first + kPerVector<T> <= columns) {
      for_elements<T>(load_cached(reinterpret_cast<const uint4*>(row + first)), [&](float x) { values[i++] = x; });
      return;
    }
#pragma unroll
    for (i = 0; i < kPerVector<T>; ++i) values[i] = first + i < columns ? to_float(row[first + i]) : 0.f;
  }
};

template <class T>
bool is_aligned(const Matrix& matrix) {
  return misalignment(matrix.values) == 0 && matrix.stride % kPerVector<T> == 0;
}

template <class T>
__device__ const T* row_of(const Matrix& matrix, int64_t row) {
  return static_cast<const T*>(matrix.values) + row * matrix.stride;
}

// A warp for each pair. The order of the sum depends on the number of columns alone.
template <class T>
__global__ void __launch_bounds__(kThreads)
    multiply_pairs(const __grid_constant__ Matrix hidden, const __grid_constant__ Matrix weight,
                   const __grid_constant__ Pairs pairs, bool aligned, float* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t pair = int64_t{blockIdx.x} * kPairsOfBlock + threadIdx.x / kWarp;
  if (pair >= pairs.count) return;
  float sum = 0.f;
  if (pairs.has(pair, hidden.rows, weight.rows)) {
    const T *a = row_of<T>(hidden, pairs.rows[pair]), *b = row_of<T>(weight, pairs.tokens[pair]);
#pragma unroll 2
    for (int64_t first = lane * kPerVector<T>; first < hidden.columns; first += kWarp * kPerVector<T>) {
      const Elements<T> x(a, first, hidden.columns, aligned), y(b, first, hidden.columns, aligned);
#pragma unroll
      for (int i = 0; i < kPerVector<T>; ++i) sum = fmaf(x.values[i], y.values[i], sum);
    }
  }
  sum = warp_reduce(sum, Sum());
  if (lane == 0) out[pair] = sum;
}

// What a thread adds up: the same columns of several rows.
template <class T>
struct ColumnSums {
  float sums[kPerVector<T>] = {};
  int64_t first, columns;

  __device__ ColumnSums(int64_t piece, int64_t columns)
      : first((piece * kThreads + threadIdx.x) * kPerVector<T>), columns(columns) {}

  __device__ void add(const T* row, float factor, bool aligned) {
    if (first >= columns) return;
    const Elements<T> x(row, first, columns, aligned);
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i) sums[i] = fmaf(factor, x.values[i], sums[i]);
  }
};

template <class T>
int64_t pieces_of(int64_t columns) {
  return ceil_div(columns, kThreads * kPerVector<T>);
}

// A block for each row, or for each piece of a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_rows(const float* grad, const __grid_constant__ Matrix weight, const int32_t* tokens,
             const __grid_constant__ Segments segments, int64_t pieces, bool aligned, float* out) {
  const int64_t row = blockIdx.x / pieces;
  ColumnSums<T> total(blockIdx.x % pieces, weight.columns);
  const int64_t end = segments.end(row);
#pragma unroll 4
  for (int64_t pair = segments.begin(row); pair < end; ++pair) {
    const int64_t token = tokens[pair];
    if (token >= 0 && token < weight.rows) total.add(row_of<T>(weight, token), grad[pair], aligned);
  }
  float* to = out + row * weight.columns + total.first;
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i)
    if (total.first + i < weight.columns) to[i] = total.sums[i];
}

// The sort is by token; pairs that stand for nothing come last.
__global__ void make_entries(const __grid_constant__ Pairs pairs, int64_t hidden_rows, int64_t vocabulary,
                             uint64_t* entries, uint32_t* indices) {
  const int64_t pair = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (pair >= pairs.count) return;
  entries[pair] = static_cast<uint64_t>(pairs.has(pair, hidden_rows, vocabulary) ? pairs.tokens[pair] : vocabulary);
  indices[pair] = static_cast<uint32_t>(pair);
}

// A block for each token, or for each piece of its row, starts where the first pair of the token lies.
template <class T, class To>
__global__ void __launch_bounds__(kThreads)
    sum_tokens(const float* grad, const __grid_constant__ Matrix hidden, const int32_t* rows, SortedEntries sorted,
               int64_t count, int64_t pieces, bool aligned, const __grid_constant__ Matrix out) {
  const int64_t first = blockIdx.x / pieces;
  const auto token = static_cast<int64_t>(sorted.entries[first]);
  if (token >= out.rows || (first > 0 && static_cast<int64_t>(sorted.entries[first - 1]) == token)) return;
  ColumnSums<T> total(blockIdx.x % pieces, hidden.columns);
#pragma unroll 4
  for (int64_t i = first; i < count && static_cast<int64_t>(sorted.entries[i]) == token; ++i) {
    const uint32_t pair = sorted.indices[i];
    total.add(row_of<T>(hidden, rows[pair]), grad[pair], aligned);
  }
  To* to = const_cast<To*>(row_of<To>(out, token)) + total.first;
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i)
    if (total.first + i < hidden.columns) to[i] = from_float<To>(to_float(to[i]) + total.sums[i]);
}

}  // namespace

void pair_products(const Matrix& hidden, const Matrix& weight, const Pairs& pairs, float* out, Device& device) {
  dispatch_float(hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("kept_logits", multiply_pairs<T>, ceil_div(pairs.count, kPairsOfBlock), kThreads, 0, device, hidden, weight,
           pairs, is_aligned<T>(hidden) && is_aligned<T>(weight), out);
  });
}

void sum_for_rows(const float* grad, const Matrix& weight, const int32_t* tokens, const Segments& segments, float* out,
                  Device& device) {
  dispatch_float(weight.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t pieces = pieces_of<T>(weight.columns);
    launch("kept_hidden_grad", sum_rows<T>, segments.count * pieces, kThreads, 0, device, grad, weight, tokens,
           segments, pieces, is_aligned<T>(weight), out);
  });
}

void add_for_tokens(const float* grad, const Matrix& hidden, const Pairs& pairs, const Matrix& out, Device& device) {
  const int64_t n = pairs.count;
  if (n == 0 || hidden.columns == 0) return;
  auto *entries = device.scratch_of<uint64_t>(n), *entries_spare = device.scratch_of<uint64_t>(n);
  auto *indices = device.scratch_of<uint32_t>(n), *indices_spare = device.scratch_of<uint32_t>(n);
  launch("kept_weight_grad (entries)", make_entries, ceil_div(n, kThreads), kThreads, 0, device, pairs, hidden.rows,
         out.rows, entries, indices);
  int bits = 1;
  while (out.rows >> bits) ++bits;
  const SortedEntries sorted = sort_entries(entries, entries_spare, indices, indices_spare, n, bits, device);
  dispatch_float(hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t pieces = pieces_of<T>(hidden.columns);
    const auto start = [&](auto kernel) {
      launch("kept_weight_grad", kernel, n * pieces, kThreads, 0, device, grad, hidden, pairs.rows, sorted, n, pieces,
             is_aligned<T>(hidden), out);
    };
    if (out.type == hidden.type)
      start(sum_tokens<T, T>);
    else
      start(sum_tokens<T, float>);
  });
}

}  // namespace d3s
