// The matrix products of an LM head, computed only for the ids of supports.
//
//   launch                          kernel         reads                                  -> writes
//   support_logits (offsets)        check_offsets  offsets                                -> bad
//   support_logits                  place_logits   hidden, weight, supports, labels, bad  -> out
//   support_hidden_grad_ (offsets)  check_offsets  offsets                                -> bad
//   support_hidden_grad_            sum_rows       grad, weight, rows, tokens             -> out, sums of long supports
//   support_hidden_grad_ (rows)     finish_rows    undefined, sums, bad                   -> out
//   support_weight_grad_ (entries)  make_entries   rows, tokens                           -> entries, indices
//   sort (its own launches)         sort_entries   entries, indices                       -> both, sorted by id
//   support_weight_grad_            sum_tokens     grad, hidden, entries, indices         -> out, sums of frequent ids
//   support_weight_grad_ (long)     join_tokens    sums                                   -> out
#include "support_hidden_grad.h"
#include "support_weight_grad.h"

namespace d3s {
namespace {

constexpr int kPlacesOfBlock = kThreads / kWarp;
constexpr int kInFlight = 4;  // a thread loads this many vectors of each of the two rows before it uses the first

constexpr int kCheckers = 1024;

// Sets `bad` to 1 if any offset is bad, and to 0 otherwise. One block is enough, since there are few offsets.
__global__ void check_offsets(const __grid_constant__ Supports supports, int64_t rows, int* bad,
                              const __grid_constant__ Faults faults) {
  int any = 0;
  for (int64_t row = threadIdx.x; row < rows; row += kCheckers) any |= !supports.good(row);
  any = __syncthreads_or(any);
  if (threadIdx.x > 0) return;
  *bad = any != 0;
  if (any) faults.note(Fault::kSupports);
}

const int* any_bad(const Supports& supports, int64_t rows, const char* name, Device& device) {
  int* bad = device.scratch_of<int>(1);
  launch(name, check_offsets, 1, kCheckers, 0, device, supports, rows, bad, device.faults);
  return bad;
}

struct Needed {
  int64_t row, token;  // `token`: the id, a row of the weight; -1 if no logit is needed
};

// Returns the row and the id of a place in the list of support logits. All lanes of a warp call this with the same
// place.
__device__ inline Needed needed_at(const SupportHead& head, int64_t place, int lane) {
  const bool of_label = place >= head.rows.supports.count;
  const int64_t row = of_label ? place - head.rows.supports.count : head.rows.supports.row_at(place, head.hidden.rows);
  if (row < 0 || head.rows.masked_out(row)) return {row, -1};
  const Support support = head.rows.supports[row];
  if (!of_label) return {row, head.single(row, support) ? -1 : head.rows.column(head.rows.supports.tokens[place])};
  if (!head.may_join(row, support)) return {row, -1};
  int found = 0;
#pragma unroll 8
  for (int64_t i = lane; i < support.size; i += kWarp) found |= support.tokens[i] == head.rows.labels[row];
  return {row, warp_reduce(found, Max()) ? -1 : head.rows.column(head.rows.labels[row])};
}

// There is one warp for each place, so that a long support takes no more time than a short support. The order of a
// logit's sum depends only on the number of columns.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    place_logits(const __grid_constant__ SupportHead head, const int* bad, bool aligned, float* out) {
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

}  // namespace

void support_logits(const SupportHead& head, float* out, Device& device) {
  if (head.places() == 0) return;
  const int* bad = any_bad(head.rows.supports, head.hidden.rows, "support_logits (offsets)", device);
  dispatch_float(head.hidden.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("support_logits", place_logits<T>, ceil_div(head.places(), kPlacesOfBlock), kThreads, 0, device, head, bad,
           is_aligned<T>(head.hidden) && is_aligned<T>(head.weight), out);
  });
}

void sum_for_rows(const SupportGradient& gradient, const Matrix& weight, const Segments& supports,
                  const bool* undefined, const Matrix& out, Device& device) {
  const Supports checked{nullptr, supports.limit, supports.offsets32, supports.offsets64};
  const int* bad = any_bad(checked, supports.count, "support_hidden_grad_ (offsets)", device);
  dispatch_sum(weight, out, [&](auto tag, auto to_tag) {
    using T = typename decltype(tag)::type;
    using To = typename decltype(to_tag)::type;
    const uint32_t pieces = pieces_of<T>(weight.columns);
    const int threads = threads_for<T>(weight.columns);
    const bool aligned = is_aligned<T>(weight), out_aligned = is_aligned<To>(out);
    const StretchSums stretches(supports.limit, weight.columns, device);
    launch("support_hidden_grad_", sum_rows<T, To>, (supports.limit / kStretch + supports.count) * pieces, threads, 0,
           device, gradient, weight, supports, pieces, aligned, out_aligned, stretches, out);
    launch("support_hidden_grad_ (rows)", finish_rows<T, To>, supports.count * pieces, threads, 0, device, supports,
           bad, undefined, pieces, out_aligned, stretches, out);
  });
}

void add_for_tokens(const SupportGradient& gradient, const Matrix& hidden, const Matrix& out, const Vector& bias_out,
                    Device& device) {
  const int64_t n = gradient.places;
  if (n == 0 || (hidden.columns == 0 && !bias_out.values)) return;
  auto *entries = device.scratch_of<uint64_t>(n), *entries_spare = device.scratch_of<uint64_t>(n);
  auto *indices = device.scratch_of<uint32_t>(n), *indices_spare = device.scratch_of<uint32_t>(n);
  launch("support_weight_grad_ (entries)", make_entries, ceil_div(n, kThreads), kThreads, 0, device, gradient,
         hidden.rows, out.rows, entries, indices);
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
    const int64_t long_blocks = n > kShort ? ceil_div(n, kShort) * pieces : 0;
    launch("support_weight_grad_", sum_tokens<T, To>, long_blocks + ceil_div(n, threads / kWarp), threads, 0, device,
           gradient, hidden, runs, static_cast<uint32_t>(long_blocks), pieces, is_aligned<T>(hidden), out_aligned,
           stretches, out, bias_out);
    if (stretches.sums)
      launch("support_weight_grad_ (long)", join_tokens<T, To>, ceil_div(n, kStretch) * pieces, threads, 0, device,
             runs, pieces, out_aligned, stretches, out, bias_out);
  });
}

}  // namespace d3s
