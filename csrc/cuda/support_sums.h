// Sums over places, for the kernels of support_products.cu. Each place stands for a row of a matrix and a factor. A sum
// over places is the sum of these rows, each multiplied by its factor. If a support or an id has more than kStretch
// places, several blocks compute its sum, each over a stretch of at most kStretch places. The first stretch begins at
// the first place of the support or id. So the sum is bitwise equal, whatever other supports or ids there are.
#pragma once

#include "../ops/support_products.h"

#include "collective.h"
#include "vectors.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;     // per multiprocessor; without this bound, nvcc spills registers to fit a fourth block
constexpr int kBatch = 8;      // rows that a thread loads before it adds the first; must divide kWarp
constexpr int kStretch = 256;  // places that a block adds up, in 32 batches; a multiple of kWarp

template <class T>
bool is_aligned(const Matrix& matrix) {
  return misalignment(matrix.values) == 0 && matrix.stride % kPerVector<T> == 0;
}

// Loads a vector from a row of `columns` elements. Elements past the end of the row are 0.
template <class T>
__device__ uint4 load_elements(const T* row, int64_t first, int64_t columns, bool aligned) {
  if (aligned && first + kPerVector<T> <= columns) return load_cached(reinterpret_cast<const uint4*>(row + first));
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  uint32_t w[4] = {};
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i)
    if (first + i < columns) w[i / kPerWord] |= bits_of(row[first + i]) << i % kPerWord * 16;
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// The index of a matrix row, and the factor for this row. If `row` is -1, there is no term.
struct Term {
  int32_t row = -1;
  float factor = 0.f;
};

// Writes sums to memory, or adds them to the values in memory, 16 bytes at a time.
template <class T, class To>
__device__ void write_vector(const float (&sums)[kPerVector<T>], To* to, bool add) {
  constexpr int kVector = kPerVector<To>;
#pragma unroll
  for (int begin = 0; begin < kPerVector<T>; begin += kVector) {
    auto* at = reinterpret_cast<uint4*>(to + begin);
    float values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = sums[begin + i];
    int i = 0;
    if (add) for_elements<To>(load_plain(at), [&](float old) { values[i++] += old; });
    store_plain(at, vector_of<To>(values));
  }
}

// Like write_vector(), but for the columns of a row from `first` on. There may be fewer such columns than sums.
template <class T, class To>
__device__ void write_sums(const float (&sums)[kPerVector<T>], To* row, int64_t first, int64_t columns, bool add,
                           bool aligned) {
  if (aligned && first + kPerVector<T> <= columns) {
    write_vector<T>(sums, row + first, add);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerVector<T>; ++i)
    if (first + i < columns) row[first + i] = from_float<To>(sums[i] + (add ? to_float(row[first + i]) : 0.f));
}

// The sums of one thread over several rows of a matrix. A thread has the columns of one vector.
template <class T>
struct ColumnSums {
  float sums[kPerVector<T>] = {};
  float of_factors = 0.f;
  int64_t first, columns;

  __device__ ColumnSums(int64_t piece, int64_t columns)
      : first((piece * blockDim.x + threadIdx.x) * kPerVector<T>), columns(columns) {}

  // Adds term_at(begin), ..., term_at(end - 1), in this order. All lanes of a warp call this. Each lane looks up a
  // different term, so that 32 terms are read at the same time.
  template <class TermAt>
  __device__ void add_terms(const Matrix& matrix, bool aligned, int64_t begin, int64_t end, const TermAt& term_at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const bool wide = aligned && first + kPerVector<T> <= columns;
    for (int64_t i = begin; i < end; i += kWarp) {
      const Term own = i + lane < end ? term_at(i + lane) : Term();
      const int count = kWarp - __clz(static_cast<int>(__ballot_sync(kAllLanes, own.row >= 0)));
      for (int of_lane = 0; of_lane < count; of_lane += kBatch) add_batch(matrix, wide, own, of_lane);
    }
  }
  // Adds the terms that kBatch lanes, from `of_lane` on, have looked up.
  __device__ void add_batch(const Matrix& matrix, bool wide, const Term& own, int of_lane) {
    Term terms[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      terms[j].row = __shfl_sync(kAllLanes, own.row, of_lane + j);
      terms[j].factor = __shfl_sync(kAllLanes, own.factor, of_lane + j);
      of_factors += terms[j].factor;
    }
    if (wide)
      add_vectors(matrix, terms);
    else
      add_elements(matrix, terms);
  }
  __device__ void add_vectors(const Matrix& matrix, const Term (&terms)[kBatch]) {
    uint4 x[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const auto* from = reinterpret_cast<const uint4*>(row_of<T>(matrix, terms[j].row) + first);
      x[j] = terms[j].row >= 0 ? load_cached(from) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      int i = 0;
      for_elements<T>(x[j], [&](float value) { sums[i] = fmaf(terms[j].factor, value, sums[i]), ++i; });
    }
  }
  __device__ void add_elements(const Matrix& matrix, const Term (&terms)[kBatch]) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (terms[j].row < 0) continue;
      const T* row = row_of<T>(matrix, terms[j].row);
#pragma unroll
      for (int i = 0; i < kPerVector<T>; ++i)
        if (first + i < columns) sums[i] = fmaf(terms[j].factor, to_float(row[first + i]), sums[i]);
    }
  }
  __device__ void add_sums(const float* row) {
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i)
      if (first + i < columns) sums[i] += row[first + i];
  }

  template <class To>
  __device__ void write(To* row, bool add, bool aligned) const {
    write_sums<T>(sums, row, first, columns, add, aligned);
  }
};

// The columns of a row are divided among pieces_of() blocks of threads_for() threads, one vector for each thread. All
// blocks have the same number of warps, so that no warp is idle.
template <class T>
int64_t warps_of(int64_t columns) {
  const int64_t warps = ceil_div(ceil_div(columns, kPerVector<T>), kWarp);
  return warps > 0 ? warps : 1;
}
template <class T>
uint32_t pieces_of(int64_t columns) {
  return static_cast<uint32_t>(ceil_div(warps_of<T>(columns), kThreads / kWarp));
}
template <class T>
int threads_for(int64_t columns) {
  return static_cast<int>(ceil_div(warps_of<T>(columns), pieces_of<T>(columns))) * kWarp;
}

// The sums of the stretches of long runs. A run is the places of one support or id, and is long if it has more than
// kStretch places. Each stretch has a slot for `columns` floats and the sum of its factors. The index of a run's first
// slot is the number of half stretches before the run. A run of n stretches, of which the last may be short, covers at
// least n half stretches, so two runs never use the same slot.
struct StretchSums {
  float *sums = nullptr, *of_factors = nullptr;
  int64_t columns = 0;

  StretchSums(int64_t places, int64_t columns, Device& device) : columns(columns) {
    if (places <= kStretch) return;
    const int64_t stretches = places / (kStretch / 2) + 1;
    sums = device.scratch_of<float>(stretches * columns);
    of_factors = device.scratch_of<float>(stretches);
  }
  // Returns the slot of the n-th stretch of the run that begins at place `run`.
  __device__ int64_t at(int64_t run, int64_t n) const { return run / (kStretch / 2) + n; }

  template <class T>
  __device__ void keep(int64_t stretch, const ColumnSums<T>& total) const {
    total.template write<float>(sums + stretch * columns, false, false);
    if (total.first == 0) of_factors[stretch] = total.of_factors;
  }
  template <class T>
  __device__ ColumnSums<T> joined(int64_t run, int64_t places, int64_t piece) const {
    ColumnSums<T> total(piece, columns);
    const int64_t count = ceil_div(places, kStretch);
#pragma unroll 2
    for (int64_t n = 0; n < count; ++n) {
      total.add_sums(sums + at(run, n) * columns);
      total.of_factors += of_factors[at(run, n)];
    }
    return total;
  }
};

}  // namespace

}  // namespace d3s
