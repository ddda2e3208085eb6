// Products of the kept rows of an LM head's weight.
//
//   launch                        kernel          reads                                -> writes
//   kept_logits (offsets)         check_offsets   offsets                              -> bad
//   kept_logits                   place_logits    hidden, weight, spans, labels, bad   -> out
//   kept_hidden_grad_ (offsets)   check_offsets   offsets                              -> bad
//   kept_hidden_grad_             sum_rows        grad, weight, rows, tokens           -> out, sums of long spans
//   kept_hidden_grad_ (rows)      finish_rows     undefined, sums, bad                 -> out
//   kept_weight_grad_ (entries)   make_entries    rows, tokens                         -> entries, indices
//   kept_weight_grad_ (sort)      CUB             entries, indices                     -> the same, by token
//   kept_weight_grad_             sum_tokens      grad, hidden, entries, indices       -> out, sums of frequent tokens
//   kept_weight_grad_ (long)      join_tokens     sums                                 -> out
//
// A sum over more than kStretch places, of a long span or a frequent token, is shared between blocks. It is cut from
// its own first place on, so that its bits depend on nothing else.
#include "../ops/kept_products.h"

#include "collective.h"
#include "segment_sort.h"
#include "vectors.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;  // that share a multiprocessor. Without the bound, nvcc spills to fit a fourth
constexpr int kPlacesOfBlock = kThreads / kWarp;
constexpr int kInFlight = 4;   // vectors of either row that a thread loads before it uses the first
constexpr int kBatch = 8;      // rows that a thread loads before it adds the first; divides kWarp
constexpr int kStretch = 512;  // places that a block adds: 64 batches, some 50 us; a multiple of kWarp

// A vector of a row of `columns` elements; 0 past its end.
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

template <class T>
bool is_aligned(const Matrix& matrix) {
  return misalignment(matrix.values) == 0 && matrix.stride % kPerVector<T> == 0;
}

constexpr int kCheckers = 1024;

// Whether offsets are bad. One block: offsets are few.
__global__ void check_offsets(const __grid_constant__ Spans spans, int64_t rows, int* bad,
                              const __grid_constant__ Faults faults) {
  int any = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kCheckers) any |= !spans.good(row);
  any = __syncthreads_or(any);
  if (threadIdx.x > 0) return;
  *bad = any != 0;
  if (any) faults.note(Fault::kSamplingMask);
}

const int* any_bad(const Spans& spans, int64_t rows, const char* name, Device& device) {
  int* bad = device.scratch_of<int>(1);
  launch(name, check_offsets, 1, kCheckers, 0, device, spans, rows, bad, device.faults);
  return bad;
}

// ---- forward ---------------------------------------------------------------------------------------------------

struct Needed {
  int64_t row, token;  // a row of the weight; -1 if no logit is needed
};

// What a place stands for. All lanes of a warp call this with the same place.
__device__ inline Needed needed_at(const KeptHead& head, int64_t place, int lane) {
  const bool of_label = place >= head.spans.count;
  const int64_t row = of_label ? place - head.spans.count : head.spans.row_at(place, head.hidden.rows);
  if (row < 0 || head.masked_out(row)) return {row, -1};
  const Span span = head.spans[row];
  if (!of_label) return {row, head.single(row, span) ? -1 : head.in_shard(head.spans.tokens[place])};
  if (!head.may_join(row, span)) return {row, -1};
  int found = 0;
#pragma unroll 8
  for (int64_t i = lane; i < span.size; i += kWarp) found |= span.tokens[i] == head.labels[row];
  return {row, warp_reduce(found, Max()) ? -1 : head.in_shard(head.labels[row])};
}

// A warp for each place, so that long spans take no longer than short ones. The order of the sum depends on the number
// of columns alone.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    place_logits(const __grid_constant__ KeptHead head, const int* bad, bool aligned, float* out) {
  constexpr int kStep = kWarp * kPerVector<T>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t place = int64_t{blockIdx.x} * kPlacesOfBlock + threadIdx.x / kWarp, columns = head.hidden.columns;
  if (place >= head.places()) return;
  const Needed needed = needed_at(head, place, lane);
  if (*bad || needed.token < 0) {
    if (lane == 0) out[place] = *bad ? NAN : -INFINITY;
    return;
  }
  const T *a = row_of<T>(head.hidden, needed.row), *b = row_of<T>(head.weight, needed.token);
  float sum = 0.f;
  const auto add = [&](int64_t begin, const auto& load) {
    uint4 x[kInFlight], y[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t first = begin + j * kStep + lane * kPerVector<T>;
      x[j] = load(a, first);
      y[j] = load(b, first);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      float left[kPerVector<T>];
      int i = 0;
      for_elements<T>(x[j], [&](float value) { left[i++] = value; });
      i = 0;
      for_elements<T>(y[j], [&](float value) { sum = fmaf(left[i++], value, sum); });
    }
  };
  int64_t begin = 0;
  for (; aligned && begin + kStep * kInFlight <= columns; begin += kStep * kInFlight)
    add(begin, [](const T* row, int64_t first) { return load_cached(reinterpret_cast<const uint4*>(row + first)); });
  for (; begin < columns; begin += kStep * kInFlight)
    add(begin, [&](const T* row, int64_t first) { return load_elements(row, first, columns, aligned); });
  sum = warp_reduce(sum, Sum());
  if (lane == 0) out[place] = head.logit(sum, needed.token);
}

// ---- sums over places ------------------------------------------------------------------------------------------

// A row of a matrix that counts some times; -1 for none.
struct Term {
  int32_t row = -1;
  float factor = 0.f;
};

// What a thread adds up: the same columns of several rows of a matrix.
template <class T>
struct ColumnSums {
  float sums[kPerVector<T>] = {};
  float of_factors = 0.f;
  int64_t first, columns;

  __device__ ColumnSums(int64_t piece, int64_t columns)
      : first((piece * blockDim.x + threadIdx.x) * kPerVector<T>), columns(columns) {}

  // Adds term_at(begin), term_at(begin + 1), ... before `end`, in this order. All lanes of a warp call this: each looks
  // up another term, so that what leads to 32 rows is read at the same time.
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
  // The terms of a lane and of those after it.
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

  // Writes the sums, or adds them to what is there.
  template <class To>
  __device__ void write(To* row, bool add, bool aligned) const {
    constexpr int kVector = kPerVector<To>;
    if (aligned && first + kPerVector<T> <= columns) {
#pragma unroll
      for (int begin = 0; begin < kPerVector<T>; begin += kVector) {
        auto* to = reinterpret_cast<uint4*>(row + first + begin);
        float values[kVector];
        for (int i = 0; i < kVector; ++i) values[i] = sums[begin + i];
        int i = 0;
        if (add) for_elements<To>(load_plain(to), [&](float old) { values[i++] += old; });
        *to = vector_of<To>(values);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kPerVector<T>; ++i)
      if (first + i < columns) row[first + i] = from_float<To>(sums[i] + (add ? to_float(row[first + i]) : 0.f));
  }
};

// Threads of a block, and blocks of a row, of which each thread has one vector.
template <class T>
int threads_for(int64_t columns) {
  const int64_t warps = ceil_div(ceil_div(columns, kPerVector<T>), kWarp);
  return static_cast<int>(warps < 1 ? 1 : warps < kThreads / kWarp ? warps : kThreads / kWarp) * kWarp;
}
template <class T>
uint32_t pieces_of(int64_t columns) {
  const auto pieces = static_cast<uint32_t>(ceil_div(columns, int64_t{threads_for<T>(columns)} * kPerVector<T>));
  return pieces > 0 ? pieces : 1;
}

// The sums of those runs of places, each longer than a stretch, that are shared between blocks: `columns` floats and
// the sum of the factors for each stretch. A run has at most one stretch for each half stretch that it covers, so runs
// never meet.
struct StretchSums {
  float *sums = nullptr, *of_factors = nullptr;
  int64_t columns = 0;

  StretchSums(int64_t places, int64_t columns, Device& device) : columns(columns) {
    if (places <= kStretch) return;
    const int64_t stretches = places / (kStretch / 2) + 1;
    sums = device.scratch_of<float>(stretches * columns);
    of_factors = device.scratch_of<float>(stretches);
  }
  // Of the n-th stretch of the run that begins at a place.
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

// ---- the gradient of hidden states -----------------------------------------------------------------------------

// Stretches of all rows are numbered so that no scan is needed: a row may leave numbers out, and shares none.
__device__ inline int64_t first_stretch(const Segments& spans, int64_t row) {
  return spans.begin(row) / kStretch + row;
}
__device__ inline int64_t row_of_stretch(const Segments& spans, int64_t stretch) {
  int64_t low = 0, high = spans.count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (first_stretch(spans, middle) <= stretch)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;  // below 0 if offsets are bad
}

// A block for each stretch of a row's span, or for each piece of its columns.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_rows(const __grid_constant__ KeptGradient gradient, const __grid_constant__ Matrix weight,
             const __grid_constant__ Segments spans, uint32_t pieces, bool aligned, bool out_aligned,
             const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out) {
  const int64_t stretch = blockIdx.x / pieces, row = row_of_stretch(spans, stretch);
  if (row < 0) return;
  const int64_t n = stretch - first_stretch(spans, row), first = spans.begin(row), last = spans.end(row);
  const int64_t begin = first + n * kStretch, end = begin + kStretch < last ? begin + kStretch : last;
  if (begin >= end) return;
  ColumnSums<T> total(blockIdx.x % pieces, weight.columns);
  const auto term_at = [&](int64_t place) {
    const bool counts = gradient.rows[place] == row && gradient.has(place, spans.count, weight.rows);
    return counts ? Term{gradient.tokens[place], gradient.grad[place]} : Term();
  };
  total.add_terms(weight, aligned, begin, end, term_at);
  if (end == last) total.add_terms(weight, aligned, spans.limit + row, spans.limit + row + 1, term_at);
  if (last - first > kStretch)
    stretches.keep(stretches.at(first, n), total);
  else
    total.write(row_of<To>(out, row), false, out_aligned);
}

// Rows that are undefined, wherever bad offsets have put them; and rows of several stretches. Where offsets are bad,
// some stretches belong to no row and are not summed. All rows with a gradient are undefined then.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    finish_rows(const __grid_constant__ Segments spans, const int* bad, const bool* undefined, uint32_t pieces,
                bool out_aligned, const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out) {
  const int64_t row = blockIdx.x / pieces, piece = blockIdx.x % pieces, places = spans.end(row) - spans.begin(row);
  if (!undefined[row] && places <= kStretch) return;
  ColumnSums<T> total(piece, out.columns);
  if (undefined[row]) {
    for (float& sum : total.sums) sum = NAN;
  } else if (!*bad) {
    total = stretches.joined<T>(spans.begin(row), places, piece);
  }
  total.write(row_of<To>(out, row), false, out_aligned);
}

// ---- the gradient of the weight --------------------------------------------------------------------------------

// The sort is by token; places without a gradient come last.
__global__ void make_entries(const __grid_constant__ KeptGradient gradient, int64_t rows, int64_t tokens,
                             uint64_t* entries, uint32_t* indices) {
  const int64_t place = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (place >= gradient.places) return;
  entries[place] = static_cast<uint64_t>(gradient.has(place, rows, tokens) ? gradient.tokens[place] : tokens);
  indices[place] = static_cast<uint32_t>(place);
}

// Places sorted by token. Those of a token are its run.
struct Runs {
  SortedEntries sorted;
  int64_t count;

  __device__ bool has(int64_t i, int64_t token) const {
    return i >= 0 && i < count && static_cast<int64_t>(sorted.entries[i]) == token;
  }
  // The first entry in [low, high) of which `past` is true, or `high`.
  template <class Past>
  __device__ int64_t first_from(int64_t low, int64_t high, const Past& past) const {
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (past(static_cast<int64_t>(sorted.entries[middle])))
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
  // The beginning of a token's run, which has entry i; and its end.
  __device__ int64_t begin(int64_t i, int64_t token) const {
    return first_from(0, i, [&](int64_t other) { return other >= token; });
  }
  __device__ int64_t end(int64_t i, int64_t token) const {
    return first_from(i, count, [&](int64_t other) { return other > token; });
  }
};

template <class T, class To>
__device__ void add_to_token(const ColumnSums<T>& total, const Matrix& out, const Vector& bias_out, int64_t token,
                             bool aligned) {
  total.write(row_of<To>(out, token), true, aligned);
  if (bias_out.values && total.first == 0) bias_out.add(token, total.of_factors);
}

// A block for each sorted place, or for each piece of the columns. Those where no stretch of a run begins end at once.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_tokens(const __grid_constant__ KeptGradient gradient, const __grid_constant__ Matrix hidden,
               const __grid_constant__ Runs runs, uint32_t pieces, bool aligned, bool out_aligned,
               const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out,
               const __grid_constant__ Vector bias_out) {
  const int64_t first = blockIdx.x / pieces, token = static_cast<int64_t>(runs.sorted.entries[first]);
  if (token >= out.rows) return;
  int64_t run = first;
  if (runs.has(first - 1, token)) {
    if (!runs.has(first - kStretch, token)) return;  // most places, without a search
    run = runs.begin(first - kStretch, token);
    if ((first - run) % kStretch != 0) return;
  }
  ColumnSums<T> total(blockIdx.x % pieces, hidden.columns);
  const auto term_at = [&](int64_t i) {
    if (!runs.has(i, token)) return Term();
    const uint32_t place = runs.sorted.indices[i];
    return Term{gradient.rows[place], gradient.grad[place]};
  };
  for (int64_t i = first; i < first + kStretch && runs.has(i, token); i += kWarp)
    total.add_terms(hidden, aligned, i, i + kWarp, term_at);
  if (runs.has(run + kStretch, token))
    stretches.keep(stretches.at(run, (first - run) / kStretch), total);
  else
    add_to_token<T, To>(total, out, bias_out, token, out_aligned);
}

// A block for each multiple of a stretch among the sorted places: a long run has at least one, and the first does it.
template <class T, class To>
__global__ void __launch_bounds__(kThreads, kBlocks)
    join_tokens(const __grid_constant__ Runs runs, uint32_t pieces, bool out_aligned,
                const __grid_constant__ StretchSums stretches, const __grid_constant__ Matrix out,
                const __grid_constant__ Vector bias_out) {
  const int64_t i = blockIdx.x / pieces * kStretch, token = static_cast<int64_t>(runs.sorted.entries[i]);
  if (token >= out.rows || runs.has(i - kStretch, token)) return;
  const int64_t run = runs.begin(i, token), places = runs.end(i, token) - run;
  if (places <= kStretch) return;
  add_to_token<T, To>(stretches.joined<T>(run, places, blockIdx.x % pieces), out, bias_out, token, out_aligned);
}

}  // namespace

void kept_logits(const KeptHead& head, float* out, Device& device) {
  if (head.places() == 0) return;
  const int* bad = any_bad(head.spans, head.hidden.rows, "kept_logits (offsets)", device);
  dispatch_float(head.hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("kept_logits", place_logits<T>, ceil_div(head.places(), kPlacesOfBlock), kThreads, 0, device, head, bad,
           is_aligned<T>(head.hidden) && is_aligned<T>(head.weight), out);
  });
}

void sum_for_rows(const KeptGradient& gradient, const Matrix& weight, const Segments& spans, const bool* undefined,
                  const Matrix& out, Device& device) {
  const Spans checked{nullptr, spans.limit, spans.offsets32, spans.offsets64};
  const int* bad = any_bad(checked, spans.count, "kept_hidden_grad_ (offsets)", device);
  dispatch_sum(weight, out, [&](auto tag, auto to_tag) {
    using T = typename decltype(tag)::type;
    using To = typename decltype(to_tag)::type;
    const uint32_t pieces = pieces_of<T>(weight.columns);
    const int threads = threads_for<T>(weight.columns);
    const bool aligned = is_aligned<T>(weight), out_aligned = is_aligned<To>(out);
    const StretchSums stretches(spans.limit, weight.columns, device);
    launch("kept_hidden_grad_", sum_rows<T, To>, (spans.limit / kStretch + spans.count) * pieces, threads, 0, device,
           gradient, weight, spans, pieces, aligned, out_aligned, stretches, out);
    launch("kept_hidden_grad_ (rows)", finish_rows<T, To>, spans.count * pieces, threads, 0, device, spans, bad,
           undefined, pieces, out_aligned, stretches, out);
  });
}

void add_for_tokens(const KeptGradient& gradient, const Matrix& hidden, const Matrix& out, const Vector& bias_out,
                    Device& device) {
  const int64_t n = gradient.places;
  if (n == 0 || (hidden.columns == 0 && !bias_out.values)) return;
  auto *entries = device.scratch_of<uint64_t>(n), *entries_spare = device.scratch_of<uint64_t>(n);
  auto *indices = device.scratch_of<uint32_t>(n), *indices_spare = device.scratch_of<uint32_t>(n);
  launch("kept_weight_grad_ (entries)", make_entries, ceil_div(n, kThreads), kThreads, 0, device, gradient, hidden.rows,
         out.rows, entries, indices);
  int bits = 1;
  while (out.rows >> bits) ++bits;
  const Runs runs{sort_entries(entries, entries_spare, indices, indices_spare, n, bits, device), n};
  dispatch_sum(hidden, out, [&](auto tag, auto to_tag) {
    using T = typename decltype(tag)::type;
    using To = typename decltype(to_tag)::type;
    const uint32_t pieces = pieces_of<T>(hidden.columns);
    const int threads = threads_for<T>(hidden.columns);
    const bool out_aligned = is_aligned<To>(out);
    const StretchSums stretches(n, hidden.columns, device);
    launch("kept_weight_grad_", sum_tokens<T, To>, n * pieces, threads, 0, device, gradient, hidden, runs, pieces,
           is_aligned<T>(hidden), out_aligned, stretches, out, bias_out);
    if (stretches.sums)
      launch("kept_weight_grad_ (long)", join_tokens<T, To>, ceil_div(n, kStretch) * pieces, threads, 0, device, runs,
             pieces, out_aligned, stretches, out, bias_out);
  });
}

}  // namespace d3s
