// Computes the gradient of support logits.
//
//   launch                   kernel        reads                                -> writes
//   support_logits_backward  write_places  logits, supports, labels, gradients  -> grad, rows, tokens, undefined
//
// A warp handles a row with a short support, and a block handles a row with a long support.
#include "../ops/support_logits_backward.h"

#include "collective.h"
#include "softmax_rows.h"

namespace d3s {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;  // rows of a block
constexpr int kLongSupport = 1024;

struct Problem {
  SupportRows rows;
  RowGradients gradients;
  float softcap;
  SupportGradientOutput out;
};

// Writes the gradients of one row's places. A whole warp or block calls this. `label_found` tells whether the support
// contains the label.
__device__ void write_row(const Problem& problem, int64_t row, const Support& support, bool label_found, int thread,
                          int threads) {
  const SupportRows& rows = problem.rows;
  const RowGradients& gradients = problem.gradients;
  const SupportGradientOutput& out = problem.out;
  const int64_t label = rows.labels[row];
  const SupportSet set = rows.supports.set_of(support, label, rows.vocabulary, label_found, false);
  const bool no_label = gradients.of_logprob(row, rows.labels) != 0.f && !set.has_label;
  const bool undefined = set.bad || no_label || gradients.any_nan(row, rows.labels);
  if (thread == 0) out.undefined[row] = undefined;
  if (set.bad || (set.single() && !undefined)) return;
  const RowGradient f = gradient_of_row(rows, gradients, row);
  const float* logits = row_at<float>(rows, row);
  const auto write = [&](int64_t place, int64_t token) {
    const int64_t column = rows.column(token);
    if (column < 0) return;
    const float z = logits[place], gradient = token == label ? f.at_label(z) : f(z);
    out.grad[place] = undefined ? NAN : gradient * softcap_slope(z, problem.softcap);
    out.rows[place] = static_cast<int32_t>(row);
    out.tokens[place] = static_cast<int32_t>(column);
  };
  for (int64_t i = thread; i < support.size; i += threads) write(rows.supports.place(support, i), support.tokens[i]);
  if (thread == 0 && set.label_joins) write(rows.supports.place_of_label(row), label);
}

__device__ inline int part_has_label(const Support& support, int64_t label, int thread, int threads) {
  int found = 0;
#pragma unroll 4
  for (int64_t i = thread; i < support.size; i += threads) found |= support.tokens[i] == label;
  return found;
}

__global__ void __launch_bounds__(kThreads) write_places(const __grid_constant__ Problem problem) {
  const auto& [rows, gradients, softcap, out] = problem;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * kWarps, own = first_row + thread / kWarp;
  if (own < rows.layout.count) {
    const bool active = has_gradient(rows, gradients, own);
    const Support support = rows.supports[own];
    if (!active || support.size == 0) {
      if (lane == 0) out.undefined[own] = false;
    } else if (support.size <= kLongSupport) {
      const int found = warp_reduce(part_has_label(support, rows.labels[own], lane, kWarp), Max());
      write_row(problem, own, support, found != 0, lane, kWarp);
    }
  }
  for (int64_t row = first_row; row < first_row + kWarps && row < rows.layout.count; ++row) {
    const Support support = rows.supports[row];
    if (support.size <= kLongSupport || !has_gradient(rows, gradients, row)) continue;
    const int found = __syncthreads_or(part_has_label(support, rows.labels[row], thread, kThreads));
    write_row(problem, row, support, found != 0, thread, kThreads);
  }
}

}  // namespace

void support_gradients(const SupportRows& rows, const RowGradients& gradients, float softcap,
                       const SupportGradientOutput& out, Device& device) {
  const int64_t places = rows.supports.count + rows.layout.count;
  clear(out.grad, 0, places * static_cast<int64_t>(sizeof(float)), device);
  clear(out.rows, 0xff, places * static_cast<int64_t>(sizeof(int32_t)), device);
  clear(out.tokens, 0, places * static_cast<int64_t>(sizeof(int32_t)), device);
  launch("support_logits_backward", write_places, ceil_div(rows.layout.count, kWarps), kThreads, 0, device,
         Problem{rows, gradients, softcap, out});
}

}  // namespace d3s
