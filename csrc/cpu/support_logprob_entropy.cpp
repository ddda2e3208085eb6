// Computes the rows of logits that have a support. Temporary memory holds a list of the rows.
#include "../ops/support_logprob_entropy.h"

#include <algorithm>

#include "../torch_abi.h"
#include "support_row.h"

namespace d3s {
namespace {

// The minimum number of support logits for a thread. It is smaller than for whole rows, since each logit causes a cache
// miss.
constexpr int64_t kGrain = 1024;

// Calls body(support, row) for each row that is not masked out and has a support, after `support` has read the row.
template <class T, class Body>
void for_each_support(const SupportRows& rows, const Body& body) {
  std::vector<int64_t> which;
  for (int64_t row = 0; row < rows.layout.count; ++row)
    if (!rows.masked_out(row) && rows.supports[row].size != 0) which.push_back(row);
  const auto count = static_cast<int64_t>(which.size());
  const int64_t mean = 1 + rows.supports.count / (count + 1);
  parallel_for(count, 1 + kGrain / mean, [&](int64_t begin, int64_t end) {
    SupportRow<T> support(rows);
    for (int64_t i = begin; i < end; ++i) {
      support.read(which[i]);
      body(support, which[i]);
    }
  });
}

// If there are more rows without a support than the caller's bound, calls body(row) for each row that is not masked
// out, and returns true.
template <class Body>
bool enforce_bound(const SupportRows& rows, const Body& body) {
  if (!rows.exceeded || !*rows.exceeded) return false;
  for (int64_t row = 0; row < rows.layout.count; ++row)
    if (!rows.masked_out(row)) body(row);
  return true;
}

}  // namespace

void find_dense_rows(const Supports& supports, int64_t rows, const bool* mask, int64_t bound, bool* dense,
                     bool* exceeded, Device&) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    dense[row] = supports[row].size == 0 && (!mask || mask[row]);
    count += dense[row];
  }
  *exceeded = bound >= 0 && count > bound;
}

void support_statistics(const SupportRows& rows, const RowOutputs& outputs, Device&) {
  for (int64_t row = 0; row < rows.layout.count; ++row)
    if (rows.masked_out(row)) outputs.write(row, {0.f, 0.f, 0.f}, 0.f);
  if (enforce_bound(
          rows, [&](int64_t row) { outputs.write(row, {NAN, NAN, NAN}, rows.labels[row] == kNoTarget ? 0.f : NAN); }))
    return;
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const SoftmaxLoops<T>& loops = softmax_rows().of(tag);
    for_each_support<T>(rows, [&](SupportRow<T>& support, int64_t row) {
      if (support.set.single()) return outputs.write(row, {0.f, 0.f, 0.f}, 0.f);
      const float temperature = rows.temperatures[row];
      const RowStatistics statistics = finish(support.merge_into(SoftmaxState(), loops, temperature), temperature);
      outputs.write(row, statistics,
                    support.label_in_tile() ? log_probability(support.label_logit(), statistics, temperature) : 0.f);
    });
  });
}

void merge_supports(const SupportRows& rows, RowState* states, Device&) {
  if (enforce_bound(rows, [&](int64_t row) { states[row].dot = NAN; })) return;
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const SoftmaxLoops<T>& loops = softmax_rows().of(tag);
    for_each_support<T>(rows, [&](SupportRow<T>& support, int64_t row) {
      if (support.set.single()) {
        if (support.any_in_tile()) states[row] = RowState::of_single(support.label_in_tile());
        return;
      }
      states[row].set(support.merge_into(states[row].get(), loops, rows.temperatures[row]));
      if (support.label_in_tile()) states[row].label_logit = support.label_logit();
    });
  });
}

void add_support_gradients(const SupportRows& rows, const RowGradients& gradients, const GradientOutput& out, Device&) {
  dispatch_float(rows.type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const SoftmaxLoops<T>& loops = softmax_rows().of(tag);
    for_each_support<T>(rows, [&](SupportRow<T>& support, int64_t row) {
      const float g_logprob = gradients.of_logprob(row, rows.labels), g_entropy = gradients.of_entropy(row);
      if (g_logprob == 0.f && g_entropy == 0.f) return;
      T* gradient = static_cast<T*>(out.gradient) + out.layout.offset(row);
      if (gradients.any_nan(row, rows.labels)) {
        std::fill(gradient, gradient + rows.layout.columns, from_float<T>(NAN));
        return;
      }
      if (support.set.single()) return;
      const RowStatistics statistics = gradients.statistics(row);
      const float temperature = rows.temperatures[row];
      const GradientLine line = gradient_line(g_logprob, g_entropy, statistics, temperature);
      support.write_gradient(loops, {statistics.max, kLog2E / temperature, line.offset, line.slope}, gradient);
      if (support.label_in_tile())
        gradient[support.label_place()] =
            from_float<T>(label_gradient(line, support.label_logit() - statistics.max, temperature));
    });
  });
}

}  // namespace d3s
