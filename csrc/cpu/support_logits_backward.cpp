// Computes the gradient of support logits. The rows are divided among the threads. No two rows share a place, so no two
// threads write to the same place.
#include "../ops/support_logits_backward.h"

#include <algorithm>

#include "../torch_abi.h"
#include "support_row.h"

namespace d3s {
namespace {

constexpr int64_t kGrain = 32768;  // the minimum number of support logits for a thread

// Writes the gradient at the places of a row. Each thread has one such object.
class RowOfPlaces {
 public:
  RowOfPlaces(const SupportRows& rows, const RowGradients& gradients, float softcap, const SupportGradientOutput& out)
      : rows_(rows),
        gradients_(gradients),
        out_(out),
        softcap_(softcap),
        loops_(softmax_rows().of(Tag<float>())),
        support_(rows) {}

  void write(int64_t row) {
    out_.undefined[row] = false;
    const float g_logprob = gradients_.of_logprob(row, rows_.labels), g_entropy = gradients_.of_entropy(row);
    if (rows_.masked_out(row) || rows_.supports[row].size == 0 || (g_logprob == 0.f && g_entropy == 0.f)) return;
    support_.read(row);
    const bool undefined = gradients_.any_nan(row, rows_.labels) || (g_logprob != 0.f && !support_.set.has_label);
    out_.undefined[row] = undefined;
    if (support_.set.single() && !undefined) return;
    for (const int64_t place : support_.places()) {
      const int64_t token = place < rows_.supports.count ? rows_.supports.tokens[place] : rows_.labels[row];
      out_.rows[place] = static_cast<int32_t>(row);
      out_.tokens[place] = static_cast<int32_t>(rows_.column(token));
      out_.grad[place] = NAN;
    }
    if (!undefined) write_gradient(row, g_logprob, g_entropy);
  }

 private:
  void write_gradient(int64_t row, float g_logprob, float g_entropy) {
    const RowStatistics statistics = gradients_.statistics(row);
    const float temperature = rows_.temperatures[row];
    const GradientLine line = gradient_line(g_logprob, g_entropy, statistics, temperature);
    support_.write_gradient(loops_, {statistics.max, kLog2E / temperature, line.offset, line.slope}, out_.grad);
    if (support_.label_in_tile())
      out_.grad[support_.label_place()] = label_gradient(line, support_.label_logit() - statistics.max, temperature);
    if (softcap_ > 0.f)
      for (const int64_t place : support_.places())
        out_.grad[place] *= softcap_slope(static_cast<const float*>(rows_.logits)[place], softcap_);
  }

  const SupportRows& rows_;
  const RowGradients& gradients_;
  const SupportGradientOutput& out_;
  const float softcap_;
  const SoftmaxLoops<float>& loops_;
  SupportRow<float> support_;
};

}  // namespace

void support_gradients(const SupportRows& rows, const RowGradients& gradients, float softcap,
                       const SupportGradientOutput& out, Device&) {
  const int64_t count = rows.layout.count, places = rows.supports.count + count;
  std::fill(out.grad, out.grad + places, 0.f);
  std::fill(out.rows, out.rows + places, -1);
  std::fill(out.tokens, out.tokens + places, 0);
  parallel_for(count, 1 + kGrain * count / (places + 1), [&](int64_t begin, int64_t end) {
    RowOfPlaces places_of_row(rows, gradients, softcap, out);
    for (int64_t row = begin; row < end; ++row) places_of_row.write(row);
  });
}

}  // namespace d3s
